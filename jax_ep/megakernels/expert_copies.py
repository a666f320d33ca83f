"""Copies of experts' weights on other ranks, and the gradients of the copies back home, by peer memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import context, ffi
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import Axis, known_after, varying_axes
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels.exchange import pad_columns
from jax_ep.megakernels.kernels import expert_copies as kernels
from jax_ep.megakernels.kernels.exchange_structs import CopySizes
from jax_ep.megakernels.launch import group_on, launch, num_programs, unsliced
from jax_ep.types import Array

_FETCH = Kernel(kernels.fetch_copies, ffi.Operation.DISPATCH)
_ADD = Kernel(kernels.add_gradients, ffi.Operation.DISPATCH)
_BLOCK_BYTES = 16 * 1024


def fetch_copies(axis: Axis, copies: Array, w: Array, order: Array, *, zeroed: bool) -> tuple[Array, Array]:
    """Fetch copies by peer memory, as `fetch_copies` of xla/expert_copies.py does by rounds."""
    rows, spare = _rows(w), copies.shape[1]
    if not rows.size * spare:
        return jnp.zeros_like(w, shape=(spare, *w.shape[1:])), order
    sizes, config = copy_sizes(copies.shape, rows, places=spare, zeroed=zeroed)
    _reserve(_FETCH, spare, rows)
    operands, group = (rows, known_after(copies, order)), group_on(axis, varying_axes(rows))
    out = jax.ShapeDtypeStruct((spare, rows.shape[1]), w.dtype)
    (fetched,) = launch(_FETCH, operands, (out,), config, {"S": sizes}, group=group)
    return _experts(fetched, w), known_after(order, fetched)


def add_gradients(axis: Axis, copies: Array, home: Array, spare: Array, order: Array) -> tuple[Array, Array]:
    """Add gradients as `add_gradients` of xla/expert_copies.py does, but in the order of `copies`, by rank and slot."""
    rows, spare_rows = _rows(home), _rows(spare)
    if not rows.size * copies.size:
        return home, order
    sizes, config = copy_sizes(copies.shape, rows, places=copies.size)
    out = jax.ShapeDtypeStruct(order.shape, order.dtype), jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    _reserve(_ADD, copies.size, rows)
    group = group_on(axis, varying_axes(rows) | varying_axes(spare_rows))
    operands, written = unsliced((spare_rows, copies, order, rows)), {2: 0, 3: 1}
    order, total = unsliced(launch(_ADD, operands, out, config, {"S": sizes}, group=group, written=written))
    return _experts(total, home), order


def copy_sizes(slots: tuple[int, ...], rows: Array, places: int, *, zeroed: bool = False) -> tuple[CopySizes, Config]:
    """Return sizes and config of a launch for `slots` = (W, S), and experts `rows [L, .]`; a rank receives `places`."""
    elements, block = rows.shape[1], _BLOCK_BYTES // rows.dtype.itemsize
    while -(-elements // block) * places > MAX_BLOCKS:
        block *= 2
    num_ranks, spare = slots
    sizes = CopySizes(
        num_local_experts=rows.shape[0],
        spare=spare,
        num_elements=elements,
        block=block,
        num_blocks=-(-elements // block),
        padded_slots=max(32, power_of_two(num_ranks * spare)),
        padded_experts=max(32, power_of_two(rows.shape[0])),
        zeroed=zeroed,
    )
    return sizes, Config(num_programs(num_ranks * spare * sizes.num_blocks, 2), num_warps=8)


def _reserve(kernel: Kernel, places: int, rows: Array) -> None:
    try:
        context.reserve(kernel.name, places * rows.shape[1] * rows.dtype.itemsize)
    except ValueError as error:
        raise ValueError(f"{error} Or pass a smaller Balance(spare_experts=), which bounds the copies.") from error


def _rows(w: Array) -> Array:
    return pad_columns(w.reshape(w.shape[0], -1))


def _experts(rows: Array, like: Array) -> Array:
    """Reshape rows to experts like those of `like`, without padding."""
    return rows[:, : like[0].size].reshape(rows.shape[0], *like.shape[1:])
