"""Grids and tiles of the kernels, per operation. Measured on H200 (benchmarks/dispatch_combine.py).

LAG is the number of blocks between sending one and working on what has arrived: the time that a block is under way.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep.heap import MAX_BLOCKS
from jax_ep.kernel import Config
from jax_ep.layout import power_of_two
from jax_ep.megakernels.grid import all_programs, num_programs
from jax_ep.types import Layout

BLOCK_T = 8
"""Most tokens per flag, and per task: few enough that the last tasks of a launch end together."""

FEW = 64
"""Up to so many programs, which do not fill the GPU, each one needs more bytes in flight: larger tiles, more warps."""


def _columns(hidden: int, itemsize: int) -> int:
    """Columns of a tile: a power of two that covers H or some kilobytes, whichever is less."""
    # Sums and FP8 scaling are float32 whatever travels: wider tiles of float32 rows would spill.
    most_bytes = 2048 if itemsize <= 2 else 1024
    columns = 128  # an FP8 group
    while columns < hidden and columns * itemsize < most_bytes:
        columns *= 2
    return columns


def at_most(config: Config, limit: int | None) -> Config:
    """The config with no more programs than `limit`, as for a launch beside other work; None sets no limit."""
    if limit is None:
        return config
    return dataclasses.replace(config, num_programs=min(config.num_programs, limit))


def words(num_ranks: int, num_words: int) -> tuple[Config, int]:
    """Config and words per block of the exchange of words."""
    block = 1024
    while block * MAX_BLOCKS < num_words:
        block *= 2
    return Config(num_programs(num_ranks * -(-num_words // block)), num_warps=4), block


def plan(layout: Layout) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of the plan kernel.

    About as many blocks as programs that run at a time: each is then counted and placed once, and every task can add
    the counts of all up. Small blocks where there are few slots: a block is worked on by LANES slots at a time.
    """
    lanes, most_blocks = 128, 256  # a slot per thread
    slots = layout.num_tokens * layout.top_k
    block = lanes
    while layout.num_ranks * -(-slots // block) > most_blocks:
        block *= 2
    fill = 1024
    while -(-layout.capacity // fill) > most_blocks:
        fill *= 2
    source_blocks = -(-slots // block)
    num_blocks = layout.num_ranks * source_blocks
    bins = max(32, power_of_two(layout.num_local_experts))
    blocks = {
        "BLOCK": block,
        "LANES": lanes,
        "BINS": bins,
        "ROWS": max(1, min(4096 // bins, power_of_two(num_blocks))),
        "INVALID": power_of_two(source_blocks),
        "FILL": fill,
    }
    # Registers are enough for three at a time; one that had to wait would only make the end later.
    return Config(num_programs(3 * num_blocks + -(-layout.capacity // fill), 3), num_warps=4), blocks


def _tokens_per_task(num_tokens: int) -> int:
    """Fewer where there are few tokens, so that most programs of a GPU have a task."""
    least = 4 if jax.default_backend() == "cpu" else 2  # several at the sizes of tests
    block = BLOCK_T
    while block > least and block * 256 > num_tokens:
        block //= 2
    return block


def dispatch(
    layout: Layout,
    hidden: int,
    dtype: jnp.dtype,
    wire_dtype: jnp.dtype,
    *,
    to_rows: bool,
    limit: int | None = None,
) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of the dispatch kernel, for tokens of `dtype` that travel as `wire_dtype`."""
    block, columns = _tokens_per_task(layout.num_tokens), _columns(hidden, dtype.itemsize)
    warps, per_processor = 8, 2
    if limit is not None and limit <= FEW:
        block, columns, per_processor = 32, min(columns, 512), 1
    elif to_rows and wire_dtype != dtype:
        # Converting what arrives needs more programs rather than wider tiles.
        columns, warps, per_processor = min(columns, 512), 4, 4
    num_tasks = layout.num_ranks * -(-layout.num_tokens // block)
    lag = min(128 // block, -(-layout.num_tokens // block))
    blocks = {"BLOCK_T": block, "BLOCK_H": columns, "BLOCK_R": 16, "LAG": lag}
    return at_most(Config(num_programs(num_tasks, per_processor), num_warps=warps), limit), blocks


def combine(
    layout: Layout, hidden: int, dtype: jnp.dtype, wire_dtype: jnp.dtype, limit: int | None = None
) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of the combine kernel, for sums of `dtype` that travel as `wire_dtype`."""
    block, columns = _tokens_per_task(layout.num_tokens), _columns(hidden, dtype.itemsize)
    warps, per_processor = 8, 2
    if limit is not None and limit <= FEW:
        block, warps, per_processor = 16, 16, 1
    elif wire_dtype != dtype:
        # With many rows of a token on a rank, reading them is what takes time, and wide tiles read faster.
        columns = columns if layout.top_k >= 4 * layout.num_ranks else min(columns, 512)
        warps, per_processor = 4, 4
    num_tasks = (layout.num_ranks + 1) * -(-layout.num_tokens // block)
    lag = min(256 // block, -(-layout.num_tokens // block))
    blocks = {"BLOCK_T": block, "TILE_T": block, "BLOCK_H": columns, "LAG": lag}
    return at_most(Config(num_programs(num_tasks, per_processor), num_warps=warps), limit), blocks


def dispatch_gemm(layout: Layout, hidden: int, columns: int) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of dispatch + GEMM, `[., hidden]` times `[hidden, columns]`."""
    blocks = {"COMM": 16, "BLOCK_T": 32, "BLOCK_H": _columns(hidden, 2), **_product_tile(hidden, columns)}
    return Config(all_programs(), num_warps=8, num_stages=4), blocks


def gemm_combine(layout: Layout, features: int, hidden: int) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of GEMM + combine, `[., features]` times `[features, hidden]`."""
    blocks = _product_tile(features, hidden)
    column_tiles = -(-hidden // blocks["BN"])
    blocks["CHUNKS"] = _chunks(column_tiles, column_tiles * layout.capacity // blocks["BM"])
    sums = {"CLEAR_T": 16, "SUM_T": 8, "SUM_H": min(512, _columns(hidden, 2))}
    return Config(all_programs(), num_warps=8, num_stages=3), {**blocks, **sums, "GROUP_M": 8, "FLATTEN": True}


def _chunks(column_tiles: int, num_tiles: int) -> int:
    """Chunks of columns: what is added while the next chunk is computed. Each one costs a meeting of all programs."""
    most = 4 if jax.default_backend() == "cpu" else num_tiles // (50 * num_programs(num_tiles))
    return next(chunks for chunks in (4, 3, 2, 1) if column_tiles % chunks == 0 and (chunks <= most or chunks == 1))


def scatters(layout: Layout, features: int, hidden: int) -> bool:
    """Whether GEMM + combine is one launch, which sends a row per expert, or two, which send a sum per rank.

    Rows travel while the product is computed, sums after it: two launches win where the product is too short to hide
    the rows. Per token, at the rates of an H200.
    """
    ranks, top_k = layout.num_ranks, layout.top_k
    link, tensor_cores = 350e9, 600e12
    product = 2 * top_k * features * hidden / tensor_cores
    rows = top_k * (ranks - 1) / ranks * 2 * hidden / link
    sums = (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k) * 2 * hidden / link
    return rows <= product + sums


def _product_tile(depth: int, columns: int) -> dict[str, int]:
    """Tile of a product on the tensor cores; narrow where the matrices are."""
    if jax.default_backend() == "cpu":
        return {"BM": 32, "BN": 16, "BK": 16}
    return {"BM": 128, "BN": 256 if columns > 128 else 128, "BK": 64}
