"""Which rows the tiles of a grouped GEMM have: a small kernel before the GEMM's, one warpgroup per 128 tiles.

In XLA this took seven launches, a notable part of a GEMM of a few hundred microseconds, since each step needs the
previous one: sums along the groups, their order, and the group of each tile. Here a thread stands for a group, then for
a tile, and accumulates what it needs over all groups in a loop: a few instructions per group. No program waits for
another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.layout import round_up
from jax_ep.pallas.launch import PROGRAM, Ref, Scalar, int32, launch
from jax_ep.pallas.tiling import ALIGNMENT, ROW_UNIT, ForwardTiles
from jax_ep.types import Array

_LANES = 128
_UNROLLED = 4  # groups per iteration of the loops over them
_MOST_EQUAL_TILES = 3


class RowTiles(NamedTuple):
    """Row tiles, those of a group one after another; the rows past the groups form one more group.

    Attributes:
      group: `[P]` int32; P tiles at most.
      row: `[P]` int32, first row, which may belong to another tile or group.
      block_m_index: `[P]` int32, index into the `heights` of `ForwardTiles`.
      start, end: `[P]` int32, the tile's own rows.
      band, band_size: `[P]` int32, first tile and number of tiles of the band, visited together and all of one group.
      total: `[P]` int32, the number of tiles, in every entry; entries past it are undefined.
    """

    group: Ref
    row: Ref
    block_m_index: Ref
    start: Ref
    end: Ref
    band: Ref
    band_size: Ref
    total: Ref


class _Groups(NamedTuple):
    """Facts of all groups in shared memory, `[lanes]` each; groups past the last are empty.

    Attributes:
      start, end: rows.
      num_tiles: tiles of the group.
      key: groups with a greater key come earlier.
      first: index of the first tile.
    """

    start: Ref
    end: Ref
    num_tiles: Ref
    key: Ref
    first: Ref


class _Tile(NamedTuple):
    """Tiles, one per thread: index in its group, the group's numbers of tiles and row units, first row and end."""

    number: Array
    num_tiles: Array
    units: Array
    start: Array
    end: Array


