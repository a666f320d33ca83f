"""grouped_gemm of FP8 operands: consecutive groups of rows, scales per row and per block of the weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BF16, F32, assert_close, fp8_tolerance, reals, relative_error
from harness import to_numpy
from jax_ep.quantization import quantize_fp8
from stored_experts import Fp8Operands, fp8_weights, quantized

IMPLEMENTATIONS = ("triton", "xla")
# name: (rows M, group sizes); rows past the sum hold NaN.
GROUPS = {
    "around tiles": (260, [0, 1, 31, 32, 33, 63, 64, 9, 0]),
    "spare rows": (40, [3, 0, 5, 2]),
    "one": (150, [150]),
    "none used": (20, [0, 0]),
    "one row": (1, [0, 1]),
}


def gemm(implementation, **options):
    call = jax.jit(partial(jax_ep.grouped_gemm, implementation=implementation, **options))
    return lambda *args, **scales: to_numpy(call(*args, **scales))


class Problem(Fp8Operands):
    """Rows past the groups are NaN."""

    def __init__(self, rng, rows, sizes, depth, columns):
        super().__init__(rng, (rows,), depth, len(sizes), columns)
        self.used, self.sizes = sum(sizes), np.array(sizes, np.int32)

    def call(self, fn):
        lhs, scales = self.lhs.copy(), self.lhs_scales.copy()
        lhs[self.used :], scales[self.used :] = np.nan, np.nan
        return fn(lhs, fp8_weights(self.rhs, self.rhs_scales), self.sizes, lhs_scales=scales)

    def want(self):
        lhs, rhs = self.dequantized()
        return oracle.grouped_gemm(lhs, np.swapaxes(rhs, 1, 2), self.sizes)


@pytest.mark.parametrize("columns", [200, 64])
@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_gemm_fp8_groups(implementation, groups, columns, rng):
    problem = Problem(rng, *GROUPS[groups], 384, columns)
    got = problem.call(gemm(implementation, preferred_element_type=jnp.float32))
    assert got.dtype == F32
    assert_close(got, problem.want(), tolerance=fp8_tolerance(implementation))
    assert not got[problem.used :].any(), "rows past the groups are not zero"


@pytest.mark.parametrize("dtype", [None, jnp.float16, jnp.float64], ids=str)
def test_grouped_gemm_fp8_result_dtypes(implementation, dtype, rng, request):
    if dtype == jnp.float64:
        request.getfixturevalue("float64")
    problem = Problem(rng, 20, [5, 0, 9], 256, 136)
    problem.lhs_scales /= 64  # float16 overflows at 65504.
    problem.rhs_scales /= 64
    got = problem.call(gemm(implementation, preferred_element_type=dtype))
    assert got.dtype == (BF16 if dtype is None else dtype)
    assert_close(got, problem.want(), tolerance=1e-5 if dtype == jnp.float64 else None)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_gemm_fp8_accumulates_in_float32(implementation, masked):
    """A small term after a large one is not lost, as in sums with fewer bits."""
    depth, rows = 16 * 128, (1, 4) if masked else (4,)
    scales = np.full((*rows, 16), 2.0**-6, F32)
    scales[..., 0] = 2.0**9
    w = fp8_weights(np.ones((1, 8, depth), oracle.FP8), np.ones((1, 1, 16), F32))
    operands = np.ones((*rows, depth), oracle.FP8), w, np.array([4], np.int32)
    call = jax_ep.masked_grouped_gemm if masked else jax_ep.grouped_gemm
    options = {"preferred_element_type": jnp.float32, "implementation": implementation}
    np.testing.assert_array_equal(jax.jit(partial(call, **options))(*operands, lhs_scales=scales), 2.0**16 + 15 * 2)


def test_grouped_gemm_fp8_quantized_operands(implementation, rng):
    """Of `quantize_fp8` and `quantize`: two roundings of 3 mantissa bits from the exact product."""
    sizes = np.array([17, 0, 30], np.int32)
    lhs, rhs = reals(rng, 47, 512, dtype=BF16), reals(rng, 3, 512, 96, dtype=BF16)
    rows, w = jax.jit(quantize_fp8)(lhs), quantized(rhs, "fp8", activations="fp8")
    call = gemm(implementation, preferred_element_type=jnp.float32)
    got = call(rows[0], w, sizes, lhs_scales=rows[1])
    want = oracle.grouped_gemm(lhs, rhs, sizes)
    assert 0.01 < relative_error(got, want) < 0.06


@pytest.mark.parametrize("what", ["lhs", "lhs_scales", "rhs", "rhs_scales"])
def test_grouped_gemm_fp8_nan_stays_in_group(implementation, what, rng):
    problem = Problem(rng, 90, [20, 33, 0, 37], 256, 72)
    want, bad = problem.want(), slice(20, 53)
    getattr(problem, what)[bad if what.startswith("lhs") else 1] = np.nan
    got = problem.call(gemm(implementation, preferred_element_type=jnp.float32))
    assert np.isnan(got[bad]).all()
    assert_close(np.delete(got, bad, 0), np.delete(want, bad, 0), tolerance=fp8_tolerance(implementation))


@pytest.mark.parametrize("sizes", [[-3, 5, 2], [2, 2**31 - 1, 2**31 - 1], [0, -(2**31), 7]])
def test_grouped_gemm_fp8_invalid_sizes(implementation, sizes, rng):
    """They change which rows are computed, and nothing else."""
    problem = Problem(rng, 12, [12], 128, 40)
    rhs, scales = np.repeat(problem.rhs, 3, 0), np.repeat(problem.rhs_scales, 3, 0)
    call = gemm(implementation, preferred_element_type=jnp.float32)
    operands = (problem.lhs, fp8_weights(rhs, scales), np.array(sizes, np.int32))
    got = call(*operands, lhs_scales=problem.lhs_scales)
    used = min(12, sum(max(0, size) for size in sizes))
    assert_close(got[:used], problem.want()[:used], tolerance=fp8_tolerance(implementation))
    assert not got[used:].any()


@pytest.mark.parametrize(("rows", "groups", "columns"), [(0, 2, 8), (3, 2, 0), (3, 0, 8)])
def test_grouped_gemm_fp8_empty_arrays(implementation, rows, groups, columns):
    got = gemm(implementation)(
        np.ones((rows, 128), oracle.FP8),
        fp8_weights(np.ones((groups, columns, 128), oracle.FP8), np.ones((groups, -(-columns // 128), 1), F32)),
        np.full(groups, rows, np.int32),
        lhs_scales=np.ones((rows, 1), F32),
    )
    assert got.shape == (rows, columns) and got.dtype == BF16 and not got.astype(F32).any()


def test_grouped_gemm_fp8_vmap(implementation, rng):
    problems = [Problem(rng, 20, sizes, 128, 24) for sizes in ([3, 9], [20, 0])]
    names = ("lhs", "rhs", "sizes", "lhs_scales", "rhs_scales")
    stacked = [np.stack([getattr(problem, name) for problem in problems]) for name in names]

    def call(lhs, rhs, sizes, lhs_scales, rhs_scales):
        options = {"preferred_element_type": jnp.float32, "implementation": implementation}
        return jax_ep.grouped_gemm(lhs, fp8_weights(rhs, rhs_scales), sizes, lhs_scales=lhs_scales, **options)

    got = to_numpy(jax.jit(jax.vmap(call))(*stacked))
    for i, problem in enumerate(problems):
        assert_close(got[i], problem.want(), tolerance=fp8_tolerance(implementation))
