"""The Gluon kernel of a whole layer in the emulator: against NumPy in float64, and with broken synchronization."""

import dataclasses
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from test_gluon_emulator import check_mistake

import oracle
from jax_ep import Experts
from jax_ep.interpreter import gluon
from jax_ep.interpreter.gluon_memory import Descriptor, Pointer
from jax_ep.megakernels import fused_moe
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels import gluon_fused_moe
from oracle_experts import Arrays, layer
from stored_experts import stand_for, store

MXFP4, INT4 = "mxfp4 prepacked", "int4 prepacked"
SOURCE = Path(gluon_fused_moe.__file__)


def layer_error(kernel, rng, stored, ids, experts, hidden, intermediate, *, programs=1, seed=0, **tiles):
    """Return the error relative to the largest element; NaN if an element is not written. Ids may be no expert."""
    num_experts, options = 4, {"block_m": 16, "splits": 1, "num_stages": 2} | tiles
    shapes = (num_experts, hidden, 2 * intermediate), (num_experts, intermediate, hidden)
    w_gate_up, w_down = (store(rng.standard_normal(s).astype(np.float32) / np.sqrt(s[1]), stored) for s in shapes)
    gate_up, down = stand_for(w_gate_up), stand_for(w_down)
    x = rng.standard_normal((len(ids), hidden)).astype(ml_dtypes.bfloat16)
    weights = rng.random(ids.shape).astype(np.float32)
    lay = oracle.layout(ids[None], num_experts)
    (want,), _ = layer(experts, Arrays(x[None], weights[None], gate_up, down), lay, np.zeros((1, *x.shape)))
    chosen = dataclasses.replace(fused_moe.gluon_tiles(ids.size, w_down), **options)
    sizes = fused_moe.gluon_sizes(x.shape, ids.shape[1], w_down, chosen)

    def described(w):
        values, scales = (np.asarray(a) for a in jax.tree.leaves((w.values, w.scales)))
        return gluon_fused_moe.Weights(
            Descriptor(values.reshape(-1, values.shape[-1]), (64, 16)),
            Descriptor(scales.reshape(-1, w.shape[-1]), (1, 64)),
        )

    rows = np.full((ids.size, intermediate), np.nan, ml_dtypes.bfloat16)
    sums = np.full((ids.size, chosen.splits, hidden), np.nan, np.float32)
    out = np.full(x.shape, np.nan, np.float32)
    inputs = gluon_fused_moe.Inputs(*map(Pointer, (x, ids, weights)))
    counters = np.zeros(3 + ids.size, np.int32)
    operands = described(w_gate_up), described(w_down), inputs, None, None, counters
    outputs = gluon_fused_moe.Outputs(*map(Pointer, (rows, sums, out, ids[:0], weights[:0])))
    gluon.run(kernel, programs, *operands, outputs, counters, seed=seed, KIND=kind_of(experts), S=sizes)
    return float(np.abs(out - want).max() / np.abs(want).max())


def drawn_ids(rng, tokens, top_k):
    return rng.integers(-1, 5, (tokens, top_k), dtype=np.int32)


@pytest.mark.parametrize("stored", [MXFP4, INT4])
@pytest.mark.parametrize("experts", [Experts(), Experts(interleaved=True)], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "intermediate", "tiles"),
    [
        (3, 2, 128, 128, {}),
        (20, 4, 256, 128, {"block_m": 8}),
        (30, 4, 256, 384, {"splits": 2}),  # several blocks of an expert
        (30, 4, 384, 256, {"block_m": 32, "num_stages": 3, "splits": 4}),  # parts without a step
        (60, 3, 256, 128, {"block_m": 64}),
        (5, 2, 384, 384, {"block_m": 8, "consumers": 2, "splits": 2}),  # three steps, and parts of two and one
        (20, 4, 256, 128, {"consumers": 2, "num_stages": 4}),
    ],
)
@pytest.mark.slow(unless={"tokens": [3, 5, 60]})
def test_gluon_fused_moe_layer(rng, stored, experts, tokens, top_k, hidden, intermediate, tiles):
    kernel, seed = gluon_fused_moe.fused_moe, int(rng.integers(1 << 30))
    ids = drawn_ids(rng, tokens, top_k)
    error = layer_error(kernel, rng, stored, ids, experts, hidden, intermediate, programs=2, seed=seed, **tiles)
    assert error < 1e-2


