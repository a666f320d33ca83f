"""Grouped GEMM in plain XLA: loops over groups and row tiles that stop at the last row in use.

XLA's `ragged_dot` multiplies every row by every group on the CPU, and uses little of a GPU's throughput. Here each tile
of rows is one ordinary matmul with the weights of its group, so the cost follows the rows in use, whatever the number
of groups. A group is covered by large tiles and its remainder by small ones, so that few unused rows are computed. The
outer loop runs over groups, so each group's weights are loaded once, and skips empty ones.

On the CPU, where tiles of other sizes add up K in another order, all tiles of rows times weights have one size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import accumulation_dtype, contract
from jax_ep.core.expert_matrices import GemmWeights, SplitWeights, split
from jax_ep.core.layout import Bias, add_bias
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.types import Array, Quantized

_TILES: dict[str, tuple[int, ...]] = {"cpu": (32,), "gpu": (512, 128)}
"""Rows of the tiles of rows times weights: a GPU needs more to be busy, and each loop step costs it a round trip."""
_GRADIENT_TILES: dict[str, tuple[int, ...]] = {"cpu": (128, 16), "gpu": (512, 128)}
"""Rows of the tiles of weight gradients, whose order of sums other tokens decide anyway."""


def _tiles(tiles: dict[str, tuple[int, ...]], num_rows: int) -> tuple[int, ...]:
    """Return the sizes of tiles; arrays of at most one large tile take small ones only: a loop costs compile time."""
    found = tiles.get(jax.default_backend(), tiles["gpu"])
    return found[-1:] if isinstance(num_rows, int) and num_rows <= found[0] else found


def _with_a_tile(x: Array, tiles: tuple[int, ...]) -> Array:
    """Pad `x` by a tile if its number of rows is symbolic, as in `jax.export`, and to a tile if it has fewer rows."""
    if isinstance(x.shape[0], int) and not 0 < x.shape[0] < tiles[-1]:
        return x
    more = tiles[-1] - x.shape[0] if isinstance(x.shape[0], int) else tiles[0]
    return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)))


class Tile(NamedTuple):
    """Rows `[start, start + len(mask))`; those in `mask [rows, 1]` belong to the tile."""

    start: Array
    mask: Array

    def rows(self, x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start, self.mask.shape[0])


class Groups(NamedTuple):
    """First row and end of each group (`[G]`), their order with non-empty groups first, and how many are non-empty."""

    starts: Array
    ends: Array
    order: Array
    num_used: Array


def order_groups(starts: Array, ends: Array) -> Groups:
    """Order groups of rows `[starts, ends)`, non-empty ones first."""
    used = ends > starts
    return Groups(starts, ends, jnp.argsort(~used, stable=True), jnp.sum(used, dtype=jnp.int32))


def locate_groups(group_sizes: Array, num_rows: int) -> Groups:
    """Locate consecutive groups; negative sizes are empty groups, and no group extends past the last row."""
    sizes = jnp.clip(group_sizes, 0, num_rows)
    if isinstance(num_rows, int) and num_rows * sizes.shape[0] <= jnp.iinfo(jnp.int32).max:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    else:  # No sum may overflow int32; this takes ten times as many kernels.
        ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, num_rows - a), sizes)
    return order_groups(jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends)


def _for_each_tile[Carry](
    body: Callable[[Tile, Carry], Carry], carry: Carry, start: Array, end: Array, num_rows: int, tiles: tuple[int, ...]
) -> Carry:
    """Fold `body` over tiles of these sizes that cover rows `[start, end)`: the last size covers the remainder."""
    for rows in tiles:
        count = lax.div(end - start + (rows - 1 if rows == tiles[-1] else 0), jnp.int32(rows))

        def step(i: Array, carry: Carry, rows: int = rows, base: Array = start) -> Carry:
            first = base + i * rows
            # The last tile may extend past the array: move it up, and let the mask protect other rows.
            tile_start = jnp.minimum(first, num_rows - rows)
            row = tile_start + lax.iota(jnp.int32, rows)
            return body(Tile(tile_start, ((row >= first) & (row < end))[:, None]), carry)

        carry = lax.fori_loop(0, count, step, carry)
        start = start + count * rows
    return carry


def multiply_groups[Rows](
    groups: Groups,
    rows: Rows,
    read: Callable[[Rows], Array],
    matrix_of: Callable[[Array], Array],
    out: Array,
    *,
    transpose: bool,
) -> Array:
    """Replace the rows of each group in `out [M, N]` by their product with the group's weights.

    Args:
      groups: the groups of rows.
      rows: arrays `[M, ...]`.
      read: returns the operand `[tile, K]` of a tile of them.
      matrix_of: returns the weights of a group, `[K, N]`, or `[N, K]` with `transpose`.
      out: `[M, N]`.
      transpose: contract with the last axis of the weights.
    """

    num_rows, sizes = out.shape[0], _tiles(_TILES, out.shape[0])
    rows, out = jax.tree.map(lambda x: _with_a_tile(x, sizes), (rows, out))

    def one_group(i: Array, out: Array) -> Array:
        group = groups.order[i]
        matrix = matrix_of(group)

        def one_tile(tile: Tile, out: Array) -> Array:
            tile_rows = read(jax.tree.map(tile.rows, rows))
            product = contract(tile_rows, matrix, (1, 1 if transpose else 0)).astype(out.dtype)
            new = jnp.where(tile.mask, product, tile.rows(out))
            return lax.dynamic_update_slice_in_dim(out, new, tile.start, axis=0)

        return _for_each_tile(one_tile, out, groups.starts[group], groups.ends[group], out.shape[0], sizes)

    return lax.fori_loop(0, groups.num_used, one_group, out)[:num_rows]


@functools.partial(jax.jit, static_argnames=("transpose", "out_dtype"))  # one compilation for eager callers
def grouped_gemm(
    lhs: Array, rhs: GemmWeights, group_sizes: Array, *, transpose: bool, out_dtype: DTypeLike, bias: Bias | None = None
) -> Array:
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g]` (or with `rhs[g].T`); rows past the groups are zero.

    Args:
      lhs: `[M, K]`.
      rhs: `[G, K, N]`, or `[G, N, K]` with `transpose`, in one array or two.
      group_sizes: `[G]` int32.
      transpose: contract with the last axis of rhs.
      out_dtype: dtype of the result; accumulates in float32 (float64 for float64).
      bias: added to the rows of the groups.

    Returns:
      `[M, N]`.
    """
    if bias is not None:
        run = functools.partial(grouped_gemm, transpose=transpose, out_dtype=out_dtype)
        return add_bias(run(lhs, rhs, group_sizes), bias, group_sizes)
    num_rows, num_cols = lhs.shape[0], rhs.shape[1 if transpose else 2]
    lhs, rhs, group_sizes, out = vary_alike((lhs, rhs, group_sizes, jnp.zeros((num_rows, num_cols), out_dtype)))
    if 0 in (*lhs.shape, *rhs.shape):
        return out

    def matrix_of(group: Array) -> Array:
        if not isinstance(rhs, SplitWeights):
            return lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        home, spare, num_home = *rhs, rhs.home.shape[0]
        home, spare = (
            lax.dynamic_index_in_dim(w, i, keepdims=False) for w, i in ((home, group), (spare, group - num_home))
        )
        return jnp.where(group < num_home, home, spare)

    groups = locate_groups(group_sizes, num_rows)
    return multiply_groups(groups, lhs, lambda rows: rows, matrix_of, out, transpose=transpose)


