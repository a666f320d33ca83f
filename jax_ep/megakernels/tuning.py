"""Grids and tiles of the kernels, per operation. Measured on H200 (benchmarks/dispatch_combine.py).

LAG is the number of blocks between sending one and working on what has arrived: the time that a block is under way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.heap import MAX_BLOCKS
from jax_ep.kernel import Config
from jax_ep.quantization import GROUP_SIZE
from jax_ep.types import Layout

BLOCK_T = 8
"""Tokens per flag, and per task: small enough that the last tasks of a launch end together."""


def _columns(hidden: int, itemsize: int) -> int:
    """Columns of a tile: a power of two that covers H or some kilobytes, whichever is less."""
    # Sums and FP8 scaling are float32 whatever travels: wider tiles of float32 rows would spill.
    most_bytes = 2048 if itemsize <= 2 else 1024
    columns = 128  # an FP8 group
    while columns < hidden and columns * itemsize < most_bytes:
        columns *= 2
    return columns


def _programs(num_tasks: int, per_multiprocessor: int = 1) -> int:
    """Programs that run at a time; in the interpreter, where they run one after another, two."""
    if jax.default_backend() == "cpu":
        return 2
    return min(num_tasks, jax.local_devices()[0].core_count * per_multiprocessor)


def words(num_ranks: int, num_words: int) -> tuple[Config, int]:
    """Config and words per block of the exchange of words."""
    block = 1024
    while block * MAX_BLOCKS < num_words:
        block *= 2
    return Config(_programs(num_ranks * -(-num_words // block)), num_warps=4), block


def dispatch(layout: Layout, hidden: int, dtype: jnp.dtype, wire_dtype: jnp.dtype) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of the dispatch kernel, for tokens of `dtype` that travel as `wire_dtype`."""
    num_tasks = layout.num_ranks * 2 * -(-layout.num_tokens // BLOCK_T)
    blocks = {
        "BLOCK_T": BLOCK_T,
        "BLOCK_H": _columns(hidden, dtype.itemsize),
        "PUSH_H": _columns(hidden, wire_dtype.itemsize),
        "BLOCK_G": 1 << (max(1, hidden // GROUP_SIZE) - 1).bit_length(),
        "BLOCK_R": 16,
        "LAG": 16,
    }
    return Config(_programs(num_tasks)), blocks


def combine(layout: Layout, hidden: int, dtype: jnp.dtype) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of the combine kernel."""
    num_tasks = (layout.num_ranks + 1) * -(-layout.num_tokens // BLOCK_T)
    columns = _columns(hidden, dtype.itemsize)
    return Config(_programs(num_tasks, 2)), {"BLOCK_T": BLOCK_T, "TILE_T": BLOCK_T, "BLOCK_H": columns, "LAG": 32}
