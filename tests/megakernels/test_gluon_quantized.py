"""The Gluon kernel of prepacked weights in the emulator: against NumPy in float64, and with broken synchronization."""

import dataclasses
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from test_gluon_emulator import check_mistake

from jax_ep.interpreter import gluon
from jax_ep.interpreter.gluon_memory import Descriptor
from jax_ep.megakernels import quantized_gemm
from jax_ep.megakernels.kernels import gluon_quantized
from stored_experts import stand_for, store

MXFP4, INT4 = "mxfp4 prepacked", "int4 prepacked"
SOURCE = Path(gluon_quantized.__file__)


def multiply(kernel, rng, stored, sizes, rows, k, n, *, block_m, masked=False, programs=1, seed=0, stages=2):
    """Return the error relative to the largest element; NaN if an element is not written.

    Rows outside of groups are NaN. `rows` are those of all groups, or those of each one if masked.
    """
    groups = len(sizes)
    w = rng.standard_normal((groups, k, n)) * 2.0 ** rng.integers(-3, 3, (groups, 1, n))
    rhs = store(w.astype(np.float32), stored)
    shape, used = ((groups, rows), np.clip(sizes, 0, rows)) if masked else ((rows,), None)
    lhs = rng.standard_normal((*shape, k)).astype(ml_dtypes.bfloat16)
    want, matrices = np.zeros((*shape, n)), stand_for(rhs)
    inside = np.zeros(shape, bool)
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
    starts = [0, *ends[:-1]]
    for group in range(groups):
        here = (group, slice(used[group])) if masked else slice(starts[group], ends[group])
        want[here] = lhs[here].astype(np.float64) @ matrices[group]
        inside[here] = True
    lhs[~inside] = np.nan
    tiles = dataclasses.replace(quantized_gemm.gluon_tiles(1), block_m=block_m, num_stages=stages)
    constants = quantized_gemm.gluon_sizes(lhs.shape, rhs, tiles)
    values, scales = (np.asarray(a) for a in jax.tree.leaves((rhs.values, rhs.scales)))
    operands = (
        Descriptor(lhs.reshape(-1, k), (block_m, 64)),
        Descriptor(values.reshape(-1, values.shape[-1]), (128, 16)),
        Descriptor(scales.reshape(-1, n), (1, 128)),
    )
    out, taken = np.full(want.shape, np.nan, np.float32), np.zeros(1, np.int32)
    arrays = np.array(sizes, np.int32), taken, out, taken
    gluon.run(kernel, programs, *operands, *arrays, seed=seed, S=constants)
    if masked:
        assert np.isnan(out[~inside]).all(), "rows past the sizes are written"
    found, want = (out[inside], want[inside]) if masked else (out, want)
    return float(np.abs(found - want).max() / max(np.abs(want).max(), 1))


@pytest.mark.parametrize("stored", [MXFP4, INT4])
@pytest.mark.parametrize(
    ("sizes", "rows", "k", "n", "block_m", "programs"),
    [
        ([16], 16, 128, 128, 16, 1),
        ([3, 0, 21, 9], 40, 256, 200, 8, 2),
        ([3, 0, 41, 17], 70, 256, 72, 16, 2),
        ([33, 1, 0], 40, 384, 200, 32, 3),
        ([100, 5], 105, 512, 128, 64, 2),
        ([5, -3, 60, 7], 50, 256, 136, 16, 2),
        ([0, 0], 9, 128, 132, 32, 1),
        ([2**31 - 1, 2**31 - 1], 20, 128, 128, 16, 1),
        ([1] * 40, 47, 128, 128, 16, 5),
    ],
)
def test_gluon_quantized_grouped(rng, stored, sizes, rows, k, n, block_m, programs):
    kernel, seed = gluon_quantized.prepacked_gemm, int(rng.integers(1 << 30))
    error = multiply(kernel, rng, stored, sizes, rows, k, n, block_m=block_m, programs=programs, seed=seed)
    assert error < 1e-5


@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
@pytest.mark.parametrize("stored", [MXFP4, INT4])
def test_gluon_quantized_masked(rng, stored, block_m):
    kernel, k = gluon_quantized.prepacked_gemm, 160 if stored == MXFP4 else 384
    options = {"block_m": block_m, "masked": True, "programs": 3, "stages": 3}
    assert multiply(kernel, rng, stored, [5, 0, 70, 33, -1], 40, k, 200, **options) < 1e-5


WAIT_FOR_STEP = "    wait(pipeline.full.index(slot), (count // S.stages) & 1)\n"
WAIT_FOR_STAGE = "                wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)\n"
WAIT_FOR_PRODUCT = "    part = warpgroup_mma_wait(0, deps=(part,))\n"
READ = "        for piece in gl.static_range(4):\n            rows = rows_of"
RELEASE = "        arrive(pipeline.empty.index(slot))\n"
RELEASE_BEFORE = "arrive(pipeline.empty.index((count + S.stages - 1) % S.stages))\n"
NO_STEPS = "        if group == S.num_groups:\n            steps = 0\n"
ENDS = "        rows = gl.minimum(ends, S.M).to(gl.int32) - starts\n"
OF_MMA = {  # Tiles of 16 rows are multiplied by mma.sync.
    "no wait for operands": (WAIT_FOR_STEP, ""),
    "no wait for a free stage": (WAIT_FOR_STAGE, ""),
    "stage released before its rows are read": (READ, RELEASE + READ),
    "stage never released": (f"{RELEASE}        if MXFP4", "        if MXFP4"),
    "too many arrivals expected": ("init(pipeline.empty.index(s), count=4)", "init(pipeline.empty.index(s), count=5)"),
    "wrong number of bytes": ("4 * COLUMNS * (WORDS + 1)", "4 * COLUMNS * WORDS"),
    "tile never released": ("        arrive(tiles.empty.index(number % 2))\n", ""),
    "operands of the group of zeros": (NO_STEPS, ""),
    "rows of the next group": ("mask=(rows < end) & ", "mask="),
    "columns past N": (" & (columns < S.N)", ""),
    "sizes past the last row": (ENDS, "        rows = sizes\n"),
}
OF_WGMMA = {  # Those of 32 rows are multiplied by wgmma.
    "no wait for operands of wgmma": (WAIT_FOR_STEP, ""),
    "stage released before its product": (f"        {WAIT_FOR_PRODUCT}            if piece", "            if piece"),
    "no wait for the last product": (f"{WAIT_FOR_PRODUCT}    if steps > 0:", "    if steps > 0:"),
    "stage of wgmma never released": (f"{' ' * 20}{RELEASE_BEFORE}", f"{' ' * 20}pass\n"),
    "last stage never released": (f"        {RELEASE_BEFORE}    if MXFP4", "        pass\n    if MXFP4"),
    "sum of the tile before": ("use_acc=MXFP4 or piece > 0", "use_acc=True"),
}
ONLY = {"sum of the tile before": INT4}


@pytest.mark.parametrize("mistake", OF_MMA | OF_WGMMA)
def test_gluon_quantized_mistake_is_found(mistake, tmp_path, rng):
    block_m = 16 if mistake in OF_MMA else 32

    def error_of(broken, seed):
        stored, rows = ONLY.get(mistake, (MXFP4, INT4)[seed % 2]), (50, 70)[seed // 2 % 2]
        return multiply(broken.prepacked_gemm, rng, stored, [9, 20, 30], rows, 512, 136, block_m=block_m, seed=seed)

    # In Gluon, the result of a product in flight is of another type.
    check_mistake(SOURCE, (OF_MMA | OF_WGMMA)[mistake], tmp_path, 12, 1e-5, error_of, TypeError)
