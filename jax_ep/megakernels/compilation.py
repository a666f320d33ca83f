"""Triton kernels to machine code, by Triton's own compiler and assembler."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.kernel import Config, Kernel

ALIGNMENT = 16
"""Bytes that all addresses are a multiple of, as the widest accesses of a thread need it."""

_TYPES = {
    np.dtype(dtype): name
    for dtype, name in (
        (jnp.bool_, "i1"),
        (jnp.int8, "i8"),
        (jnp.uint8, "u8"),
        (jnp.int16, "i16"),
        (jnp.uint16, "u16"),
        (jnp.int32, "i32"),
        (jnp.uint32, "u32"),
        (jnp.int64, "i64"),
        (jnp.uint64, "u64"),
        (jnp.float8_e4m3fn, "fp8e4nv"),
        (jnp.float8_e5m2, "fp8e5"),
        (jnp.bfloat16, "bf16"),
        (jnp.float16, "fp16"),
        (jnp.float32, "fp32"),
        (jnp.float64, "fp64"),
    )
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel that can be launched.

    Attributes:
      name: of the function in the code.
      code: cubin.
      shared_bytes: dynamic shared memory of a program.
    """

    name: str
    code: bytes
    shared_bytes: int


def device_capability() -> int:
    """Compute capability of this process's GPUs, 90 for an H200."""
    return round(10 * float(jax.local_devices()[0].compute_capability))


def compile_kernel(
    kernel: Kernel, dtypes: tuple[np.dtype, ...], config: Config, constants: dict[str, Any], capability: int
) -> Compiled:
    """Compiles a kernel whose parameters are addresses of arrays, then constants; once for equal arguments.

    Args:
      kernel: what to compile.
      dtypes: of the arrays, in the order of the parameters.
      config: its options count, the number of programs does not.
      constants: `tl.constexpr` parameters.
      capability: compute capability of the devices.
    """
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
    # Chosen here: where nobody chooses, Triton 3.9 warns.
    options["enable_fp_fusion"] = True
    return _compile(kernel, dtypes, tuple(options.items()), tuple(sorted(constants.items())), capability)


@functools.cache
def _compile(
    kernel: Kernel,
    dtypes: tuple[np.dtype, ...],
    options: tuple[tuple[str, Any], ...],
    constants: tuple[tuple[str, Any], ...],
    capability: int,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel.load()
    names = list(function.arg_names)
    values = {(names.index(name),): value for name, value in constants}
    arrays = [name for i, name in enumerate(names) if (i,) not in values]
    types = {name: "*" + _TYPES[dtype] for name, dtype in zip(arrays, dtypes, strict=True)}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in arrays}
    source = ASTSource(function, signature, values, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    if built.metadata.global_scratch_size:
        raise NotImplementedError(f"{kernel.function}: a kernel launched like this has no scratch memory")
    return Compiled(built.metadata.name, built.asm["cubin"], built.metadata.shared)
