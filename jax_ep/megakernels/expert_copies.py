"""Copies of experts' weights on other ranks, and the gradients of the copies back home, by peer memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import context, ffi
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


def add_gradients(axis: Axis, copies: Array, home: Array, gradient: Array) -> Array:
    """Add the gradients `[S, ...]` of this rank's copies at their home, to gradients `home [L, ...]`.

    Copies of one expert are added in order of the rank that held them, and of its slot, in the dtype of `home`.
    """
    (num_ranks, spare), num_local = copies.shape, home.shape[0]
    used = copies >= 0
    source = jnp.where(used, copies // num_local, -1).reshape(-1)
    # Place: how many earlier copies have the same home.
    same = source[:, None] == source[None]
    place = jnp.sum(jnp.tril(same, -1), axis=1, dtype=jnp.int32).reshape(copies.shape)
    ranks, slots = jnp.indices(copies.shape, jnp.int32)
    moves = (jnp.where(used, ranks, -1), slots, source.reshape(copies.shape), place)
    returned = _move(axis, moves, gradient, num_ranks * spare)
    mine = source == rank_on(axis)
    experts = (copies.reshape(-1) % num_local)[jnp.argsort(~mine, stable=True)]
    count = jnp.sum(mine, dtype=jnp.int32)

    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, home = state
        return i + 1, home.at[experts[i]].add(returned[i].astype(home.dtype))

    # Few ranks get any, so adding them one by one reads and writes least.
    start = vary_alike((jnp.zeros((), jnp.int32), home, count, experts, returned))
    return lax.while_loop(lambda state: state[0] < count, add, (start[0], start[1]))[1]


def _move(axis: Axis, moves: tuple[Array, ...], x: Array, num_targets: int) -> Array:
    rows = pad_columns(x.reshape(x.shape[0], -1))
    elements, itemsize = rows.shape[1], x.dtype.itemsize
    block = _BLOCK_BYTES // itemsize
    while -(-elements // block) * num_targets > MAX_BLOCKS:
        block *= 2
    blocks = -(-elements // block)
    sizes = ExpertMoves(moves[0].size, num_targets, elements, block, blocks)
    context.reserve(_MOVE.name, num_targets * elements * itemsize)
    operands = (rows, jnp.stack([part.reshape(-1).astype(jnp.int32) for part in moves], axis=1))
    results = (jax.ShapeDtypeStruct((num_targets, elements), x.dtype),)
    config = Config(num_programs(moves[0].size * blocks, 2), num_warps=8)
    group = group_on(axis, varying_axes(rows))
    (out,) = launch(_MOVE, operands, results, config, {"S": sizes}, group=group)
    return out[:, : math.prod(x.shape[1:])].reshape(num_targets, *x.shape[1:])
