"""The Gluon kernels for 16 bits: that broken synchronization does not pass, and which heights tiles have."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from test_gluon_emulator import check_mistake

from jax_ep.core.kernel import Descriptor
from jax_ep.interpreter import gluon
from jax_ep.megakernels.kernels import gluon_gemm16
from jax_ep.megakernels.kernels.gemm_structs import Activation, GluonGemm16, SplitWeights

BF16 = ml_dtypes.bfloat16
SOURCE = Path(gluon_gemm16.__file__)
SWIGLU = Activation("silu", True, False, alpha=1.0, clamp=None, up_offset=0.0, weights_on_input=False)


def described(array, block, *, bounded=False):
    shape, strides, block_shape = Descriptor(jax.ShapeDtypeStruct(array.shape, jnp.bfloat16), block, bounded).blocks
    return gluon.Descriptor(array, block_shape, shape, strides)


def multiply(module, rng, sizes, k, n, *, programs, seed, spare=0, **changes):
    """Return the relative error of the grouped GEMM; NaN if an element is not written."""
    groups, rows = len(sizes), sum(sizes) + spare
    lhs, rhs = (rng.standard_normal(s).astype(BF16) for s in ((rows, k), (groups, k, n)))
    out, taken = np.full((rows, n), np.nan, BF16), np.zeros(1, np.int32)
    operands = described(lhs, (64, 64)), described(rhs, (1, 64, 256)), np.array(sizes, np.int32), None, taken
    options = dataclasses.replace(GluonGemm16(rows, n, k, groups, 4, 64), **changes)
    gluon.run(
        module.grouped_gemm16, programs, *operands, described(out, (64, 64), bounded=True), taken, seed=seed, S=options
    )
    want, start = np.zeros((rows, n)), 0
    for group, size in enumerate(sizes):
        of_group = slice(start, start + size)
        want[of_group] = lhs[of_group].astype(np.float64) @ rhs[group].astype(np.float64)
        start += size
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


def gradient(module, rng, sizes, k, n, *, programs, seed, spare=0, **changes):
    """Return the relative error of the weight gradient; NaN if an element is not written, but in free spare slots."""
    groups, rows = len(sizes), sum(sizes) + spare
    lhs, rhs = (rng.standard_normal((rows, width)).astype(BF16) for width in (k, n))
    out, taken = np.full((groups, k, n), np.nan, BF16), np.zeros(1, np.int32)
    operands = described(lhs, (64, 64), bounded=True), described(rhs, (64, 256), bounded=True)
    options = dataclasses.replace(GluonGemm16(rows, n, k, groups, 4, 64, is_gradient=True), **changes)
    home = options.groups_at_home
    parts = [described(part, (1, 64, 64)) for part in (out[:home], out[home:]) if len(part)]
    arrays = np.array(sizes, np.int32), taken, SplitWeights(*parts) if options.home_groups else parts[0], taken
    gluon.run(module.weight_gradient16, programs, *operands, *arrays, seed=seed, S=options)
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    want = np.stack([lhs[part].astype(np.float64).T @ rhs[part].astype(np.float64) for part in parts])
    free = (np.array(sizes) == 0) & (np.arange(groups) >= home)
    assert np.isnan(out[free].astype(np.float32)).all()
    out, want = out[~free], want[~free]
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


def activate(module, rng, sizes, k, n, *, programs, seed, spare=0, **changes):
    """Return the relative error of the grouped GEMM with activation; NaN if an element is not written."""
    groups, rows = len(sizes), sum(sizes) + spare
    lhs, rhs = (rng.standard_normal(s).astype(BF16) for s in ((rows, k), (groups, k, 2 * n)))
    weights, out, taken = (
        rng.standard_normal(rows).astype(np.float32),
        np.full((rows, n), np.nan, BF16),
        np.zeros(1, np.int32),
    )
    operands = described(lhs, (64, 64)), described(rhs, (1, 64, 64)), np.array(sizes, np.int32), weights, taken
    options = dataclasses.replace(GluonGemm16(rows, n, k, groups, 4, 32, activation=SWIGLU), **changes)
    result = described(out, (64, 32), bounded=True)
    gluon.run(module.grouped_gemm16, programs, *operands, result, taken, seed=seed, S=options)
    hidden, start = np.zeros((rows, 2 * n)), 0
    for group, size in enumerate(sizes):
        of_group = slice(start, start + size)
        hidden[of_group] = lhs[of_group].astype(np.float64) @ rhs[group].astype(np.float64)
        start += size
    gate, up = hidden[:, :n], hidden[:, n:]
    want = weights[:, None] * gate / (1 + np.exp(-gate)) * up
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("run", [multiply, activate, gradient])
@pytest.mark.parametrize(
    ("sizes", "k", "n", "programs", "changes"),
    [
        ([128], 256, 256, 1, {}),
        ([100, 0, 37, 200, 320], 320, 264, 3, {"group_m": 1}),
        ([10, 300, 1], 64, 512, 2, {"stages": 2}),
        ([30, 0, 200], 448, 264, 2, {"low_tiles": True}),
    ],
)
def test_gluon_gemm16(run, rng, sizes, k, n, programs, changes):
    seed = int(rng.integers(1 << 30))
    assert run(gluon_gemm16, rng, sizes, k, n, programs=programs, seed=seed, spare=70, **changes) < 3e-3


@pytest.mark.parametrize("run", [multiply, gradient])
def test_gluon_gemm16_many_empty_groups(run, rng):
    sizes, seed = [0, 70, *[0] * 40, 130, 0], int(rng.integers(1 << 30))
    assert run(gluon_gemm16, rng, sizes, 128, 264, programs=2, seed=seed, spare=70) < 3e-3


@pytest.mark.parametrize("home", [1, 3])
def test_gluon_gemm16_gradient_of_spare_slots(home, rng):
    sizes, seed = [130, 0, 70, *[0] * 40, 65, 0], int(rng.integers(1 << 30))
    changes = {"home_groups": home, "low_tiles": True}
    assert gradient(gluon_gemm16, rng, sizes, 128, 264, programs=2, seed=seed, spare=70, **changes) < 3e-3


@pytest.mark.parametrize(
    ("size", "low", "waves"),
    [
        (1, False, [1]),
        (128, False, [2]),
        (192, False, [3]),
        (256, False, [2, 2]),
        (320, False, [3, 2]),
        (512, False, [2] * 4),
        (513, False, [3] * 3),
        (2048, False, [3] * 10 + [2]),
        (1, True, [1]),
        (448, True, [2, 2, 2, 1]),
        (768, True, [2] * 6),
    ],
)
def test_gluon_gemm16_heights(size, low, waves, rng):
    """Tiles of a group have the same number of waves if possible, and cover its rows."""
    shape = GluonGemm16(size, 256, 64, 1, group_m=64, part_n=64)
    row_tiles, locate = (gluon.emulated(function) for function in (gluon_gemm16.row_tiles, gluon_gemm16.locate))
    found = [locate(i, size, low, shape) for i in range(row_tiles(size, low))]
    assert [number for _, number, _ in found] == waves
    assert [row for row, _, _ in found] == [64 * sum(waves[:i]) for i in range(len(waves))]


STAGE_FREE = "        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)\n"
MISTAKES = {
    "no wait for operands": ("        await_step(pipeline, slot, count, S)\n", ""),
    "no wait for a free stage": (STAGE_FREE, ""),
    "step released too early": (
        "        totals = issue(pipeline, slot, totals, False",
        "        arrive(pipeline.empty.index(slot))\n        totals = issue(pipeline, slot, totals, False",
    ),
    "a step is not finished": (
        "total0, total1, total2 = warpgroup_mma_wait(3,",
        "total0, total1, total2 = warpgroup_mma_wait(6,",
    ),
    "first wave stored too early": (
        "warpgroup_mma_wait(WAVES - 1, deps=(total0,))",
        "warpgroup_mma_wait(WAVES, deps=(total0,))",
    ),
    "second wave stored too early": (
        "warpgroup_mma_wait(WAVES - 2, deps=(total1,))",
        "warpgroup_mma_wait(WAVES - 1, deps=(total1,))",
    ),
    "no wait for the store before": ("    tma.store_wait(1)", "    tma.store_wait(2)"),
    "no fence": ("    fence_async_shared()\n", ""),
    "too many arrivals expected": ("init(pipeline.empty.index(s), count=8)", "init(pipeline.empty.index(s), count=9)"),
    "wrong number of bytes": (
        "(ROWS + S.weights_n) * S.depth * 2)",
        "(ROWS + S.weights_n) * S.depth * 2 + 1)",
    ),
    "no wait at the end": ("    tma.store_wait(0, read_only=False)", "    pass"),
    "rows of the next group": (
        "place.row - place.end + BOUND, place.column]",
        "place.row - place.end - 9 + BOUND, place.column]",
    ),
    "waits for a step that no tile has": ("min(steps - 1, 1)", "1"),
    "sizes past the last row": (
        "size = rows_of(group, start, sizes, S)",
        "size = gl.load(sizes + group, mask=group < S.num_groups, other=S.M)",
    ),
    "other rows of the last step": (
        "[BOUND, end, k - end + BOUND, row]",
        "[BOUND, end, min(k, end - 64) - end + BOUND, row]",
    ),
    "waves of two tiles overlap": ("(tile * fewest + min(tile, more)) * WAVE", "(tile * fewest) * WAVE"),
}
OF_GRADIENT = {"other rows of the last step"}
OF_ACTIVATION = {
    "up values before gates": ("panel % 2 * S.N", "(1 - panel % 2) * S.N"),
    "columns of the other consumer": ("panel // 2 * (HALF_N // 2)", "(1 - panel // 2) * (HALF_N // 2)"),
    "weights of other rows": (
        "rows = place.row + gl.arange(0, WAVE, gl.SliceLayout(1, LAYOUT))\n    used",
        "rows = gl.arange(0, WAVE, gl.SliceLayout(1, LAYOUT))\n    used",
    ),
}


@pytest.mark.parametrize("mistake", [*MISTAKES, *OF_ACTIVATION])
def test_gluon_gemm16_mistake_is_found(mistake, tmp_path, rng):
    """Each mistake gives an error, or wrong numbers, for one of a few orders."""
    run = gradient if mistake in OF_GRADIENT else activate if mistake in OF_ACTIVATION else multiply
    cases = ([320, 130], 64, 0), ([150, 330], 512, 300), ([100], 64, 0)

    def error_of(broken, seed):
        sizes, k, spare = cases[seed % 3]
        return run(broken, rng, sizes, k, 256, programs=1, seed=seed, spare=spare)

    check_mistake(SOURCE, (MISTAKES | OF_ACTIVATION)[mistake], tmp_path, 6, 3e-3, error_of)
