"""What all kernels share: types of references and scalars, and layouts of shared memory and registers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.core.layout import round_up
from jax_ep.pallas.tiling import ALIGNMENT

WARPGROUP = "warpgroup"
LINE_BYTES = 128

Ref = Any
Scalar = Any  # int32, static or traced
Scratch = Any  # declares memory or barriers of a program
int32 = np.int32  # of all scalars in a kernel, so that x64 mode does not make them int64


def line(dtype: DTypeLike) -> int:
    """Return how many elements a 128-byte line of shared memory holds."""
    return LINE_BYTES // jnp.dtype(dtype).itemsize


def swizzling(dtype: DTypeLike) -> Any:
    """Return the layout of shared memory that the tensor cores read without bank conflicts."""
    return plgpu.TilingTransform((ALIGNMENT, line(dtype))), plgpu.SwizzleTransform(LINE_BYTES)  # type: ignore[abstract]


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Scratch:
    """Declare swizzled shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=swizzling(dtype))


def vectors(number: int, length: int, dtype: DTypeLike) -> Scratch:
    """Declare shared memory for `number` vectors, each of which begins where TMA copies may begin.

    GPUs end the program at a misaligned copy; the interpreter does not check it.
    """
    return plgpu.SMEM((number, round_up(length, line(dtype))), dtype)


BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((ALIGNMENT, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Register layout of blocks of 8 rows: four elements per thread and 64 columns, half a warp per row."""
