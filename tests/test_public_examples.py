"""What every public name must document, and the `>>>` examples in its docstring, which run."""

import dataclasses
import doctest
import importlib
import inspect
import re

import jax
import pytest

import jax_ep

MODULES = [
    "jax_ep",
    "jax_ep.sharding",
    "jax_ep.quantization",
    "jax_ep.placement",
    "jax_ep.checkpoints",
    "jax_ep.tracing",
    "jax_ep.routing",
]
# Public names that are not in the `__all__` of their module.
NAMES = {
    "jax_ep.types": [name for name in vars(jax_ep.types) if "Dispatched" in name or name.endswith("Handle")],
    "jax_ep.context": ["Context"],
    "jax_ep.ops.masked": ["masked_gated_activation"],
    "jax_ep.ops.moe_low_latency": ["low_latency_gemm_combine"],
}
NUM_DEVICES = 8
# Results are compared as text: allow other spaces and line breaks, and `...` for irrelevant parts.
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# `[T, H]`, `[]`, `[W * T, 2I]`, `[..., H // group_size]`: symbols of one or two letters, numbers and named sizes
SHAPE = re.compile(r"\[(?:\.\.\.|[A-Z\d]\w?|\w+_\w+|[ ,*/+-])*\]")
# Names that neither take nor return an array.
WITHOUT_ARRAYS = {
    "Schedule",
    "Router",
    "Balance",
    "MeshAxes",
    "init",
    "finalize",
    "Context",
    "record",
    "Recording",
    "merge",
}
SPECIFIED = {
    *("init", "finalize", "dispatch", "combine", "grouped_gemm", "dispatch_grouped_gemm", "grouped_gemm_combine"),
    *("moe", "fused_moe", "moe_sort", "low_latency_dispatch", "low_latency_combine"),
    *("topk_router", "load_balancing_loss", "router_z_loss", "update_router_bias"),
}


def _public():
    """Yield the public functions and classes of the package, each once."""
    found = {}
    for module_name in [*MODULES, *NAMES]:
        module = importlib.import_module(module_name)
        names = NAMES.get(module_name) or getattr(module, "__all__", None)
        for name in names or [name for name in vars(module) if not name.startswith("_")]:
            value = getattr(module, name)
            own = getattr(value, "__module__", "").startswith(module_name)  # Not what the module imports.
            if own and (inspect.isfunction(value) or inspect.isclass(value)):
                found.setdefault(value, f"{module_name}.{name}")
    return found


PUBLIC = _public()
FUNCTIONS = {value: name for value, name in PUBLIC.items() if inspect.isfunction(value)}
RESULTS = {
    value: name
    for value, name in PUBLIC.items()
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
}


def test_every_specified_name_is_public():
    assert SPECIFIED - set(jax_ep.__all__) == set()
    assert [name for name in jax_ep.__all__ if not hasattr(jax_ep, name)] == []
    assert len(set(jax_ep.__all__)) == len(jax_ep.__all__) <= 30


def test_docstrings_state_shapes():
    for value, name in PUBLIC.items():
        docstring = value.__doc__ or ""
        assert docstring.strip(), f"{name}: a public name needs a docstring"
        if value.__name__ not in WITHOUT_ARRAYS:
            assert SHAPE.search(docstring), f"{name}: state the shapes, for example `[T, H]`"


def test_docstrings_explain_every_argument():
    for function, name in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        assert [one for one in names if not re.search(rf"\b{one}\b", function.__doc__ or "")] == [], name


def test_docstrings_explain_every_field():
    for result, name in RESULTS.items():
        names = getattr(result, "_fields", None) or [field.name for field in dataclasses.fields(result)]
        assert [one for one in names if not re.search(rf"\b{one}\b", result.__doc__ or "")] == [], name


@pytest.mark.parametrize("function", FUNCTIONS, ids=FUNCTIONS.values())
def test_examples_run(function):
    """Self-contained: an example imports what it uses, and has eight devices."""
    assert jax.device_count() >= NUM_DEVICES
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert test.examples, "show a call with >>> prompts"
    if function not in (jax_ep.finalize, jax_ep.triton_call):  # nothing to show; tests/test_own_triton_kernel.py
        assert any(example.want.strip() for example in test.examples), "an example without a result proves nothing"
    output = []
    result = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=output.append)
    assert result.failed == 0, "".join(output)