@pytest.mark.parametrize("hidden", [160, 96])
def test_gluon_fused_moe_cut_tiles(rng, hidden):
    """Columns and steps of K that the sizes do not fill."""
    ids = drawn_ids(rng, 20, 2)
    assert layer_error(gluon_fused_moe.fused_moe, rng, MXFP4, ids, Experts(), hidden, 224) < 1e-2


def test_gluon_fused_moe_without_experts(rng):
    ids = np.full((5, 2), -1, np.int32)
    ids[3] = 2
    assert layer_error(gluon_fused_moe.fused_moe, rng, MXFP4, ids, Experts(), 128, 128) < 1e-2


WAIT_FOR_STAGE = "        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)\n"
WAIT_FOR_TILE = "        wait(blocks.tiles.empty.index(number % 2), ((number // 2) & 1) ^ 1)\n"
POLL = "                arrived = gl.atomic_poll(done_ptr, expected,"
MISTAKES = {
    "weights into a stage in use": (f"{WAIT_FOR_STAGE}        mbarrier", "        mbarrier"),
    "rows into a stage in use": (f"{WAIT_FOR_STAGE}        column", "        column"),
    "hidden rows before they are complete": (POLL, POLL.replace("= ", "= True or ")),
    "fewer hidden tiles than there are": ("expected = 4 * S.hidden_tiles", "expected = 4 * (S.hidden_tiles - 1)"),
    "rows before their copies end": ("            async_copy.wait_group(1)\n", ""),
    "last rows before their copies end": ("        async_copy.wait_group(0)\n", ""),
    "no fence after the copies": ("        fence_async_shared()", "        pass"),
    "the gatherer is not waited for": ("count=1 + GATHERERS)", "count=1)"),
    "wrong number of bytes": ("4 * COLUMNS * (WORDS + 1)", "4 * COLUMNS * WORDS"),
    "no wait for the tile before the last": (WAIT_FOR_TILE, ""),
    "the first assignments in each block": ("    first = -first\n", "    first = 0\n"),
    "assignments of a full block": (" & (place < S.tile_m)", ""),
    "up values of the gates": ("second = INTERMEDIATE + column", "second = column"),
    "columns past the last": ("mask=(rows >= 0) & (columns < S.hidden)", "mask=(rows >= 0)"),
    "hidden columns past the last": ("mask = (rows >= 0) & (columns < S.intermediate_size)", "mask = rows >= 0"),
    "rows of K past the last": ("exist & (columns + column < WIDTH)", "exist"),
    "a part of K twice": ("first = part * S.split_steps", "first = 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gluon_fused_moe_mistake_is_found(mistake, tmp_path, rng):
    alone = [np.full((tokens, 1), 2, np.int32) for tokens in (8, 40)]  # one expert with one block, or with several
    cases = [(drawn_ids(rng, 24, 3), 352, 288, 2), (alone[0], 128, 128, 1), (alone[1], 128, 128, 1)]

    def error_of(broken, seed):
        ids, *sizes, splits = cases[seed % 3]
        tiles = {"block_m": (16, 32)[seed // 3 % 2], "splits": splits, "num_stages": 3}
        return layer_error(broken.fused_moe, rng, MXFP4, ids, Experts(), *sizes, seed=seed, **tiles)

    check_mistake(SOURCE, MISTAKES[mistake], tmp_path, 12, 1e-2, error_of, TypeError, IndexError)


SHARED_MISTAKES = {
    "sums before they are complete": ("        wait(partial.full, tile & 1)\n", ""),
    "sums in the place of others": ("            wait(partial.empty, (tile & 1) ^ 1)\n", ""),
    "the steps of the consumer": ("S, 1, S.consumers)", "S, 0, S.consumers)"),
    "fewer than no steps": ("* S.split_steps), 0)", "* S.split_steps), -1)"),
}


@pytest.mark.parametrize("mistake", SHARED_MISTAKES)
def test_gluon_fused_moe_mistake_of_two_consumers_is_found(mistake, tmp_path, rng):
    def error_of(broken, seed):
        tiles = {"block_m": (8, 16)[seed % 2], "splits": 4, "num_stages": (2, 4)[seed // 2 % 2], "consumers": 2}
        return layer_error(broken.fused_moe, rng, MXFP4, drawn_ids(rng, 12, 2), Experts(), 256, 640, seed=seed, **tiles)

    check_mistake(SOURCE, SHARED_MISTAKES[mistake], tmp_path, 12, 1e-2, error_of, TypeError, IndexError)
