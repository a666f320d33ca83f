"""The kernels that make FP8 operands, in the interpreter: the bits of the portable functions, of the rows in use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import Experts
from jax_ep.megakernels import activation as kernels
from jax_ep.xla import activation as portable

SIZES = jnp.array([5, 0, 17, 3], jnp.int32)
USED, ROWS = 25, 40


def magnitudes(rng, *shape, dtype=jnp.bfloat16):
    """Of very different sizes, zeros and subnormal numbers of FP8 among them."""
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)
    return np.where(rng.random(shape) < 0.1, 0, values).astype(dtype)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("columns", [128, 384, 1280])
def test_rows(pool, rng, columns, dtype):
    x = magnitudes(rng, ROWS, columns, dtype=dtype)
    x[3, 130 % columns], x[7], x[USED:] = np.nan, 0, np.nan
    values, scales = kernels.quantize_rows(jnp.asarray(x), SIZES)
    want = portable.quantize_rows(jnp.asarray(x), SIZES)
    same(values[:USED], want[0][:USED])
    same(scales[:USED], want[1][:USED])

    assert (np.asarray(values)[USED:].view(np.uint8) == 0xFF).all(), "rows past the groups were written"
    rows = kernels.dequantize_rows(*want, SIZES, dtype=dtype)
    assert rows.dtype == dtype
    same(rows[:USED], portable.dequantize_rows(*want, SIZES, dtype=dtype)[:USED])


@pytest.mark.parametrize("columns", [128, 200, 40])
def test_matrices(pool, rng, columns):
    w = magnitudes(rng, 3, 256, columns)
    w[1, 140, 3], w[2] = np.nan, 0
    values, scales = kernels.quantize_matrices(jnp.asarray(w))
    want = portable.quantize_matrices(jnp.asarray(w))
    assert values.shape == want[0].shape and scales.shape == want[1].shape
    same(values, want[0])
    same(scales, want[1])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("experts", [
    *(Experts(name, gated=gated) for name in ("silu", "gelu", "relu") for gated in (True, False)),
    Experts(interleaved=True, alpha=1.702, clamp=1.0, up_offset=1.0),
    Experts(weight_on="input"),
], ids=str)  # fmt: skip
def test_activation(pool, rng, experts, keep):
    inner, columns = 256, 512 if experts.gated else 256
    hidden = rng.standard_normal((ROWS, columns)).astype(jnp.bfloat16)
    weights = rng.random(ROWS).astype(np.float32)
    bias = jnp.asarray(rng.standard_normal((SIZES.shape[0], columns)), jnp.bfloat16) if experts.interleaved else None
    hidden[USED:], weights[USED:] = np.nan, np.nan
    inputs = jnp.asarray(hidden), jnp.asarray(weights), bias, SIZES
    want = portable.activate_quantized(experts, *inputs, keep=keep)
    assert want[0].shape == (ROWS, inner)
    got = [x if x is None else np.asarray(x) for x in kernels.activate_quantized(experts, *inputs, keep=keep)]
    np.testing.assert_allclose(got[1][:USED], np.asarray(want[1])[:USED], rtol=1e-5)
    exact = np.asarray(want[0]).astype(np.float32)[:USED]
    # Where the last bits of the activations differ, a value may round to its neighbour.
    error = np.abs(got[0][:USED].astype(np.float32) - exact)
    assert (error <= np.maximum(np.abs(exact) * 2.0**-3, 2.0**-9)).all() and (error > 0).mean() < 0.01
    assert (got[2] is None) == (want[2] is None) == (not keep)
    if keep:
        wide = np.asarray(want[2]).astype(np.float32)[:USED]
        np.testing.assert_allclose(got[2][:USED].astype(np.float32), wide, rtol=2**-7, atol=1e-6)
