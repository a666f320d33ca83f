"""The Pallas kernels with all tiles against the oracle, with Mosaic's race detector, and their lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import facts_of
import oracle
from cases import BF16, F16, F32, integers, reals
from jax_ep.core.expert_matrices import SplitWeights
from jax_ep.pallas import grouped_gemm as gemm
from jax_ep.pallas import requirements, tiling
from jax_ep.pallas.tiling import ForwardTiles
from jax_ep.types import Options

REFUSAL = requirements.unsupported_reason(facts_of.gemm(BF16), Options("grouped_gemm", (), ("pallas",)))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
interpreted = pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is about the interpreter")

# One tile per group, some of one block_m, and many, visited in bands; one, two and four chunks of results.
LOW, HALF, HIGH = ForwardTiles((16, 32), band=2), ForwardTiles((32, 64, 80, 96, 112, 128)), ForwardTiles()
FLOAT32 = ForwardTiles(tuple(range(32, 257, 32)))
# Groups that start within blocks of 8 rows and end at all kinds of positions, and rows past them.
SIZES = np.array([3, 0, 66, 128, 1, 0, 39], np.int32)
ROWS = 251


@pytest.mark.parametrize(("tiles", "transpose"), [(LOW, False), (LOW, True), (HALF, False), (HIGH, True)])
def test_pallas_forward(tiles, transpose, rng, races):
    """Several tiles and steps in every direction; products of small integers are exact, so any lost row shows."""
    lhs, rhs = integers(rng, ROWS, 200, dtype=BF16), integers(rng, 7, 200, 328, dtype=BF16)
    want = oracle.grouped_gemm(lhs, rhs, SIZES)
    lhs[SIZES.sum() :] = np.nan
    right = np.ascontiguousarray(np.swapaxes(rhs, 1, 2)) if transpose else rhs
    out_dtype = F32 if tiles is HALF else BF16
    out = gemm.grouped_gemm(lhs, right, SIZES, transpose=transpose, out_dtype=out_dtype, tiles=tiles)
    np.testing.assert_array_equal(np.asarray(out), want.astype(out_dtype))
    assert races() == 0


@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
def test_pallas_weight_gradients(out_dtype, rng, races):
    lhs, rhs = integers(rng, ROWS, 200, dtype=F16), integers(rng, ROWS, 328, dtype=F16)
    used = slice(SIZES.sum())
    _, want = oracle.grouped_gemm_gradients(lhs[used], np.zeros((7, 200, 328), F16), SIZES, rhs[used])
    lhs[SIZES.sum() :], rhs[SIZES.sum() :] = np.nan, np.inf
    out = gemm.weight_gradient(lhs, rhs, SIZES, out_dtype=out_dtype)
    np.testing.assert_array_equal(np.asarray(out), want.astype(out_dtype))
    assert races() == 0


@interpreted
def test_pallas_race_detector(rng, races, monkeypatch):
    """A consumer that does not wait for its stores would change what they send."""
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, **options: wait(4 if options else n, **options))
    lhs, rhs, sizes = reals(rng, 256, 64, dtype=BF16), reals(rng, 1, 64, 512, dtype=BF16), np.array([256], np.int32)
    options = {"transpose": False, "out_dtype": BF16, "tiles": LOW}
    raised = ""
    try:
        jax.block_until_ready(gemm.grouped_gemm(lhs, rhs, sizes, **options))
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12 reports a race this way; 0.11 prints it.
        raised = str(error)
    assert "RACE DETECTED" in raised or races() > 0


@pytest.mark.parametrize("tiles", [LOW, HALF, None], ids=str)
def test_pallas_one_chunk_wide(tiles, rng):
    """Columns of tiles beyond the result must not reach its other rows, and rows must not reach other groups."""
    sizes = np.array([5, 0, 12, 100], np.int32)
    lhs, rhs, d_out = (integers(rng, *shape, dtype=BF16) for shape in ((120, 64), (4, 64, 64), (120, 64)))
    if tiles:
        out = gemm.grouped_gemm(lhs, rhs, sizes, transpose=False, out_dtype=BF16, tiles=tiles)
        want = oracle.grouped_gemm(lhs, rhs, sizes)
    else:
        out = gemm.weight_gradient(lhs, d_out, sizes, out_dtype=BF16)
        want = oracle.grouped_gemm_gradients(lhs, rhs, sizes, d_out)[1]
    np.testing.assert_array_equal(np.asarray(out), want.astype(BF16))


@pytest.mark.parametrize(
    ("end", "out_dtype"), [*((end, BF16) for end in (1, 8, 9, 33, 64, 97, 128, 250)), *((end, F32) for end in (7, 65))]
)
def test_pallas_all_block_m(end, out_dtype, rng):
    """Groups start and end within blocks, next to rows of NaN: no row is missing and no extra row is stored."""
    sizes = np.array([5, end, 255 - end], np.int32)
    lhs, rhs, d_out = (integers(rng, *shape, dtype=BF16) for shape in ((267, 64), (3, 64, 64), (267, 64)))
    lhs[260:] = d_out[260:] = np.nan
    out = gemm.grouped_gemm(lhs, rhs, sizes, transpose=False, out_dtype=out_dtype)
    np.testing.assert_array_equal(np.asarray(out), oracle.grouped_gemm(lhs, rhs, sizes).astype(out_dtype))
    out = gemm.weight_gradient(lhs, d_out, sizes, out_dtype=out_dtype)
    want = oracle.grouped_gemm_gradients(lhs[:260], rhs, sizes, d_out[:260])[1]
    np.testing.assert_array_equal(np.asarray(out), want.astype(out_dtype))


def lower(call, *shapes):
    """Return MLIR of a call for CUDA, with all checks of layouts, of shared memory and of copy alignment."""
    dtypes = [jnp.int32 if len(shape) == 1 else BF16 for shape in shapes]
    arguments = map(jax.ShapeDtypeStruct, shapes, dtypes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "is_interpreted", lambda: False)
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tiles", "x64", "out_dtype", "transpose"),
    [
        *((LOW, False, BF16, False), (LOW, True, F32, True), (HALF, False, F32, False)),
        *((HIGH, False, BF16, True), (HIGH, True, BF16, False)),
    ],
    ids=str,
)
def test_pallas_forward_lowers(tiles, x64, out_dtype, transpose):
    call = functools.partial(gemm.grouped_gemm, transpose=transpose, out_dtype=out_dtype, tiles=tiles)
    with jax.enable_x64(x64):
        assert "mosaic_gpu" in lower(call, (32768, 7168), (64, 4096, 7168) if transpose else (64, 7168, 4096), (64,))
        if tiles is LOW:
            assert "mosaic_gpu" in lower(call, (5, 9), (3, 8, 9) if transpose else (3, 9, 8), (3,))
        shape = (4096, 7168) if transpose else (7168, 4096)
        two = lower(
            lambda lhs, *w: call(lhs, SplitWeights(*w[:2]), w[2]), (32768, 7168), (64, *shape), (2, *shape), (66,)
        )
        assert "mosaic_gpu" in two and "stablehlo.concatenate" not in two


@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
def test_pallas_weights_lower(out_dtype):
    call = functools.partial(gemm.weight_gradient, out_dtype=out_dtype)
    assert "mosaic_gpu" in lower(call, (32768, 7168), (32768, 4096), (64,))
    assert "mosaic_gpu" in lower(call, (5, 9), (5, 8), (3,))


def test_pallas_large_results_lower():
    """More than 2**31 elements: positions are pairs of a row and a column, never one number."""
    call = functools.partial(gemm.grouped_gemm, transpose=False, out_dtype=BF16)
    assert "mosaic_gpu" in lower(call, (1 << 20, 64), (8, 64, 4096), (8,))


def test_pallas_misaligned_copies_do_not_lower(monkeypatch):
    """They would copy the wrong rows, which only the lowering detects, not the interpreter."""
    monkeypatch.setattr(pl, "multiple_of", lambda x, multiple: x)
    jax.clear_caches()
    call = functools.partial(gemm.grouped_gemm, transpose=False, out_dtype=BF16)
    with pytest.raises(ValueError, match=r"divisibility|Failed to infer"):
        lower(call, (32768, 7232), (64, 7232, 4096), (64,))
    jax.clear_caches()


def test_pallas_tables_fit_in_shared_memory():
    """All tiles in the tables are lowered above."""
    assert {tiling.forward_tiles(rows, 64) for rows in (64, 32768, 1 << 20)} == {HALF, HIGH}
    assert {tiling.forward_tiles(rows, 64, 4) for rows in (64, 32768)} == {HALF, FLOAT32}
