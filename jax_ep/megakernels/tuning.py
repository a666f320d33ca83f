"""Grids and tiles of the kernels, per operation. Measured on H200 (benchmarks/exchange.py).

LAG is the number of blocks between sending one and working on what has arrived: the time that a block is under way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config
from jax_ep.core.layout import power_of_two
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels import grouped_gemm
from jax_ep.megakernels.grid import all_programs, num_programs
from jax_ep.megakernels.kernels.structs import CombineTile, CountTile, DispatchTile, Plan, SendOrder, SumTile
from jax_ep.types import Layout, Schedule

BLOCK_T = 8
"""Most tokens per flag, and per task: few enough that the last tasks of a launch end together."""

FEW = 64
"""Up to so many programs, which do not fill the GPU, each has a multiprocessor to itself and larger blocks."""

BESIDE = 24
"""Programs of combine beside the gradient of matrices: few leave more of the GPU to that, and have its time."""

ROW_BYTES, IN_FLIGHT_BYTES = 16 * 1024, 80 * 1024
"""Most bytes of a row that are added up at once, 64 sums for each thread of four warps; and of rows on their way there.

More rows on their way bring nothing, nor do more warps: 24 programs are then held up by the copies to shared memory.
"""


def _columns(hidden: int, itemsize: int) -> int:
    """Columns of a tile: a power of two that covers H or some kilobytes, whichever is less."""
    # Sums and FP8 scaling are float32 whatever travels: wider tiles of float32 rows would spill.
    most_bytes = 2048 if itemsize <= 2 else 1024
    columns = 128  # an FP8 group
    while columns < hidden and columns * itemsize < most_bytes:
        columns *= 2
    return columns


def _summed_rows(hidden: int, itemsize: int) -> tuple[int, int]:
    """Columns that are added up at once, and depth of the pipeline through which rows come; see `ROW_BYTES`."""
    columns = max(GROUP_SIZE, min(power_of_two(hidden), ROW_BYTES // itemsize))
    return columns, min(10, 1 + IN_FLIGHT_BYTES // (columns * itemsize))


def at_most(config: Config, limit: int | None) -> Config:
    """The config with no more programs than `limit`, as for a launch beside other work; None sets no limit."""
    if limit is None:
        return config
    return dataclasses.replace(config, num_programs=min(config.num_programs, limit))


def small_exchange(num_ranks: int, num_values: int) -> tuple[Config, int]:
    """Config and values per block of an exchange of 32-bit values."""
    block = 1024
    while block * MAX_BLOCKS < num_values:
        block *= 2
    return Config(num_programs(num_ranks * -(-num_values // block)), num_warps=4), block


def plan(layout: Layout) -> tuple[Config, Plan]:
    """Config and sizes of the plan kernel.

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
    sizes = Plan(
        N=slots,
        L=layout.num_local_experts,
        R=layout.capacity,
        ALIGNMENT=layout.alignment,
        FILL=fill,
        SOURCE_BLOCKS=power_of_two(source_blocks),
        tile=CountTile(block, lanes, bins, ROWS=max(1, min(4096 // bins, power_of_two(num_blocks)))),
    )
    # Registers are enough for three at a time; one that had to wait would only make the end later.
    return Config(num_programs(3 * num_blocks + -(-layout.capacity // fill), 3), num_warps=4), sizes


def send_order(layout: Layout) -> SendOrder:
    """Sizes of the send schedule: few blocks, since each adds up the counts of all blocks of a list."""
    lanes, most_blocks = 128, 64
    block = lanes
    while -(-layout.num_tokens // block) > most_blocks:
        block *= 2
    bins = max(32, power_of_two(layout.num_local_experts + 1))
    rows = max(1, min(4096 // bins, power_of_two(-(-layout.num_tokens // block))))
    tile = CountTile(block, lanes, bins, rows)
    return SendOrder(layout.num_ranks, layout.num_tokens, layout.top_k, layout.num_local_experts, tile)


def _tokens_per_task(num_tokens: int) -> int:
    """Fewer where there are few tokens, so that most programs of a GPU have a task."""
    least = 4 if jax.default_backend() == "cpu" else 2  # several at the sizes of tests
    block = BLOCK_T
    while block > least and block * 256 > num_tokens:
        block //= 2
    return block


def dispatch(
    schedule: Schedule, layout: Layout, hidden: int, dtype: jnp.dtype, wire_dtype: jnp.dtype
) -> tuple[Config, DispatchTile]:
    """Config and tile of the dispatch kernel, for tokens of `dtype` that travel as `wire_dtype`."""
    block, columns = _tokens_per_task(layout.num_tokens), _columns(hidden, dtype.itemsize)
    warps, per_processor = 8, 2
    limit = schedule.num_communicating_programs
    if limit is not None and limit <= FEW:
        block, columns, per_processor = 32, min(columns, 512), 1
    elif wire_dtype != dtype:
        # Converting what arrives needs more programs rather than wider tiles.
        columns, warps, per_processor = min(columns, 512), 4, 4
    block, warps = schedule.tokens_per_block or block, schedule.num_warps or warps
    num_tasks = layout.num_ranks * -(-layout.num_tokens // block)
    lag = min(max(1, 128 // block), -(-layout.num_tokens // block))
    tile = DispatchTile(block, columns, BLOCK_R=16, LAG=lag)
    return at_most(Config(num_programs(num_tasks, per_processor), num_warps=warps), limit), tile


def combine(schedule: Schedule, layout: Layout, hidden: int, dtype: jnp.dtype) -> tuple[Config, CombineTile]:
    """Config and tile of the combine kernel, for sums of `dtype`."""
    limit = schedule.num_combining_programs
    few = limit is not None and limit <= FEW
    block = _tokens_per_task(layout.num_tokens)
    if few:
        block = min(32, power_of_two(layout.num_tokens))
    elif layout.num_tokens <= 4 * MAX_BLOCKS:
        block = min(4, block)
    block = schedule.tokens_per_block or block
    columns, stages = _summed_rows(hidden, dtype.itemsize)
    choices, ranks = power_of_two(layout.top_k), power_of_two(layout.num_ranks)
    tile = CombineTile(
        BLOCK_T=block,
        BLOCK_H=columns,
        CHOICES=choices,
        RANKS=ranks,
        LENGTH=block * max(choices, ranks),
        STAGES=stages if schedule.rows_in_flight is None else 1 + schedule.rows_in_flight,
        LAG=min(max(1, 256 // block), -(-layout.num_tokens // block)),
    )
    num_tasks = (layout.num_ranks + 1) * -(-layout.num_tokens // block)
    warps = max(1, min(4, columns * dtype.itemsize // 512))  # as many as have 16 bytes for each thread
    warps = schedule.num_warps or warps
    return at_most(Config(num_programs(num_tasks, 1 if few else max(1, 8 // warps)), num_warps=warps), limit), tile


def dispatch_gemm(hidden: int, columns: int, num_communicating: int | None = None) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of dispatch + GEMM, `[., hidden]` times `[hidden, columns]`."""
    blocks = {
        "COMM": num_communicating or 16,
        "BLOCK_T": 32,
        "BLOCK_H": _columns(hidden, 2),
        **grouped_gemm.product_tile(columns),
    }
    return Config(all_programs(), num_warps=8, num_stages=4), blocks


def gemm_combine(layout: Layout, hidden: int) -> tuple[Config, dict[str, Any]]:
    """Config and tile sizes of GEMM + combine, for rows of `hidden` columns."""
    # Sums all at the end: between products they come at a seventh of the rate (docs/design/rejected.md).
    tokens, choices = 4, power_of_two(layout.top_k)
    columns, stages = _summed_rows(hidden, 2)
    sums = {"SUM_T": tokens, "SUMS": SumTile(columns, tokens * choices, stages), "CHOICES": choices}
    clearing = {"CLEAR_T": 16, "CLEAR_H": min(512, _columns(hidden, 2))}
    return Config(all_programs(), num_warps=8, num_stages=3), {
        **grouped_gemm.product_tile(hidden),
        **sums,
        **clearing,
        "GROUP_M": 8,
    }


def gemm_combine_products(
    layout: Layout, rows: int, columns: int, *, transpose_rhs: bool
) -> tuple[Config, dict[str, Any]]:
    """Config and tile sizes of GEMM + combine with the gradient of its matrices `[rows, columns]`."""
    config, blocks = gemm_combine(layout, rows if transpose_rhs else columns)
    if jax.default_backend() == "cpu":
        tile = {"M": 32, "N": 32, "R": 16, "STAGES": 2, "PARTS": 1}
    else:  # as many blocks in flight as there is memory beside that through which a tile is stored
        tile = {"M": 128, "N": 256 if columns > 128 else 128, "R": 64, "STAGES": 3, "PARTS": 1}
    return config, blocks | {f"WEIGHT_{name}": size for name, size in tile.items()}


def combine_products(
    schedule: Schedule, layout: Layout, hidden: int, dtype: jnp.dtype
) -> tuple[Config, CombineTile, dict[str, int]]:
    """Config, tile of combine and other tile sizes of combine beside the gradient of matrices, for sums of `dtype`."""
    programs = schedule.num_summing_programs or (BESIDE if jax.default_backend() != "cpu" else 1)
    _, tile = combine(dataclasses.replace(schedule, num_combining_programs=programs), layout, hidden, dtype)
    tiles = grouped_gemm.weight_tiles(dtype.itemsize)
    weights = {"M": tiles.block_m, "N": tiles.block_n, "R": tiles.block_r}
    weights |= {"STAGES": tiles.num_stages, "PARTS": tiles.store_parts}
    blocks = {"COMM": programs, "TASKS": 4, "GROUP_M": tiles.group_m}
    config = Config(all_programs(tiles.programs), num_warps=tiles.num_warps)
    return config, tile, blocks | {f"WEIGHT_{name}": size for name, size in weights.items()}