def row_tiles(group_sizes: Array, num_rows: int, tiles: ForwardTiles, *, interpret: bool) -> RowTiles:
    """List row tiles of groups of `group_sizes [num_groups]` int32; negative sizes are empty groups.

    No group reaches past the last row. A group has as few tiles as possible. Up to three have one height: they read the
    same weights, and stay in step only if they take equally long. The last one then may begin up to two units inside of
    the previous one, which stores these rows. More than three tiles differ by at most one unit of rows. Groups with the
    largest tiles come first, so that programs run tiles of similar heights at the same time.
    """
    num_groups = group_sizes.shape[0]
    max_block_m = tiles.heights[-1]
    most = (num_rows + (num_groups + 1) * (max_block_m + ALIGNMENT - 2)) // max_block_m
    lanes, programs = round_up(num_groups + 1, _LANES), -(-most // _LANES)
    in_memory = plgpu.SMEM((lanes,), jnp.int32)
    scratch = {
        "sizes": in_memory,
        "groups": _Groups(*[in_memory] * len(_Groups._fields)),
        "full": plgpu.Barrier(num_arrivals=lanes // _LANES),
    }
    result = [jax.ShapeDtypeStruct((programs * _LANES,), jnp.int32)] * len(RowTiles._fields)
    body = partial(_list_tiles, num_rows=num_rows, num_groups=num_groups, tiles=tiles)
    return RowTiles(*launch("row_tiles", body, (group_sizes,), result, scratch, programs, interpret))


def _list_tiles(
    group_sizes: Ref,
    *out: Ref,
    sizes: Ref,
    groups: _Groups,
    full: Ref,
    num_rows: int,
    num_groups: int,
    tiles: ForwardTiles,
) -> None:
    max_block_m = tiles.heights[-1]
    program = lax.axis_index(PROGRAM)
    # Zero, but not provably so: copies then may reach past the last size, where TMA reads zeros.
    none = lax.min(program, int32(0))
    for lane in range(0, sizes.shape[0], _LANES):
        some = group_sizes.at[pl.ds(none + int32(lane), _LANES)]
        plgpu.copy_gmem_to_smem(some, sizes.at[pl.ds(lane, _LANES)], full)
    plgpu.barrier_wait(full)
    _write_groups(sizes, groups, num_rows, num_groups, max_block_m)

    # One tile per thread: find its group in a loop over all groups.
    tile = _each(_LANES) + program * int32(_LANES)

    def find(found: tuple[Array, ...], group: Scalar, first: Scalar, count: Scalar, *rows: Scalar) -> tuple[Array, ...]:
        is_own = (tile >= first) & (tile < first + count)
        *own, total = found
        own = [jnp.where(is_own, x, before) for x, before in zip((group, first, *rows), own, strict=True)]
        return *own, total + count

    known = groups.first, groups.num_tiles, groups.start, groups.end
    group, first, start, end, total = _over_groups(find, [jnp.zeros_like(tile)] * 5, num_groups, *known)
    units, count = _units_and_count(start, end, max_block_m)
    own = _Tile(tile - first, jnp.maximum(count, int32(1)), units, start, end)
    row, block_m_index, start, end = _place(own, tiles)
    # Bands of tiles, for rasterization.
    band = lax.div(own.number, int32(tiles.band)) * int32(tiles.band)
    band_size = jnp.minimum(own.num_tiles - band, int32(tiles.band))
    values = RowTiles(group, row, block_m_index, start, end, tile - own.number + band, band_size, total)
    for ref, value in zip(out, values, strict=True):
        ref[pl.ds(program * int32(_LANES), _LANES)] = value


def _write_groups(sizes: Ref, groups: _Groups, num_rows: int, num_groups: int, max_block_m: int) -> None:
    """Fill `groups`, one group per thread."""
    group = _each(sizes.shape[0])
    size = jnp.where(group < int32(num_groups), jnp.clip(_strided(sizes[...]), int32(0), int32(num_rows)), int32(0))
    plgpu.commit_smem()
    sizes[...] = size
    plgpu.commit_smem()

    def add_earlier(before: tuple[Array], other: Scalar, size: Scalar) -> tuple[Array]:
        return (before[0] + jnp.where(other < group, size, int32(0)),)

    nothing = [jnp.zeros_like(group)]
    # A group starts after all earlier ones.
    start = jnp.minimum(_over_groups(add_earlier, nothing, num_groups, sizes)[0], int32(num_rows))
    end = jnp.where(group == int32(num_groups), int32(num_rows), jnp.minimum(start + size, int32(num_rows)))
    units, count = _units_and_count(start, end, max_block_m)
    # Order groups by tile height, the largest first, then by index.
    key = _divide(units, jnp.maximum(count, int32(1))) * int32(sizes.shape[0]) - group
    for ref, value in zip(groups[:-1], (start, end, count, key), strict=True):
        ref[...] = value
    plgpu.commit_smem()

    def add_greater(before: tuple[Array], _: Scalar, count: Scalar, other: Scalar) -> tuple[Array]:
        return (before[0] + jnp.where(other > key, count, int32(0)),)

    groups.first[...] = _over_groups(add_greater, nothing, num_groups, groups.num_tiles, groups.key)[0]
    plgpu.commit_smem()


def _units_and_count(start: Array, end: Array, max_block_m: int) -> tuple[Array, Array]:
    """Return the number of `ROW_UNIT`s from where the first tile may begin, and the number of tiles they need."""
    rows = jnp.where(end > start, end - _origin(start), int32(0))
    return _divide(rows, int32(ROW_UNIT)), _divide(rows, int32(max_block_m))


def _place(own: _Tile, tiles: ForwardTiles) -> tuple[Array, Array, Array, Array]:
    """Return first row, height index, first own row and end of tiles."""
    max_units, more = _divide(own.units, own.num_tiles), lax.rem(own.units, own.num_tiles)
    # With more than three tiles, the last ones are one unit shorter.
    is_shorter = (own.num_tiles > int32(_MOST_EQUAL_TILES)) & (more > int32(0)) & (own.number >= more)
    height = max_units - _one_where(is_shorter)
    above = own.number * max_units - jnp.where(is_shorter, own.number - more, int32(0))
    row = _origin(own.start) + jnp.minimum(above, own.units - height) * int32(ROW_UNIT)
    start = jnp.maximum(own.start, _origin(own.start) + above * int32(ROW_UNIT))
    kind = jnp.zeros_like(height)
    for limit in tiles.heights[:-1]:
        kind += _one_where(height > int32(limit // ROW_UNIT))
    return row, kind, start, jnp.minimum(own.end, row + height * int32(ROW_UNIT))


def _over_groups(
    step: Callable[..., tuple[Array, ...]], initial: list[Array], num_groups: int, *known: Ref
) -> tuple[Array, ...]:
    """Fold `step(before, group, *its values)` over all groups, in order, padded to whole iterations."""

    def iteration(number: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        for i in range(_UNROLLED):
            group = number * int32(_UNROLLED) + int32(i)
            found = step(found, group, *(ref[group] for ref in known))
        return found

    return lax.fori_loop(int32(0), int32(-(-(num_groups + 1) // _UNROLLED)), iteration, tuple(initial))


def _each(lanes: int) -> Array:
    return _strided(lax.iota(jnp.int32, lanes))


def _strided(x: Array) -> Array:
    """Lay out elements one after another in the threads."""
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=1))


def _origin(start: Array) -> Array:
    """Return the aligned row at which tiles may begin."""
    return start & int32(-ALIGNMENT)


def _one_where(condition: Array) -> Array:
    return jnp.where(condition, int32(1), int32(0))


def _divide(a: Array, b: Scalar) -> Array:
    """Divide and round up."""
    return lax.div(a + (b - int32(1)), jnp.broadcast_to(b, a.shape))
