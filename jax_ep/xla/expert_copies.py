"""Copies of experts' weights on other ranks, and the gradients of the copies back home, in rounds of `ppermute`."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import Axis, known_after, permute, rank_on
from jax_ep.types import Array


def fetch_copies(axis: Axis, copies: Array, w: Array, order: Array, *, zeroed: bool) -> tuple[Array, Array]:
    """Return the weights `[S, ...]` of the experts that `copies [W, S]` says, from `w [L, ...]`.

    Free slots are zero here; other implementations zero them if `zeroed`.

    Also return `order`, any array, with the same elements: what computes it comes before the transfer, and what uses
    the returned one after it, so that all ranks transfer in one order.
    """
    copies = known_after(copies, order)
    spare = jnp.zeros_like(w, shape=(copies.shape[1], *w.shape[1:]))
    for permutation, wanted, is_sent, is_received in _rounds(axis, copies, w.shape[0]):
        received = permute(_where(is_sent, w[wanted]), axis, permutation)
        spare = jnp.where(_like(is_received, w), received, spare)
    return spare, known_after(order, spare)


def add_gradients(axis: Axis, copies: Array, home: Array, spare: Array, order: Array) -> tuple[Array, Array]:
    """Add the gradients `spare [S, ...]` of this rank's copies at their home, to gradients `home [L, ...]`.

    Gradients of one expert are added in at least float32 in a fixed order, here by distance, and rounded once. Also
    return `order`, as `fetch_copies` does.
    """
    copies = known_after(copies, order)
    total = home.astype(accumulation_dtype(home.dtype))
    for permutation, wanted, is_sent, is_received in _rounds(axis, copies, home.shape[0]):
        back = [(target, source) for source, target in permutation]
        returned = permute(_where(is_received, spare), axis, back)
        for slot in range(copies.shape[1]):
            total = total.at[wanted[slot]].add(jnp.where(is_sent[slot], returned[slot], 0).astype(total.dtype))
    total = total.astype(home.dtype)
    return total, known_after(order, total)


def _rounds(axis: Axis, copies: Array, num_local: int) -> Iterator[tuple[list[tuple[int, int]], Array, Array, Array]]:
    """Yield the permutation of each distance, the experts that the peer needs, and the slots to send and to receive."""
    rank, num_ranks = rank_on(axis), copies.shape[0]
    for distance in range(1, num_ranks):
        wanted = copies[(rank + distance) % num_ranks]
        is_sent = (wanted >= 0) & (wanted // num_local == rank)
        mine = copies[rank]
        is_received = (mine >= 0) & (mine // num_local == (rank - distance) % num_ranks)
        permutation = [(source, (source + distance) % num_ranks) for source in range(num_ranks)]
        yield permutation, wanted % num_local, is_sent, is_received


def _like(mask: Array, w: Array) -> Array:
    return mask.reshape(-1, *[1] * (w.ndim - 1))


def _where(mask: Array, w: Array) -> Array:
    return jnp.where(_like(mask, w), w, jnp.zeros_like(w))
