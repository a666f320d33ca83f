"""Grids and tiles of the low-latency kernels (benchmarks/low_latency.py).

A token is a task: with few tokens, what counts is how many programs send at once. LAG is how many blocks are sent
before the first one is worked on that has arrived, about one per program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.core.kernel import Config
from jax_ep.core.layout import power_of_two
from jax_ep.megakernels.grid import num_programs
from jax_ep.types import Layout

# Up to so many comparisons, a copy of the dispatch finds its rows by itself.
_MOST_COMPARISONS = 4096
# Up to so many rows, combine sends each of them: fewer words would cost a second wait.
_MOST_ROWS = 128
# Of a tile of combine; sums of several rows take more registers.
_SUM_BYTES = {False: 16 << 10, True: 8 << 10}


def _config(programs: int) -> Config:
    """Two programs of 8 warps have 128 registers per thread; where one fits, it may use more."""
    fit_alone = jax.default_backend() != "cpu" and programs <= jax.local_devices()[0].core_count
    return Config(programs, num_warps=8, max_registers=None if fit_alone else 128)


def _columns(hidden: int, most_bytes: int, itemsize: int) -> int:
    """Columns of a tile: all, where `most_bytes` hold them."""
    return min(power_of_two(hidden), most_bytes // itemsize)


def dispatch(
    layout: Layout, num_tokens: int, hidden: int, dtype: jnp.dtype, wire_dtype: jnp.dtype, scales: int
) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of dispatch, for `num_tokens` tokens of `dtype` that travel as `wire_dtype`."""
    num_ranks, top_k = layout.num_ranks, power_of_two(layout.top_k)
    tokens = power_of_two(num_ranks * num_tokens)
    direct = tokens * top_k * top_k <= _MOST_COMPARISONS
    block = 1 if direct else 4 if wire_dtype.itemsize == 1 else 2
    num_tasks = num_ranks + layout.num_local_experts + num_tokens + num_ranks * -(-num_tokens // block)
    programs = num_programs(num_tasks, 2)
    blocks = {
        "DIRECT": direct,
        "BLOCK_C": block,
        # More would take the registers of the second program of a multiprocessor.
        "BLOCK_H": _columns(hidden, (16 if direct else 8) << 10, wire_dtype.itemsize),
        "BLOCK_G": power_of_two(scales),
        "BLOCK_K": top_k,
        "CHUNK": tokens if direct else min(tokens, 4096 // top_k),
        "SEND_H": _columns(hidden, 16 << 10, max(2, dtype.itemsize)),
        "LANES": power_of_two(num_ranks),
        "LAG": num_tokens if direct else -(-programs // block),
    }
    return _config(programs), blocks


def combine(layout: Layout, num_tokens: int, hidden: int, dtype: jnp.dtype) -> tuple[Config, dict[str, int]]:
    """Config and tile sizes of combine, for `num_tokens` tokens and rows of `dtype`."""
    num_ranks = layout.num_ranks
    sums = num_tokens * layout.top_k > _MOST_ROWS
    sends = num_ranks * (1 if sums else layout.top_k)  # of a token
    programs = num_programs(num_ranks + (sends + 1) * num_tokens + 1, 2)
    blocks = {
        "SUMS": sums,
        "BLOCK_H": _columns(hidden, _SUM_BYTES[sums] >> (layout.top_k > 8), max(2, dtype.itemsize)),
        "BLOCK_K": power_of_two(layout.top_k),
        "LANES": power_of_two(num_ranks),
        "LAG": -(-programs // sends),
    }
    return _config(programs), blocks
