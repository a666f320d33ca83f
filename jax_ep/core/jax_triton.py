"""Kernel launches through jax-triton instead of the package's custom call (`init(launcher="jax-triton")`).

jax-triton passes each array as one kernel parameter, results last. Our kernels take NamedTuples, so this file generates
a Triton function with one parameter per array, which calls the kernel with the NamedTuples.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel, array_of, flat_arrays
from jax_ep.core.structs import flat, type_of
from jax_ep.types import Array

# The PTX version of CUDA 12.9, with which the oldest supported jaxlib is built. jaxlib assembles the PTX; by
# default Triton writes PTX for its bundled assembler, which may be newer.
_PTX_VERSION = 88


def load() -> Any:
    """Import jax-triton and adapt the installed version to the installed JAX.

    JAX 0.12 passes a third argument, the live inputs, to a primitive's dead-code rule. The rule of jax-triton 0.4.1
    takes two arguments. It keeps the whole call, which is correct for any live inputs.
    """
    import jax_triton

    for primitive, rule in list(partial_eval.dce_rules.items()):
        if rule.__module__ == "jax_triton.triton_lib" and len(inspect.signature(rule).parameters) == 2:
            partial_eval.dce_rules[primitive] = lambda used, *rest, rule=rule: rule(used, rest[-1])
    return jax_triton


def check() -> None:
    """Check that jax-triton can launch kernels here by lowering a small one.

    Raises:
      ImportError: jax-triton is not installed.
      RuntimeError: jax-triton does not work with the installed JAX.
      OSError: Triton has no folders that it can write.
    """
    try:
        _check_versions()
    except OSError as error:
        raise OSError(
            f"launcher='jax-triton' does not work here: Triton cannot write its files ({error}); set TMPDIR and"
            " TRITON_CACHE_DIR to folders with space, or leave launcher out."
        ) from error


def _check_versions() -> None:
    try:
        jax_triton = load()
    except ImportError as error:
        raise ImportError(
            "launcher='jax-triton' needs the package jax-triton, which cannot be imported here"
            f" ({error}); pip install '.[jax-triton]', or leave launcher out."
        ) from error
    try:
        _lower_a_kernel(jax_triton)
    except OSError:
        raise
    except Exception as error:  # Kernel launches would fail with the same error.
        raise RuntimeError(
            f"launcher='jax-triton' does not work here: jax-triton {jax_triton.__version__} with jax"
            f" {jax.__version__} fails in {type(error).__name__}: {error}; pip install '.[jax-triton]' chooses"
            " versions that fit each other, or leave launcher out."
        ) from error


@functools.cache  # Only success is cached.
def _lower_a_kernel(jax_triton: Any) -> None:
    copy = _compilable("copy", "def copy(x_ptr, out_ptr):\n    tl.store(out_ptr, tl.load(x_ptr))\n", {})
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    options = {"grid": (1,), "compute_capability": 90, "backend_options": _compiler_options(Config(1))}
    run = jax.jit(lambda x: jax_triton.triton_call(x, kernel=copy, out_type=one, **options))
    run.trace(one).lower(lowering_platforms=("cuda",))


def launch_kernel(
    kernel: Kernel,
    operands: Sequence[Argument],
    results: Sequence[Argument],
    config: Config,
    constants: Mapping[str, Any],
    *,
    capability: int,
    written: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Run a kernel on the CUDA device of this shard. It has no derivative; `jax.vmap` runs it once per element.

    Args:
      kernel, operands, results, config, constants: as for `megakernels.launch.launch`, without None among arrays.
      capability: compute capability of the devices.
      written: maps operands that the kernel updates in place to results, by position.

    Returns:
      One array per array of `results`, typed as replicated.

    Raises:
      NotImplementedError: a result has a descriptor.
    """
    _check_results(kernel, results)
    jax_triton = load()
    written, shapes = written or {}, flat_arrays(results)
    # Aliased results are no parameters and come last.
    order = sorted(range(len(shapes)), key=lambda i: i in written.values())
    types, described = tuple(map(type_of, (*operands, *results))), flat(operands)
    function = _flat_function(kernel, types, len(described), tuple(written.items()), tuple(sorted(constants)))

    @jax.custom_batching.sequential_vmap
    def run(*arrays: Array) -> list[Array]:
        # jax-triton recommends Refs, but `jax.checkpoint` does not support that effect.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
            found = jax_triton.triton_call(
                *(
                    jax_triton.TensorDescriptor(array, *argument.blocks) if isinstance(argument, Descriptor) else array
                    for argument, array in zip(described, arrays, strict=True)
                ),
                kernel=function,
                out_type=[jax.ShapeDtypeStruct(shapes[i].shape, shapes[i].dtype) for i in order],
                grid=(config.num_programs,),
                name=kernel.name,
                compute_capability=capability,
                backend_options=_compiler_options(config),
                input_output_aliases={operand: order.index(result) for operand, result in written.items()},
                **constants,
            )
        return [found[order.index(i)] for i in range(len(order))]

    return tuple(run(*map(array_of, described)))


def _check_results(kernel: Kernel, results: Sequence[Argument]) -> None:
    if any(isinstance(x, Descriptor) for x in flat(results)):
        raise NotImplementedError(
            f"{kernel.name}: a result is stored through a tensor descriptor, but jax-triton supports descriptors"
            " of operands only. Aliasing the result to an operand would give it a descriptor, but XLA may move such a"
            " result, for example into the stacked results of a scan. Use tiles without tma_store and gluon, or call"
            " jax_ep.init() without launcher."
        )


def _compiler_options(config: Config) -> dict[str, Any]:
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
    # Triton 3.9 warns if this is unset.
    return options | {"enable_fp_fusion": True, "ptx_version": _PTX_VERSION}


@functools.cache
def _flat_function(
    kernel: Kernel,
    types: tuple[Any, ...],
    num_operands: int,
    written: tuple[tuple[int, int], ...],
    constants: tuple[str, ...],
) -> Any:
    """Generate a Triton function with one parameter per array that calls the kernel. Cached: JAX needs equal functions.

    `types` are those of operands and results, from `type_of`. Results of `written`, whose operands the kernel updates,
    are no parameters. `num_operands` counts arrays, `constants` are names.
    """
    body, scope = kernel.body, dict[str, Any]()
    sizes = [1 if kind is None else len(kind._fields) for kind in types]
    names = [f"x{i}" for i in range(sum(sizes))]
    for operand, result in written:
        names[num_operands + result] = names[operand]
    rest, values = iter(names), dict[str, str]()
    scope["kernel"] = body
    for name, kind, size in zip((n for n in body.arg_names if n not in constants), types, sizes, strict=True):
        arrays = ", ".join(next(rest) for _ in range(size))
        values[name] = arrays if kind is None else f"{kind.__name__}({arrays})"
        scope |= {} if kind is None else {kind.__name__: kind}
    values |= {name: name for name in constants}
    parameters = [*dict.fromkeys(names), *(f"{name}: tl.constexpr" for name in constants)]
    call = ", ".join(f"{name}={value}" for name, value in values.items())
    source = f"def {kernel.name}({', '.join(parameters)}):\n    kernel({call})\n"
    return _compilable(kernel.name, source, scope)


def _compilable(name: str, source: str, scope: dict[str, Any]) -> Any:
    """Compile source code into a `triton.jit` function, and register the source so that Triton can read it."""
    import triton
    import triton.language as tl

    file = f"<jax_ep {name} {zlib.crc32(source.encode())}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope["tl"] = tl
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])