@functools.partial(jax.jit, static_argnames=("out_dtype", "num_home"))
def weight_gradient(
    lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
) -> GemmWeights:
    """Compute `out[g] = lhs[rows of g].T @ rhs[rows of g]`, the weight gradient of `grouped_gemm`.

    Args:
      lhs: `[M, K]`.
      rhs: `[M, N]`.
      group_sizes: `[G]` int32.
      out_dtype: dtype of the result; accumulates in float32 (float64 for float64).
      num_home: groups in the first of two arrays of the result; 0: there is one array.

    Returns:
      `[G, K, N]`; zero for empty groups. Those in the second array are spare slots without an expert: nothing reads
      their gradients, and other implementations may leave them unwritten.
    """
    if num_home:
        whole = cast(Array, weight_gradient(lhs, rhs, group_sizes, out_dtype=out_dtype))
        return split(whole, num_home)
    tiles = _tiles(_GRADIENT_TILES, lhs.shape[0])
    lhs, rhs = (_with_a_tile(x, tiles) for x in (lhs, rhs))
    num_rows, shape = lhs.shape[0], (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
    lhs, rhs, group_sizes, out = vary_alike((lhs, rhs, group_sizes, jnp.zeros(shape, out_dtype)))
    if 0 in (num_rows, *shape):
        # XLA's partitioner fails on a manual region whose only used operands are empty: use this operand.
        return lax.optimization_barrier((out, group_sizes))[0]
    groups = locate_groups(group_sizes, num_rows)

    def one_group(i: Array, out: Array) -> Array:
        group = groups.order[i]

        def one_tile(tile: Tile, total: Array) -> Array:
            # Rows of the tile that belong to other groups, or to none, are undefined and may be NaN.
            a, b = (jnp.where(tile.mask, tile.rows(x), 0) for x in (lhs, rhs))
            return total + contract(a, b, (0, 0))

        total = vary_alike((jnp.zeros(shape[1:], accumulation_dtype(lhs.dtype)), lhs))[0]
        total = _for_each_tile(one_tile, total, groups.starts[group], groups.ends[group], num_rows, tiles)
        return lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), group, axis=0)

    return lax.fori_loop(0, groups.num_used, one_group, out)


