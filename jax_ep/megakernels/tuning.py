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
from jax_ep.quantization import GROUP_SIZE
from jax_ep.types import Layout

BLOCK_T = 8
"""Most tokens per flag, and per task: few enough that the last tasks of a launch end together."""

FEW = 64
"""Up to so many programs, which do not fill the GPU, each one needs more bytes in flight: larger tiles, more warps."""


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


def schedule(layout: Layout) -> dict[str, int]:
    """Tile sizes of the send schedule: few blocks, since each adds up the counts of all blocks of a list."""
    lanes, most_blocks = 128, 64
    block = lanes
    while -(-layout.num_tokens // block) > most_blocks:
        block *= 2
    bins = max(32, power_of_two(layout.num_local_experts + 1))
    rows = max(1, min(4096 // bins, power_of_two(-(-layout.num_tokens // block))))
    return {"BLOCK": block, "LANES": lanes, "BINS": bins, "ROWS": rows}


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
    few = limit is not None and limit <= FEW
    block = _tokens_per_task(layout.num_tokens)
    if few:
        block = min(32, power_of_two(layout.num_tokens))
    elif layout.num_tokens <= 4 * MAX_BLOCKS:
        block = min(4, block)
    columns, stages = _summed_rows(hidden, dtype.itemsize)
    choices, ranks = power_of_two(layout.top_k), power_of_two(layout.num_ranks)
    blocks = {
        "BLOCK_T": block,
        "BLOCK_H": columns,
        "CHOICES": choices,
        "RANKS": ranks,
        "LENGTH": block * max(choices, ranks),
        "STAGES": stages,
        "LAG": min(256 // block, -(-layout.num_tokens // block)),
    }
    num_tasks = (layout.num_ranks + 1) * -(-layout.num_tokens // block)
    return at_most(Config(num_programs(num_tasks, 1 if few else 2), num_warps=4), limit), blocks


def dispatch_gemm(hidden: int, columns: int, num_communicating: int | None = None) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of dispatch + GEMM, `[., hidden]` times `[hidden, columns]`."""
    blocks = {
        "COMM": num_communicating or 16,
        "BLOCK_T": 32,
        "BLOCK_H": _columns(hidden, 2),
        **_product_tile(columns),
    }
    return Config(all_programs(), num_warps=8, num_stages=4), blocks


def gemm_combine(layout: Layout, hidden: int) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of GEMM + combine, for rows of `hidden` columns."""
    # Sums all at the end: between products they come at a fraction of the memory's rate (AMONG_TILES).
    tokens, choices = 4, power_of_two(layout.top_k)
    columns, stages = _summed_rows(hidden, 2)
    sums = {"SUM_T": tokens, "SUM_H": columns, "SUM_STAGES": stages, "CHOICES": choices, "LENGTH": tokens * choices}
    clearing = {"CLEAR_T": 16, "CLEAR_H": min(512, _columns(hidden, 2))}
    return Config(all_programs(), num_warps=8, num_stages=3), {
        **_product_tile(hidden),
        **sums,
        **clearing,
        "GROUP_M": 8,
    }


def gemm_combine_products(
    layout: Layout, rows: int, columns: int, *, transpose_rhs: bool
) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of GEMM + combine with the gradient of its matrices `[rows, columns]`."""
    config, blocks = gemm_combine(layout, rows if transpose_rhs else columns)
    if jax.default_backend() == "cpu":
        tile = {"M": 32, "N": 32, "R": 16, "STAGES": 2, "PARTS": 1}
    else:  # as many blocks in flight as there is memory beside that through which a tile is stored
        tile = {"M": 128, "N": 256 if columns > 128 else 128, "R": 64, "STAGES": 3, "PARTS": 1}
    return config, blocks | {f"WEIGHT_{name}": size for name, size in tile.items()}


def gemm_reduce(layout: Layout, features: int, hidden: int) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of GEMM + combine with a row per rank, `[., features]` times `[features, hidden]`."""
    tile = _product_tile(hidden)
    chunks = _reduced_chunks(layout, features, hidden)
    width = -(-hidden // tile["BN"]) // chunks * tile["BN"]
    columns = min(_columns(hidden, 2), width & -width)  # a power of two that divides a chunk
    few = jax.default_backend() == "cpu"
    tokens = 8 if few else min(16, 8192 // columns)
    block = 2 * tokens if few else tokens
    # A few tasks for each program and chunk, since each ends with a flag; and no more flags than there are.
    most = min(MAX_BLOCKS // chunks, 6 * all_programs() // (layout.num_ranks + 1))
    while not few and -(-layout.num_tokens // block) > most:
        block *= 2
    sums = {"BLOCK_T": block, "TILE_T": tokens, "SUM_H": columns, "PHASES": 8, "GROUP_M": 8}
    return Config(all_programs(), num_warps=8, num_stages=4), {**tile, "CHUNKS": chunks, **sums}


LINK, MEMORY, TENSOR_CORES = 350e9, 2.6e12, 600e12
"""What an H200 does in a second: bytes sent to other GPUs, bytes moved to make sums, operations of grouped GEMMs."""
COMBINE_MEMORY = 3.8e12
"""The second of them for combine by itself (dispatch_combine.json)."""
GRADIENTS = 0.73 * 735e12
"""Operations of weight gradients in a second, by two programs of four warps per multiprocessor or one of eight."""
FAR, FAR_MEMORY = 1 << 30, 1.5e12
"""Rows that arrive in so many bytes or more are added at this rate, waits for the last ones included."""
AMONG_TILES = 0.53e12
"""Bytes moved in a second to make sums where each program makes some between its tiles (moe_layer.json, "reduce")."""
MEETING_SECONDS = 50e-6
"""What the end of GEMM + combine costs beside its sums: all programs of all ranks meet there (moe_layer.json)."""
CHUNK_SECONDS = 60e-6
"""Products and sums of a chunk take at least as long: it costs each program some waits, and two ends of its loop."""


def _holders(layout: Layout) -> float:
    """Expected number of ranks with an expert of a token."""
    ranks = layout.num_ranks
    return ranks * (1 - ((ranks - 1) / ranks) ** layout.top_k)


def _product(layout: Layout, features: int, hidden: int) -> float:
    """Seconds per token to compute the products."""
    return 2 * layout.top_k * features * hidden / TENSOR_CORES


def _made(layout: Layout, hidden: int) -> float:
    """Bytes per token that are moved to make sums of products: rows read, and sums written, read and added up."""
    return (layout.top_k + 2 * _holders(layout) + 1) * 2 * hidden


def _scattered(layout: Layout, hidden: int) -> float:
    """Seconds per token to send each row of an expert on another rank by itself."""
    remote = (layout.num_ranks - 1) / layout.num_ranks
    return layout.top_k * remote * 2 * hidden / LINK


def _scattered_sums(layout: Layout, hidden: int) -> float:
    """Seconds per token to add rows that have come one by one, once all ranks have sent."""
    row = 2 * hidden
    rate = FAR_MEMORY if layout.num_tokens * layout.top_k * row >= FAR else MEMORY
    meeting = MEETING_SECONDS / layout.num_tokens if layout.num_ranks > 1 else 0.0
    return (layout.top_k + 1) * row / rate + meeting


def _reduced_chunks(layout: Layout, features: int, hidden: int) -> int:
    """Chunks of columns whose sums are made while others are multiplied."""
    tile = _product_tile(hidden)
    column_tiles = -(-hidden // tile["BN"])
    if jax.default_backend() == "cpu":
        most = 4.0
    else:
        num_rows = min(layout.capacity, layout.num_tokens * layout.top_k)  # in use, where experts are equally loaded
        turns = column_tiles * -(-num_rows // tile["BM"]) / all_programs()
        time = _product(layout, features, hidden) + _made(layout, hidden) / AMONG_TILES
        most = min(turns / 2, layout.num_tokens * time / CHUNK_SECONDS)
    return next(chunks for chunks in range(8, 0, -1) if column_tiles % chunks == 0 and chunks <= max(1, most))


def combine_times(layout: Layout, features: int, hidden: int) -> dict[str, float]:
    """Seconds per token that each mode of GEMM + combine should take, the simplest mode first.

    docs/performance.md tells why.
    """
    remote = (layout.num_ranks - 1) / layout.num_ranks
    product, sent = _product(layout, features, hidden), _holders(layout) * remote * 2 * hidden / LINK
    made, between = (_made(layout, hidden) / rate for rate in (COMBINE_MEMORY, AMONG_TILES))
    last = 1 / _reduced_chunks(layout, features, hidden)
    return {
        "serial": product + max(sent, made),
        "scatter": max(product, _scattered(layout, hidden)) + _scattered_sums(layout, hidden),
        "reduce": max(product + (1 - last) * between, (1 - last) * sent) + last * max(sent, between),
    }


def backward_times(layout: Layout, features: int, hidden: int, mode: str | None) -> dict[str, float]:
    """Seconds per token of GEMM + combine and the gradient of its matrices: its parts, and both in one launch.

    In one launch the rows have the time of both products to travel. docs/performance.md tells more.
    """
    times = combine_times(layout, features, hidden)
    product = _product(layout, features, hidden)
    gradient = product * TENSOR_CORES / GRADIENTS
    combined = min(times.values()) if mode is None else times[mode]
    products = max(product + gradient, _scattered(layout, hidden))
    return {"parts": combined + gradient, "one launch": products + _scattered_sums(layout, hidden)}


def combine_mode(layout: Layout, features: int, hidden: int) -> str:
    """The simplest mode of GEMM + combine of those that should take least time, up to a hundredth."""
    times = combine_times(layout, features, hidden)
    return next(mode for mode, time in times.items() if time <= 1.01 * min(times.values()))


def _product_tile(columns: int) -> dict[str, int]:
    """Tile of a product on the tensor cores; narrow where the matrices are."""
    if jax.default_backend() == "cpu":
        return {"BM": 32, "BN": 16, "BK": 16}
    return {"BM": 128, "BN": 256 if columns > 128 else 128, "BK": 64}
