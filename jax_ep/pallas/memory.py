"""Words of both kernels: references, scalars, and the layout of shared memory."""

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
Scalar = Any  # int32, known or not
int32 = np.int32  # all scalars of a kernel, also where JAX makes int64 of Python's


def line(dtype: DTypeLike) -> int:
    """How many elements a line of shared memory has, of 128 bytes."""
    return LINE_BYTES // jnp.dtype(dtype).itemsize


def swizzling(dtype: DTypeLike) -> Any:
    """The layout of shared memory that the tensor cores read without conflicts."""
    return plgpu.TilingTransform((ALIGNMENT, line(dtype))), plgpu.SwizzleTransform(LINE_BYTES)  # type: ignore[abstract]


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory in that layout."""
    return plgpu.SMEM(shape, dtype, transforms=swizzling(dtype))


def vectors(number: int, length: int, dtype: DTypeLike) -> Any:
    """Shared memory for so many vectors, each of which begins where copies must.

    Interpreters do not mind where it does not; GPUs end the program.
    """
    return plgpu.SMEM((number, round_up(length, line(dtype))), dtype)


BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((ALIGNMENT, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""How a warpgroup holds blocks of 8 rows: four elements per thread and 64 columns, half a warp per row."""
