"""What every public name must document, and the `>>>` examples in its docstring, which run."""

import doctest
import importlib
import inspect

import jax
import pytest

import jax_ep

MODULES = ["jax_ep", "jax_ep.lora", "jax_ep.integrations.qwix", "jax_ep.flax", "jax_ep.tuning"]
MODULES += [f"jax_ep.{n}" for n in ("sharding", "quantization", "placement", "checkpoints", "tracing", "routing")]
# Public names that are not in the `__all__` of their module.
NAMES = {
    "jax_ep.types": [name for name in vars(jax_ep.types) if "Dispatched" in name or name.endswith("Handle")],
    "jax_ep.context": ["Context"],
    "jax_ep.core.expert_matrices": ["LoraWeights"],
    "jax_ep.core.router": ["SharedExperts"],
    "jax_ep.settings.file": ["Rates", "Tuning"],
    "jax_ep.ops.masked": ["masked_gated_activation"],
    "jax_ep.ops.moe_low_latency": ["low_latency_gemm_combine"],
}
NUM_DEVICES = 8
# Results are compared as text: allow other spaces and line breaks, and `...` for irrelevant parts.
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


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
CLASSES = {value: name for value, name in PUBLIC.items() if inspect.isclass(value)}


def test_public_names_exist():
    assert [name for name in jax_ep.__all__ if not hasattr(jax_ep, name)] == []
    assert len(set(jax_ep.__all__)) == len(jax_ep.__all__) <= 30


@pytest.mark.parametrize("function", FUNCTIONS, ids=FUNCTIONS.values())
def test_examples_run(function):
    """Self-contained: an example imports what it uses, and has eight devices."""
    assert jax.device_count() >= NUM_DEVICES
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert test.examples, "show a call with >>> prompts"
    if function not in (jax_ep.finalize, jax_ep.triton_call):  # nothing to show; tests/test_own_triton_kernel.py
        assert any(example.want.strip() for example in test.examples), "an example without a result proves nothing"
    _run(test)


@pytest.mark.parametrize("cls", CLASSES, ids=CLASSES.values())
def test_examples_of_classes_run(cls):
    """Those that users construct, and their methods; functions return the others."""
    tests = [test for test in doctest.DocTestFinder().find(cls, cls.__name__, globs={}) if test.examples]
    returned = {*NAMES["jax_ep.types"], "Context", "MoESpecs", "Recording", "Trace", "RouterBias", "ServingArray"}
    assert cls.__name__ in {test.name for test in tests} | returned, "show how to construct it"
    for test in tests:
        _run(test)


def _run(test):
    output = []
    result = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=output.append)
    assert result.failed == 0, "".join(output)
