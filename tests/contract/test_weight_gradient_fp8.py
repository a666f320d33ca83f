"""The weight gradient in FP8: column-wise quantization with a scale per 128 rows, and grouped GEMMs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import facts_of
import oracle_fp8
from cases import BF16, F32, F64, assert_same_bits, reals
from harness import to_numpy
from jax_ep.ops import plan, registry

# name: (rows M, group sizes); rows past the sum hold NaN.
GROUPS = {
    "around blocks": (560, [0, 1, 127, 128, 129, 0, 130, 9, 0]),
    "spare rows": (40, [3, 0, 5, 2]),
    "one": (300, [300]),
    "none used": (20, [0, 0]),
    "one row": (1, [0, 1]),
}


NEAR = 5e-3
"""In the norm of a group: values next to a tie round differently in the oracle, and tensor cores add 14 bits."""


def assert_near(got, want, limit=NEAR):
    error, size = (np.linalg.norm(a.astype(np.float64), axis=(1, 2)) for a in (got.astype(np.float64) - want, want))
    assert (error <= limit * size).all(), error / np.maximum(size, 1e-300)


def kernels(implementation):
    """Return the functions for FP8 GEMMs and their operands."""
    options = registry.options("test", implementation=implementation)
    part = plan.fp8_operands(options, F32, (1,))
    return plan.gemm(options, facts_of.gemm(jnp.float8_e4m3fn)).run, registry.ACTIVATION.by(part.implementation)


def weight_gradient(implementation, out_dtype=jnp.float32):
    """Return a function of rows `[M, K]` and `[M, N]` to `[G, K, N]`."""
    products, operands = kernels(implementation)

    @jax.jit
    def run(lhs, rhs, sizes):
        left, right = (operands.quantize_columns(x, sizes) for x in (lhs, rhs))
        return products.weight_gradient_fp8(left, right, sizes, out_dtype=out_dtype)

    return lambda *args: to_numpy(run(*args))


def rows_of(rng, rows, sizes, width, dtype=F32):
    """Draw rows of very different magnitudes; NaN past the groups."""
    x = reals(rng, rows, width) * 2.0 ** rng.integers(-6, 6, (rows, 1))
    x[sum(sizes) :] = np.nan
    return x.astype(dtype)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.slow_interpreted(unless={"groups": ["around blocks", "spare rows"]})
def test_weight_gradient_fp8_groups(implementation, groups, rng):
    rows, sizes = GROUPS[groups]
    lhs, rhs = (rows_of(rng, rows, sizes, width) for width in (128, 256))
    got = weight_gradient(implementation)(lhs, rhs, np.array(sizes, np.int32))
    want = oracle_fp8.weight_gradient(np.nan_to_num(lhs), np.nan_to_num(rhs), np.array(sizes))
    assert got.dtype == F32
    assert_near(got, want)
    assert not got[np.array(sizes) == 0].any()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.slow(unless={"dtype": [BF16]})
def test_weight_gradient_fp8_two_arrays(implementation, dtype, rng):
    """The first groups in one array and the others in another one have the bits that they have in one.

    Empty groups of the second array have no gradient.
    """
    sizes = np.array([0, 130, 3, *[0] * 40, 5], np.int32)
    lhs, rhs = (rows_of(rng, 140, sizes, width, dtype) for width in (128, 264))
    products, operands = kernels(implementation)
    left, right = (operands.quantize_columns(jnp.asarray(x), jnp.array(sizes)) for x in (lhs, rhs))
    whole = products.weight_gradient_fp8(left, right, jnp.array(sizes), out_dtype=dtype)
    for num_home in (1, 2, 3):
        parts = products.weight_gradient_fp8(left, right, jnp.array(sizes), out_dtype=dtype, num_home=num_home)
        home, spare = map(to_numpy, parts)
        used = sizes[num_home:] > 0
        assert_same_bits(home, to_numpy(whole[:num_home]))
        assert_same_bits(spare[used], to_numpy(whole[num_home:])[used])


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
@pytest.mark.slow_interpreted
def test_weight_gradient_fp8_result_dtypes(implementation, dtype, rng, request):
    if dtype == F64:
        request.getfixturevalue("float64")
    sizes = [130, 0, 20]
    lhs, rhs = (rows_of(rng, 150, sizes, 128, BF16) for _ in range(2))
    got = weight_gradient(implementation, dtype)(lhs, rhs, np.array(sizes, np.int32))
    assert got.dtype == dtype
    want = oracle_fp8.weight_gradient(lhs.astype(F32), rhs.astype(F32), np.array(sizes))
    assert_near(got, want, 4 * NEAR)  # Ties are frequent in bfloat16, and the last group has few rows.


def test_weight_gradient_fp8_accumulates_in_float32(implementation):
    """Small terms after a large one are not lost, as in sums with fewer bits."""
    lhs = np.full((16 * 128, 128), 2.0**-6, F32)
    lhs[:128] = 2.0**9
    got = weight_gradient(implementation)(lhs, np.ones((16 * 128, 128), F32), np.array([16 * 128], np.int32))
    np.testing.assert_allclose(got, 2.0**16 + 15 * 2, rtol=1e-6)


@pytest.mark.parametrize("what", ["lhs", "rhs"])
def test_weight_gradient_fp8_nan_stays_in_group(implementation, what, rng):
    sizes = [20, 133, 0, 37]
    operands = {name: rows_of(rng, 190, sizes, 128) for name in ("lhs", "rhs")}
    want = oracle_fp8.weight_gradient(operands["lhs"], operands["rhs"], np.array(sizes))
    operands[what][40, 7] = np.nan
    got = weight_gradient(implementation)(*operands.values(), np.array(sizes, np.int32))
    affected = got[1][7] if what == "lhs" else got[1][:, 7]
    assert np.isnan(affected).all() and np.isnan(got).sum() == 128
    assert_near(np.delete(got, 1, 0), np.delete(want, 1, 0))


@pytest.mark.slow_interpreted
def test_weight_gradient_fp8_rows(implementation, rng):
    """FP8 rows are rounded again, along the other axis."""
    sizes = np.array([140, 0, 30], np.int32)
    lhs, rhs = (reals(rng, 170, 128) for _ in range(2))
    products, operands = kernels(implementation)

    @jax.jit
    def run(lhs, rhs):
        left = operands.quantize_columns(operands.quantize_rows(lhs, sizes), sizes)
        rows, right = operands.quantize_both_ways(rhs, sizes)
        out = products.weight_gradient_fp8(left, right, sizes, out_dtype=jnp.float32)
        return out, operands.dequantize_rows(*rows, sizes, dtype=jnp.float32)

    got, rows = to_numpy(run(lhs, rhs))
    want = oracle_fp8.weight_gradient(oracle_fp8.quantized_rows(lhs), rhs, sizes)
    assert_near(got, want, 2 * NEAR)
    assert_near(rows[None], oracle_fp8.quantized_rows(rhs)[None])
