"""Calls of the user's own Triton kernels."""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import context
from jax_ep.core import check
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.kernel import Config, Kernel, element_type
from jax_ep.core.mesh_axes import platform, vary_alike
from jax_ep.types import Array
from jax_ep.values import shown, type_name

_NAME = "triton_call"
_TAKEN = frozenset({"out_shape", "grid", "num_warps", "num_stages", "max_registers", "warmup"})
_kernels: dict[int, Kernel] = {}  # by the identity of the function: programs share what is compiled of it


@check.errors_begin_with(_NAME)
def triton_call(
    kernel: Any,
    /,
    *operands: Array,
    out_shape: Any,
    grid: int,
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int | None = None,
    **constants: Any,
) -> Any:
    """Run a Triton kernel on the arrays of one device; works under `jit`, `shard_map`, `scan` and `vmap`.

    The parameters of the kernel that have no default, and that `constants` does not name, are pointers: one per
    operand, then one per result. Results are not initialized, and operands must not be written. Numbers are constants,
    or arrays of one element.
    The kernel is compiled by Triton on NVIDIA GPUs. On CPU devices it runs in Triton's interpreter, for tests, after
    `jax_ep.init(mesh, transport="shared_memory")`. There is no gradient: combine two kernels by `jax.custom_vjp`.

    Args:
      kernel: a function decorated by `triton.jit`.
      *operands: arrays; all addresses are multiples of 16 bytes.
      out_shape: a pytree of `jax.ShapeDtypeStruct`, the results.
      grid: number of programs, `tl.num_programs(0)`.
      num_warps: warps per program, a power of two up to 32.
      num_stages: depth of software pipelining.
      max_registers: register limit per thread, 16 to 255; None lets the compiler decide.
      **constants: the kernel's `tl.constexpr` parameters, by name: static, hashable values.

    Returns:
      Arrays in the structure of `out_shape`, which vary over the mesh axes over which an operand does.

    Raises:
      TypeError: no Triton kernel, no arrays, an unsupported dtype, a constant that is not static, or a gradient.
      ValueError: the number of operands and results does not fit the kernel's parameters; a number out of range; on CPU
        devices, a kernel that is not a global of its file.
      NotImplementedError: a platform without Triton.

    Example:
      Scale rows by a kernel with the parameters `x_ptr, factors_ptr, out_ptr, WIDTH, BLOCK`, one program per row.

      >>> like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)  # doctest: +SKIP
      >>> triton_call(scale, x, factors, out_shape=like_x, grid=len(x), WIDTH=x.shape[1], BLOCK=128)  # doctest: +SKIP
    """
    arrays = [_array(i, operand) for i, operand in enumerate(operands)]
    results, structure = jax.tree.flatten(out_shape)
    results = [_result(result) for result in results]
    described, constants = _kernel(kernel, len(arrays), len(results), constants)
    config = Config(
        check.integer(_NAME, "grid", grid),
        check.integer(_NAME, "num_warps", num_warps, most=32),
        check.integer(_NAME, "num_stages", num_stages, most=64),
        None if max_registers is None else check.integer(_NAME, "max_registers", max_registers, least=16, most=255),
    )
    if config.num_warps & (config.num_warps - 1):
        raise ValueError(f"{_NAME}: num_warps={num_warps}, expected a power of two; pass 4, for example.")
    _check_platform(kernel)
    from jax_ep.megakernels.launch import launch  # imports Triton

    def run(*arrays: Array) -> tuple[Array, ...]:
        found: tuple[Array, ...] = launch(described, arrays, results, config, constants)
        return found

    remedy = f"{_NAME} has no gradient: combine {described.name} and a kernel for its gradient by jax.custom_vjp."
    found = call_without_gradient(remedy, run, *vary_alike(tuple(arrays)))
    return jax.tree.unflatten(structure, found)


def _array(number: int, operand: Any) -> Array:
    remedy = "pass numbers as keyword constants"
    check.instance(_NAME, f"operand {number}", operand, jax.Array | np.ndarray, "an array", remedy=remedy)
    _check_dtype(f"operand {number}", operand.dtype)
    return check.array(_NAME, f"operand {number}", operand, "[...]")


