"""Which rows the tiles of a grouped product have: a kernel before the product's, of a warpgroup for each 128 tiles.

As operations of XLA it was seven launches, and a product of a few hundred microseconds notices: sums along the groups,
their order, and which group a tile is of each need the one before. Here a thread is a group, then a tile, and what it
needs of all groups it adds up in a loop over them: a few instructions for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.layout import round_up
from jax_ep.pallas.launch import PROGRAM, launch
from jax_ep.pallas.memory import Ref, Scalar, int32
from jax_ep.pallas.tiling import ALIGNMENT, ROW_UNIT, ForwardTiles, Fp8Tiles
from jax_ep.types import Array

_LANES = 128
_UNROLLED = 4  # groups in a turn of the loops over them
_MOST_EQUAL_TILES = 3


class RowTiles(NamedTuple):
    """Tiles of rows, all of a group one after another; the rows past the groups are one more group, G.

    Attributes:
      group: `[P]` int32.
      row: `[P]` int32, first row, which may be one of another tile or group.
      height: `[P]` int32, place in the heights of `ForwardTiles` or `Fp8Tiles`.
      start, end: `[P]` int32, rows that are the tile's, but for those behind its height.
      band, band_size: `[P]` int32, first tile of those that are visited together, all of one group, and how many.
      total: `[P]` int32, how many tiles there are, everywhere; those behind hold anything.
    """

    group: Any
    row: Any
    height: Any
    start: Any
    end: Any
    band: Any
    band_size: Any
    total: Any


class _Groups(NamedTuple):
    """What threads know of all groups, `[lanes]` in shared memory; those behind the last are empty.

    Attributes:
      start, end: rows.
      num_tiles: of the group.
      key: the greater, the earlier are the tiles.
      first: number of the first tile.
    """

    start: Ref
    end: Ref
    num_tiles: Ref
    key: Ref
    first: Ref


class _Tile(NamedTuple):
    """Tiles, one in each thread: the number in its group, and of that how many tiles and units, first row and end."""

    number: Array
    num_tiles: Array
    units: Array
    start: Array
    end: Array


def row_tiles(group_sizes: Array, num_rows: int, tiles: ForwardTiles | Fp8Tiles, *, interpret: bool) -> RowTiles:
    """Tiles for groups of `group_sizes [G]` int32: negative ones are empty, and none reaches past the last row.

    Those of `ForwardTiles`: a group has as few as possible. Up to three are of one height: they read the same matrix,
    and stay in step only where they take equally long. The last one then begins up to two units within the one before,
    which stores these rows. Tiles of more than three differ by a unit of rows at most. Groups with the tallest tiles
    come first, so that programs which run at the same time have tiles of like heights.

    Those of `Fp8Tiles` have the larger of two heights, the last of a group the smaller one where that is enough.
    """
    num_groups = group_sizes.shape[0]
    tallest = tiles.heights[-1]
    most = (num_rows + (num_groups + 1) * (tallest + ALIGNMENT - 2)) // tallest
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
    tiles: ForwardTiles | Fp8Tiles,
) -> None:
    tallest = tiles.heights[-1]
    program = lax.axis_index(PROGRAM)
    none = lax.min(program, int32(0))  # not known to be in bounds: behind the last size there are zeros
    for lane in range(0, sizes.shape[0], _LANES):
        some = group_sizes.at[pl.ds(none + int32(lane), _LANES)]
        plgpu.copy_gmem_to_smem(some, sizes.at[pl.ds(lane, _LANES)], full)
    plgpu.barrier_wait(full)
    _write_groups(sizes, groups, num_rows, num_groups, tallest, is_sorted=isinstance(tiles, ForwardTiles))

    tile = _each(_LANES) + program * int32(_LANES)

    def find(found: tuple[Array, ...], group: Scalar, first: Scalar, count: Scalar, *rows: Scalar) -> tuple[Array, ...]:
        is_own = (tile >= first) & (tile < first + count)
        *own, total = found
        own = [jnp.where(is_own, x, before) for x, before in zip((group, first, *rows), own, strict=True)]
        return *own, total + count

    known = groups.first, groups.num_tiles, groups.start, groups.end
    group, first, start, end, total = _over_groups(find, [jnp.zeros_like(tile)] * 5, num_groups, *known)
    units, count = _units_and_count(start, end, tallest)
    own = _Tile(tile - first, jnp.maximum(count, int32(1)), units, start, end)
    row, height, start = _varied(own, tiles) if isinstance(tiles, ForwardTiles) else _whole(own, tiles)
    band = lax.div(own.number, int32(tiles.band)) * int32(tiles.band)
    band_size = jnp.minimum(own.num_tiles - band, int32(tiles.band))
    values = RowTiles(group, row, height, start, own.end, tile - own.number + band, band_size, total)
    for ref, value in zip(out, values, strict=True):
        ref[pl.ds(program * int32(_LANES), _LANES)] = value


def _write_groups(
    sizes: Ref, groups: _Groups, num_rows: int, num_groups: int, tallest: int, *, is_sorted: bool
) -> None:
    """Fills `groups`, a group in each thread."""
    group = _each(sizes.shape[0])
    size = jnp.where(group < int32(num_groups), jnp.clip(_strided(sizes[...]), int32(0), int32(num_rows)), int32(0))
    plgpu.commit_smem()
    sizes[...] = size
    plgpu.commit_smem()

    def add_earlier(before: tuple[Array], other: Scalar, size: Scalar) -> tuple[Array]:
        return (before[0] + jnp.where(other < group, size, int32(0)),)

    nothing = [jnp.zeros_like(group)]
    start = jnp.minimum(_over_groups(add_earlier, nothing, num_groups, sizes)[0], int32(num_rows))
    end = jnp.where(group == int32(num_groups), int32(num_rows), jnp.minimum(start + size, int32(num_rows)))
    units, count = _units_and_count(start, end, tallest)
    # Behind groups of taller tiles, and of as tall ones those before it.
    height = _divide(units, jnp.maximum(count, int32(1))) if is_sorted else jnp.zeros_like(group)
    key = height * int32(sizes.shape[0]) - group
    for ref, value in zip(groups[:-1], (start, end, count, key), strict=True):
        ref[...] = value
    plgpu.commit_smem()

    def add_greater(before: tuple[Array], _: Scalar, count: Scalar, other: Scalar) -> tuple[Array]:
        return (before[0] + jnp.where(other > key, count, int32(0)),)

    groups.first[...] = _over_groups(add_greater, nothing, num_groups, groups.num_tiles, groups.key)[0]
    plgpu.commit_smem()


def _units_and_count(start: Array, end: Array, tallest: int) -> tuple[Array, Array]:
    """Units of `ROW_UNIT` from where the first tile of rows may begin, and how many tiles they need."""
    rows = jnp.where(end > start, end - _origin(start), int32(0))
    return _divide(rows, int32(ROW_UNIT)), _divide(rows, int32(tallest))


def _varied(own: _Tile, tiles: ForwardTiles) -> tuple[Array, Array, Array]:
    """First row, height and first own row of tiles of `ForwardTiles`."""
    tallest, more = _divide(own.units, own.num_tiles), lax.rem(own.units, own.num_tiles)
    is_shorter = (own.num_tiles > int32(_MOST_EQUAL_TILES)) & (more > int32(0)) & (own.number >= more)
    height = tallest - _one_where(is_shorter)
    above = own.number * tallest - jnp.where(is_shorter, own.number - more, int32(0))
    row = _origin(own.start) + jnp.minimum(above, own.units - height) * int32(ROW_UNIT)
    start = jnp.maximum(own.start, _origin(own.start) + above * int32(ROW_UNIT))
    kind = jnp.zeros_like(height)
    for limit in tiles.heights[:-1]:
        kind += _one_where(height > int32(limit // ROW_UNIT))
    return row, kind, start


def _whole(own: _Tile, tiles: Fp8Tiles) -> tuple[Array, Array, Array]:
    """The same of tiles of `Fp8Tiles`."""
    row = _origin(own.start) + own.number * int32(tiles.heights[1])
    return row, _one_where(own.end - row > int32(tiles.heights[0])), jnp.maximum(own.start, row)


def _over_groups(
    step: Callable[..., tuple[Array, ...]], initial: list[Array], num_groups: int, *known: Ref
) -> tuple[Array, ...]:
    """`step(before, group, *its numbers)` of all groups and those behind the last, one after another."""

    def turn(number: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        for i in range(_UNROLLED):
            group = number * int32(_UNROLLED) + int32(i)
            found = step(found, group, *(ref[group] for ref in known))
        return found

    return lax.fori_loop(int32(0), int32(-(-(num_groups + 1) // _UNROLLED)), turn, tuple(initial))


def _each(lanes: int) -> Array:
    return _strided(lax.iota(jnp.int32, lanes))


def _strided(x: Array) -> Array:
    """One after another in the threads."""
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=1))


def _origin(start: Array) -> Array:
    """Where tiles may begin."""
    return start & int32(-ALIGNMENT)


def _one_where(condition: Array) -> Array:
    return jnp.where(condition, int32(1), int32(0))


def _divide(a: Array, b: Scalar) -> Array:
    """Rounded up."""
    return lax.div(a + (b - int32(1)), jnp.broadcast_to(b, a.shape))
