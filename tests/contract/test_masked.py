"""masked_grouped_gemm and masked_gated_activation on valid rows, in FP8 and in the dtypes of tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
import oracle_quantized
import oracle_serving
from cases import BF16, F16, F32, FP8_WIRE, assert_close, assert_same_bits, fp8_tolerance, integers, reals
from harness import refusals_skip, to_numpy
from jax_ep.quantization import quantize as quantize_weights
from stored_experts import Fp8Operands, fp8_weights

# name: (rows M of a group, sizes)
GROUPS = {
    "few": (8, [3, 0, 8, 1]),
    "none": (8, [0, 0, 0, 0]),
    "several tiles": (150, [0, 150, 17, 64, 65, 0]),
    "one": (1, [1]),
    "sizes that no caller should pass": (20, [-3, 21, 2**31 - 1, -(2**31), 5]),
}


def counted(rows, sizes):
    """Return which rows are valid, [L, M]."""
    return np.arange(rows) < np.asarray(sizes, np.int64)[:, None]


def poison(array, real):
    """Set rows that are not valid to NaN."""
    return np.where(real.reshape(*real.shape, *[1] * (array.ndim - real.ndim)), array, np.array(np.nan, array.dtype))


def gemm(implementation, **options):
    call = jax.jit(partial(jax_ep.masked_grouped_gemm, implementation=implementation, **options))
    return lambda *args, **scales: to_numpy(call(*args, **scales))


class Quantized(Fp8Operands):
    def __init__(self, rng, sizes, rows, depth, columns):
        super().__init__(rng, (len(sizes), rows), depth, len(sizes), columns)
        self.real, self.sizes = counted(rows, sizes), np.array(sizes, np.int32)

    def call(self, fn):
        lhs, scales = poison(self.lhs, self.real), poison(self.lhs_scales, self.real)
        return fn(lhs, fp8_weights(self.rhs, self.rhs_scales), self.sizes, lhs_scales=scales)

    def want(self):
        return oracle_serving.masked_grouped_gemm(*self.dequantized())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("expected_rows", [None, 4, 16, 100])
@pytest.mark.slow(unless={"expected_rows": [None, 16]})
def test_masked_fp8(implementation, groups, expected_rows, rng):
    rows, sizes = GROUPS[groups]
    problem = Quantized(rng, sizes, rows, 384, 200)
    got = problem.call(gemm(implementation, preferred_element_type=jnp.float32, expected_rows=expected_rows))
    assert got.dtype == F32
    assert_close(got[problem.real], problem.want()[problem.real], tolerance=fp8_tolerance(implementation))


@pytest.mark.parametrize("group_size", [256, 64])
def test_masked_other_block_size(implementation, group_size, rng):
    """As low_latency_dispatch quantizes them: larger blocks work, and smaller ones are an error."""
    x, ids = reals(rng, 6, 512, dtype=BF16), rng.integers(0, 3, (6, 2), dtype=np.int32)
    sizes = {"num_experts": 3, "max_tokens_per_rank": 6, "axis_name": (), "implementation": implementation}
    d = jax.jit(partial(jax_ep.low_latency_dispatch, group_size=group_size, **sizes))(x, ids)
    problem = Quantized(rng, [1, 1, 1], 6, 512, 40)
    call = gemm(implementation, preferred_element_type=jnp.float32)
    w = fp8_weights(problem.rhs, problem.rhs_scales)
    if group_size < 128:
        with pytest.raises(ValueError, match=r"These are for 64 columns: quantize with group_size=128"):
            call(d.tokens, w, d.group_sizes, lhs_scales=d.scales)
        return
    got, real = call(d.tokens, w, d.group_sizes, lhs_scales=d.scales), counted(6, d.group_sizes)
    scales = np.where(real[..., None], to_numpy(d.scales), 0)  # Rows without a token are undefined.
    lhs = oracle.dequantize(to_numpy(d.tokens), scales.repeat(2, axis=-1))
    rhs = oracle_quantized.dequantize(problem.rhs, problem.rhs_scales, "fp8")
    want = oracle_serving.masked_grouped_gemm(np.where(real[..., None], lhs, 0), rhs)
    assert_close(got[real], want[real], tolerance=fp8_tolerance(implementation))
    # And back in FP8, with its own scale blocks.
    y = jnp.where(real[..., None], got, 0).astype(jnp.bfloat16)[..., :40].repeat(16, axis=-1)[..., :640]
    weights = jnp.full(ids.shape, 0.5)
    back = partial(jax_ep.low_latency_combine, axis_name=(), implementation=implementation)
    rounded, exact = (
        to_numpy(jax.jit(call)(y, ids, weights, d.handle)).astype(np.float64)
        for call in (partial(back, schedule=FP8_WIRE), back)
    )
    assert np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.slow(unless={"dtype": [BF16, F32]})
def test_masked_other_dtypes(implementation, groups, dtype, rng):
    rows, sizes = GROUPS[groups]
    real, depth = counted(rows, sizes), 72
    lhs, rhs = reals(rng, len(sizes), rows, depth, dtype=dtype), reals(rng, len(sizes), 40, depth, dtype=dtype)
    call, sizes = gemm(implementation), np.array(sizes, np.int32)
    got = call(poison(lhs, real), np.swapaxes(rhs, 1, 2), sizes)
    assert got.dtype == dtype
    assert_same_bits(got[real], call(poison(lhs, real), quantize_weights(jnp.swapaxes(rhs, 1, 2), None), sizes)[real])
    assert_close(got[real], oracle_serving.masked_grouped_gemm(lhs, rhs)[real])


def test_masked_covers_rows_and_columns(implementation, rng):
    """Small integers are exact, so that any lost or doubled product shows."""
    sizes = rng.integers(0, 40, 9).astype(np.int32)
    lhs, rhs = integers(rng, 9, 39, 264, dtype=BF16), integers(rng, 9, 301, 264, dtype=BF16)
    got = gemm(implementation, preferred_element_type=jnp.float32)(lhs, np.swapaxes(rhs, 1, 2), sizes)
    real = counted(39, sizes)
    np.testing.assert_array_equal(got[real], oracle_serving.masked_grouped_gemm(lhs, rhs)[real])


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.slow(unless={"activation": ["silu"]})
def test_masked_activation(implementation, activation, quantize, rng, subtests):
    call = jax.jit(
        partial(
            jax_ep.ops.masked.masked_gated_activation,
            experts=jax_ep.Experts(activation),
            quantize=quantize,
            implementation=implementation,
        )
    )
    for dtype in (BF16, F32):
        for name, (rows, sizes) in GROUPS.items():
            with subtests.test(f"{name}, {dtype}"), refusals_skip():
                real = counted(rows, sizes)
                hidden = 3 * reals(rng, len(sizes), rows, 2 * 384, dtype=F32)
                hidden = hidden.astype(dtype)
                values, scales = to_numpy(call(poison(hidden, real), np.array(sizes, np.int32)))
                whole = oracle_serving.gated_activation(hidden, activation)
                want = whole[real]
                if not quantize:
                    assert scales is None and values.dtype == dtype
                    assert_close(values[real], want)
                    continue
                assert values.dtype == oracle.FP8 and scales.dtype == F32
                want_scales = oracle.quantize(whole.astype(F32), 128)[1][real]
                np.testing.assert_allclose(scales[real], want_scales, rtol=1e-4)
                error = np.abs(oracle.dequantize(values[real], scales[real]) - want)
                bound = np.maximum(np.abs(want) * 2.0**-4, want_scales.repeat(128, -1) * 2.0**-10)
                # In float32, the gelu of a negative number has few digits, because it multiplies by a difference from
                # one.
                few_digits = np.abs(np.prod(np.split(hidden[real].astype(np.float64), 2, axis=-1), axis=0)) * 2.0**-22
                assert (error <= bound * 1.001 + few_digits).all()


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_masked_nan_stays_in_scale_block(implementation, activation):
    hidden = np.ones((1, 2, 512), F32)
    hidden[0, 1, 3] = np.nan
    call = partial(
        jax_ep.ops.masked.masked_gated_activation, experts=jax_ep.Experts(activation), implementation=implementation
    )
    values, scales = to_numpy(call(jnp.asarray(hidden), jnp.array([2], jnp.int32)))
    affected = np.isnan(oracle.dequantize(values, scales))
    assert affected[0, 1, :128].all() and not affected[0, 1, 128:].any() and not affected[0, 0].any()


def test_masked_vmap(implementation, rng):
    sizes = np.array([[3, 0], [1, 8]], np.int32)
    lhs, rhs = integers(rng, 2, 2, 8, 64, dtype=BF16), integers(rng, 2, 24, 64, dtype=BF16)
    call = partial(jax_ep.masked_grouped_gemm, implementation=implementation)
    got = to_numpy(jax.jit(jax.vmap(call, in_axes=(0, None, 0)))(lhs, np.swapaxes(rhs, 1, 2), sizes))
    for i in range(2):
        real = counted(8, sizes[i])
        assert_close(got[i][real], oracle_serving.masked_grouped_gemm(lhs[i], rhs)[real])