def _result(result: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(getattr(result, "shape", None), tuple) or not hasattr(result, "dtype"):
        raise TypeError(
            f"{_NAME}: out_shape contains {type_name(result)}, expected jax.ShapeDtypeStruct; pass"
            " jax.ShapeDtypeStruct(shape, dtype), or a pytree of them."
        )
    dtype = _check_dtype("a result", result.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{_NAME}: a result has dtype {dtype}, expected one of at most 32 bits; pass one, or set jax_enable_x64."
        )
    shape = tuple(check.integer(_NAME, "a size in out_shape", size, least=0, most=2**63 - 1) for size in result.shape)
    if math.prod(shape) * dtype.itemsize >= 2**63:
        raise ValueError(
            f"{_NAME}: out_shape contains shape {shown(shape)} of {dtype}, expected fewer than 2**63 bytes; pass"
            " smaller sizes."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_dtype(what: str, dtype: Any) -> np.dtype:
    try:
        # Keys of jax.random have no NumPy dtype; JAX has no other byte order.
        found = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).newbyteorder("=")
        element_type(found)
    except TypeError as error:
        raise TypeError(f"{_NAME}: {what}: {str(error).rstrip('.')}; convert it.") from None
    return found


def _kernel(
    kernel: Any, num_operands: int, num_results: int, constants: dict[str, Any]
) -> tuple[Kernel, dict[str, Any]]:
    """Describe a kernel with all its constants, and check that its parameters fit the call."""
    names = getattr(kernel, "arg_names", None)
    if names is None or not inspect.isfunction(getattr(kernel, "fn", None)):
        raise TypeError(
            f"{_NAME}: kernel is {type_name(kernel)}, expected a function decorated by triton.jit; decorate it by this"
            " alone, and pass it without a grid in brackets."
        )
    if taken := sorted(_TAKEN.intersection(names)):
        raise TypeError(
            f"{_NAME}: {kernel.__name__} has parameters {taken}, expected other names, since {_NAME} or Triton take"
            " these; rename them."
        )
    unknown = sorted(constants.keys() - set(names))
    if unknown:
        raise TypeError(f"{_NAME}: {kernel.__name__} has no parameters {unknown}, only {list(names)}; leave them out.")
    parameters = inspect.signature(kernel.fn).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    constants = {name: _constant(name, value) for name, value in (defaults | constants).items()}
    pointers = [name for name in names if name not in constants]
    missing = [name for name in pointers if "constexpr" in str(parameters[name].annotation)]
    if missing:
        raise ValueError(f"{_NAME}: {kernel.__name__} has the constants {missing} without values; pass them by name.")
    if len(pointers) != num_operands + num_results or not num_results:
        raise ValueError(
            f"{_NAME}: {kernel.__name__} takes the pointers {pointers}, but there are {num_operands} operands and"
            f" {num_results} results; pass one of either for each pointer, at least one result, and numbers by name."
        )
    if "<" in inspect.getfile(kernel.fn):
        raise ValueError(f"{_NAME}: {kernel.__name__} is not in a file, from which Triton reads it; move it to one.")
    return _kernels.setdefault(id(kernel), Kernel(kernel)), constants


def _constant(name: str, value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{_NAME}: the constant {name} is {type_name(value)}, expected a static value; pass a number, or an array"
            " as an operand."
        ) from None
    if any(map(jax.export.is_symbolic_dim, jax.tree.leaves(value))):
        raise TypeError(
            f"{_NAME}: the constant {name} is {shown(value)}, a symbolic number, expected a static value; export one"
            " program per size."
        )
    return value.item() if isinstance(value, np.generic) else value


def _check_platform(kernel: Any) -> None:
    on = platform()
    if on == "cpu" and context.transport() != "shared_memory":
        raise NotImplementedError(
            f"{_NAME}: the platform is cpu, where kernels run in Triton's interpreter, for tests; call"
            ' jax_ep.init(mesh, transport="shared_memory") first.'
        )
    if on not in ("cpu", "gpu"):
        raise NotImplementedError(f"{_NAME}: the platform is {on}, expected NVIDIA GPUs; use plain JAX here.")
    name, module = kernel.__name__, sys.modules.get(kernel.fn.__module__)
    if on == "cpu" and getattr(module, name, None) is not kernel:
        raise ValueError(
            f"{_NAME}: {name} of {kernel.fn.__module__} is another object than this kernel, and Triton's interpreter"
            " finds kernels by name; define the kernel at the top level of its file, under another name."
        )