@functools.partial(jax.jit, static_argnames=("out_dtype",))  # one compilation for eager callers
def grouped_gemm_fp8(lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g].T` on the dequantized float32 operands.

    Each element has the error of one float32 dot product of length K: about `K * 2**-24` of the sum of magnitudes.

    Args:
      lhs: `[M, K]` float8_e4m3fn, and scales `[M, K / 128]`.
      rhs: `[G, N, K]` float8_e4m3fn, and scales `[G, ceil(N / 128), K / 128]`.
      group_sizes: `[G]` int32.
      out_dtype: dtype of the result.

    Returns:
      `[M, N]`, zero past the groups.
    """
    num_rows, columns = lhs[0].shape[0], rhs[0].shape[1]
    lhs, rhs, group_sizes, out = vary_alike((lhs, rhs, group_sizes, jnp.zeros((num_rows, columns), out_dtype)))
    if 0 in (*lhs[0].shape, *rhs[0].shape):
        return out

    def matrix_of(group: Array) -> Array:
        matrix, scales = (lax.dynamic_index_in_dim(x, group, keepdims=False) for x in rhs)
        return fp8.dequantize_matrices(matrix, scales, jnp.float32)

    def read(rows: Quantized) -> Array:
        return fp8.dequantize_rows(*rows, jnp.float32)

    groups = locate_groups(group_sizes, num_rows)
    return multiply_groups(groups, lhs, read, matrix_of, out, transpose=True)


@functools.partial(jax.jit, static_argnames=("out_dtype", "num_home"))
def weight_gradient_fp8(
    lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
) -> GemmWeights:
    """Compute `out[g] = lhs[:, positions of g] @ rhs[:, positions of g].T` on the dequantized float32 operands.

    Args:
      lhs: `[K, P]` float8_e4m3fn and scales `[P / 128, K]`, grouped rows quantized column-wise, see core/fp8.py.
      rhs: `[N, P]` float8_e4m3fn and scales `[P / 128, N]`, in the same layout.
      group_sizes: `[G]` int32, rows of each group.
      out_dtype: dtype of the result; accumulates in float32.
      num_home: as for `weight_gradient`.

    Returns:
      `[G, K, N]`; zero for empty groups.
    """
    if num_home:
        whole = cast(Array, weight_gradient_fp8(lhs, rhs, group_sizes, out_dtype=out_dtype))
        return split(whole, num_home)
    (rows, places), columns = lhs[0].shape, rhs[0].shape[0]
    shape = (group_sizes.shape[0], rows, columns)
    lhs, rhs, group_sizes, out = vary_alike((lhs, rhs, group_sizes, jnp.zeros(shape, out_dtype)))
    if 0 in (places, *shape):
        return lax.optimization_barrier((out, group_sizes))[0]  # see `weight_gradient`
    ends = jnp.minimum(fp8.blocks_until(group_sizes), places // fp8.GROUP_SIZE)
    groups = order_groups(jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends)

    def one_group(i: Array, out: Array) -> Array:
        group = groups.order[i]

        def one_block(block: Array, total: Array) -> Array:
            operands = []
            for values, scales in (lhs, rhs):
                columns = lax.dynamic_slice_in_dim(values, block * fp8.GROUP_SIZE, fp8.GROUP_SIZE, axis=1)
                scale = lax.dynamic_index_in_dim(scales, block, keepdims=False)
                operands.append(columns.astype(jnp.float32) * scale[:, None])
            return total + contract(operands[0], operands[1], (1, 1))

        total = vary_alike((jnp.zeros(shape[1:], jnp.float32), lhs[0]))[0]
        total = lax.fori_loop(groups.starts[group], groups.ends[group], one_block, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), group, axis=0)

    return lax.fori_loop(0, groups.num_used, one_group, out)
