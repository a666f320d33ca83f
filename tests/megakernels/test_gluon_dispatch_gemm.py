"""Dispatch + GEMM in Gluon on one device: that broken synchronization does not pass."""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from test_gluon_emulator import check_mistake
from test_gluon_gemm16 import described

from jax_ep.heap.symmetric import HeapLayout
from jax_ep.interpreter import gluon
from jax_ep.megakernels import exchange_gemm
from jax_ep.megakernels.kernels import exchange_gemm_structs, exchange_structs, gluon_dispatch_gemm
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

BF16 = ml_dtypes.bfloat16
SOURCE = Path(gluon_dispatch_gemm.__file__)
TOKENS, TOP_K, HIDDEN, COLUMNS = 150, 2, 136, 264


def multiply(module, rng, *, seed):
    """Return the relative error of rows and of their weights; NaN if an element is not written."""
    sizes = np.array([130, 0, 97, 40], np.int32)
    used, rows = int(sizes.sum()), int(sizes.sum()) + 70
    layout = Layout(num_ranks=1, num_experts=4, num_tokens=TOKENS, top_k=TOP_K, capacity=rows)
    slots = rng.permutation((TOKENS - 1) * TOP_K)[:used].astype(np.int32)
    assignments = np.concatenate([slots, np.full(rows - used, -1, np.int32)])
    x, w = rng.standard_normal((TOKENS, HIDDEN)).astype(BF16), rng.standard_normal((4, HIDDEN, COLUMNS)).astype(BF16)
    x[-1] = np.nan  # no row needs it
    weights = rng.standard_normal((TOKENS, TOP_K)).astype(np.float32)
    out, out_weights = np.full((rows, COLUMNS), np.nan, BF16), np.full(rows, np.nan, np.float32)
    heap = HeapLayout(1)
    plan = exchange_gemm.gathered_gemm16(layout, (HIDDEN, COLUMNS), 4, transpose=False, experts=None)
    sizes_of = dataclasses.replace(exchange_gemm.dispatch_gemm_sizes(Schedule(), layout, plan, False), comm_programs=1)
    memory = np.zeros(heap.data + 4096, np.uint8)
    table = np.zeros(8, np.int64)
    table[0], table[1] = memory.ctypes.data, memory.ctypes.data
    pointers = [gluon.Pointer(a) for a in (x, weights, assignments, sizes, out_weights, table)]
    own, own_weights, of_rows, of_groups, row_weights, addresses = pointers
    unused = gluon.Pointer(np.zeros(TOKENS * TOP_K, np.int32))
    handle = exchange_gemm_structs.HandleArrays(unused, unused, of_rows, of_groups)
    peers = exchange_structs.Peers(gluon.Pointer(np.zeros(2, np.int32)), addresses)
    gluon.run(
        module.dispatch_gemm16,
        2,
        *(own, own_weights, described(w, (1, 64, 256)), handle, exchange_gemm_structs.OrderedSends(*[unused] * 3)),
        *(peers, described(out, (64, 64), bounded=True), gluon.Pointer(x), row_weights),
        seed=seed,
        S=sizes_of,
        HEAP=heap_of(heap, 1, 1),
    )
    tokens, want = x[slots // TOP_K].astype(np.float64), np.zeros((rows, COLUMNS))
    ends = np.cumsum(sizes)
    for end, size, matrix in zip(ends, sizes, w.astype(np.float64), strict=True):
        want[end - size : end] = tokens[end - size : end] @ matrix
    found = out_weights[:used] - weights.reshape(-1)[slots]
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want)) + float(np.abs(found).max())


def test_gluon_dispatch_gemm(rng):
    assert multiply(gluon_dispatch_gemm, rng, seed=int(rng.integers(1 << 30))) < 3e-3


MISTAKES = {
    "rows copied before the step is free": (
        "        wait(pipeline.empty.index(slot)",
        "        (pipeline.empty.index(slot)",
    ),
    "arrival before the copies": (
        "        for wave in gl.static_range(WAVES):\n",
        "        hand_over(pipeline.full.index(slot))\n        for wave in gl.static_range(WAVES):\n",
    ),
    "one warp arrives": ("ARRIVALS: gl.constexpr = 1 + 32 * GATHERERS", "ARRIVALS: gl.constexpr = 33"),
    "columns past the rows": ("exist = exist & (columns < S.K - k)", "pass"),
    "tiles not released": ("        arrive(tiles.empty.index(number % 2))\n", ""),
    "weights of other rows": ("row, min(end - row, code % 4 * WAVE)", "row + 1, min(end - row, code % 4 * WAVE)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gluon_dispatch_gemm_mistake_is_found(mistake, tmp_path, rng):
    """Each mistake gives an error, or wrong numbers, for one of a few orders."""
    assert SOURCE.read_text().count(MISTAKES[mistake][0]) == 1
    check_mistake(SOURCE, MISTAKES[mistake], tmp_path, 6, 3e-3, lambda broken, seed: multiply(broken, rng, seed=seed))
