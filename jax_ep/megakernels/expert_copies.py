"""Copies of experts' weights on other ranks, and the gradients of the copies back home, by peer memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import context, ffi
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.mesh_axes import Axis, rank_on, vary_alike, varying_axes
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels.exchange import pad_columns
from jax_ep.megakernels.kernels import expert_copies as kernels
from jax_ep.megakernels.kernels.exchange_structs import ExpertMoves
from jax_ep.megakernels.launch import group_on, launch, num_programs
from jax_ep.types import Array

_MOVE = Kernel(kernels.move_experts, ffi.Operation.DISPATCH)
_BLOCK_BYTES = 32 * 1024


def fetch_copies(axis: Axis, copies: Array, w: Array) -> Array:
    """Return the weights `[S, ...]` of the experts that `copies [W, S]` says, zero in free slots, from `w [L, ...]`."""
    source = jnp.where(copies >= 0, copies // w.shape[0], -1)
    return _move(axis, (source, copies % w.shape[0], *jnp.indices(copies.shape, jnp.int32)), w, copies.shape[1])


def add_gradients(axis: Axis, copies: Array, home: Array, spare: Array) -> Array:
    """See xla/expert_copies.py; the order is that of the ranks that held copies, and of their slots."""
    flat, num_local, wide = copies.reshape(-1), home.shape[0], accumulation_dtype(home.dtype)
    source = jnp.where(flat >= 0, flat // num_local, -1)
    # Place: how many copies with the same home come first, in order of their experts.
    is_first = (flat[None] < flat[:, None]) | ((flat[None] == flat[:, None]) & jnp.tri(flat.size, k=-1, dtype=bool))
    place = jnp.sum(is_first & (source[:, None] == source[None]), axis=1, dtype=jnp.int32)
    ranks, slots = jnp.indices(copies.shape, jnp.int32)
    targets, places = source.reshape(copies.shape), place.reshape(copies.shape)
    returned = _move(axis, (jnp.where(targets >= 0, ranks, -1), slots, targets, places), spare, flat.size)
    mine = source == rank_on(axis)
    experts, count = jnp.sort(jnp.where(mine, flat % num_local, num_local)), jnp.sum(mine, dtype=jnp.int32)

    def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, home, total = state
        expert = experts[i]
        goes_on = (i > 0) & (expert == experts[i - 1])
        total = jnp.where(goes_on, total, home[expert].astype(wide)) + returned[i].astype(wide)
        return i + 1, home.at[expert].set(total.astype(home.dtype)), total

    # Few ranks get any, so adding them one by one, in place, reads and writes least.
    start = jnp.zeros((), jnp.int32), home, jnp.zeros(home.shape[1:], wide)
    start, count, experts, returned = vary_alike((start, count, experts, returned))
    return lax.while_loop(lambda state: state[0] < count, add, start)[1]


def _move(axis: Axis, moves: tuple[Array, ...], x: Array, num_targets: int) -> Array:
    rows = pad_columns(x.reshape(x.shape[0], -1))
    elements, itemsize = rows.shape[1], x.dtype.itemsize
    block = _BLOCK_BYTES // itemsize
    while -(-elements // block) * num_targets > MAX_BLOCKS:
        block *= 2
    blocks = -(-elements // block)
    sizes = ExpertMoves(moves[0].size, num_targets, elements, block, blocks)
    try:
        context.reserve(_MOVE.name, num_targets * elements * itemsize)
    except ValueError as error:
        raise ValueError(f"{error} Or pass a smaller Balance(spare_experts=), which bounds the copies.") from error
    operands = (rows, jnp.stack([part.reshape(-1).astype(jnp.int32) for part in moves], axis=1))
    results = (jax.ShapeDtypeStruct((num_targets, elements), x.dtype),)
    config = Config(num_programs(moves[0].size * blocks, 2), num_warps=8)
    group = group_on(axis, varying_axes(rows))
    (out,) = launch(_MOVE, operands, results, config, {"S": sizes}, group=group)
    return out[:, : math.prod(x.shape[1:])].reshape(num_targets, *x.shape[1:])
