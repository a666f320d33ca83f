"""The second product of the experts and low-latency combine as one kernel, over the low-latency area of the heap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.collectives import Axis
from jax_ep.kernel import Config, Descriptor, Kernel
from jax_ep.layout import power_of_two
from jax_ep.megakernels import masked_tuning
from jax_ep.megakernels.capability import has_tma
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.heap_launch import launch_on_heap
from jax_ep.megakernels.low_latency import low_latency_places
from jax_ep.megakernels.masked_tuning import MaskedTiles
from jax_ep.types import Array, Layout, LowLatencyHandle

_KERNEL = Kernel("low_latency_gemm_combine", "low_latency_gemm_combine")
# Every (token, k) has a row of its own in the region of the rank that sends it.
MOST_ROWS = 4096
_BLOCK_H = 1024


def fuses_low_latency(layout: Layout, lhs_dtype: DTypeLike, dtype: DTypeLike, depth: int, columns: int) -> bool:
    """Whether the second product can send its rows itself: rows of `lhs_dtype` and results of `dtype`."""
    lhs_dtype, dtype = jnp.dtype(lhs_dtype), jnp.dtype(dtype)
    return (
        lhs_dtype in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16)
        and dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and depth > 0
        and depth * lhs_dtype.itemsize % 16 == 0
        and columns * dtype.itemsize % 16 == 0
        and layout.num_tokens * layout.top_k <= MOST_ROWS
        and has_tma()
    )


def low_latency_gemm_combine(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    topk_weights: Array,
    handle: LowLatencyHandle,
    lhs_scales: Array | None,
    rhs_scales: Array | None,
    axis: Axis,
    *,
    out_dtype: DTypeLike,
    expected_rows: int | None,
) -> Array:
    """`[L, W * M, I]` rows, `[L, H, I]` matrices and `[T, K]` weights to weighted sums `[T, H]`."""
    if handle.own_ids is None or handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    layout, (experts, rows, depth), hidden = handle.layout, lhs.shape, rhs.shape[1]
    actual, dtype = topk_weights.shape[0], jnp.dtype(out_dtype)
    result = jax.ShapeDtypeStruct((actual, hidden), dtype)
    tiles = masked_tuning.masked_tiles(rows, expected_rows, lhs.dtype.itemsize, dtype.itemsize)
    if actual == 0:
        return jnp.zeros_like(lhs, dtype=dtype, shape=result.shape)
    places, region_bytes = low_latency_places(VALUES_AT=actual * layout.top_k * hidden * dtype.itemsize)
    constants = constants_of(layout, actual, hidden, depth, tiles, lhs_scales is not None) | places
    operands = (
        Descriptor(lhs, (1, tiles.block_m, tiles.block_k)),
        Descriptor(rhs, (1, tiles.block_n, tiles.block_k)),
        group_sizes if lhs_scales is None else lhs_scales,
        group_sizes if rhs_scales is None else rhs_scales,
        group_sizes,
        handle.source_token,
        handle.source_start,
        handle.slot_row,
        handle.own_ids,
        topk_weights,
    )
    most_tasks = experts * -(-rows // tiles.block_m) * -(-hidden // tiles.block_n)
    config = Config(num_programs(most_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)
    context.reserve(_KERNEL.function, 0, region_bytes)
    return launch_on_heap(_KERNEL, operands, handle.group, (result,), config, constants, uses_data=False)[0]


def constants_of(
    layout: Layout, num_tokens: int, hidden: int, depth: int, tiles: MaskedTiles, fp8: bool
) -> dict[str, int]:
    """What the kernel is compiled for, but for places in the heap."""
    return {
        "T": num_tokens,
        "M": layout.num_tokens,
        "K": layout.top_k,
        "H": hidden,
        "L": layout.num_local_experts,
        "DEPTH": depth,
        "GROUPS": max(16, power_of_two(layout.num_local_experts)),
        "LANES": power_of_two(layout.num_ranks),
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "BLOCK_H": min(power_of_two(hidden), _BLOCK_H),
        "BLOCK_K": power_of_two(layout.top_k),
        "SWAP": tiles.swap,
        "FP8": fp8,
        "OPERATION": int(ffi.Operation.LOW_LATENCY_GEMM_COMBINE),
    }
