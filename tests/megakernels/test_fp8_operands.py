"""The FP8 quantization kernels in the interpreter: bit-for-bit equal to the portable functions on rows in use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import kernel

from jax_ep import Experts
from jax_ep.core.activations import HiddenRows
from jax_ep.core.expert_matrices import SplitWeights
from jax_ep.core.kernel import Config
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels.launch import launch
from jax_ep.xla import activation as portable

SIZES = jnp.array([5, 0, 17, 3], jnp.int32)
USED, ROWS = 25, 40


def magnitudes(rng, *shape, dtype=jnp.bfloat16):
    """Draw numbers of very different magnitudes, including zeros and FP8 subnormals."""
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)
    return np.where(rng.random(shape) < 0.1, 0, values).astype(dtype)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32))


def test_fp8_operands_inverse_scales(pool, rng):
    """Rounded like a division, also for zeros, infinities and NaN; tests/gpu covers all mantissas."""
    largest = np.concatenate([
        [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000],  # Includes subnormal and largest numbers.
        rng.integers(0, 0x7F800000, 4089),
    ]).astype(np.int32)  # fmt: skip
    shape = jax.ShapeDtypeStruct(largest.shape, jnp.float32)
    operands, config = (jnp.asarray(largest),), Config(num_programs=4)
    results = launch(kernel("scales", "invert"), operands, (shape, shape), config, {"BLOCK": 1024})
    scales, inverse = map(np.asarray, results)
    want = np.maximum(largest.view(np.float32) * np.float32(1 / 448), np.float32(2.0**-120))
    np.testing.assert_array_equal(scales, want)
    np.testing.assert_array_equal(inverse, np.float32(1) / want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("columns", [128, 384, 1280])
def test_fp8_operands_rows(pool, rng, columns, dtype):
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
def test_fp8_operands_matrices(pool, rng, columns):
    w = magnitudes(rng, 3, 256, columns)
    w[1, 140, 3], w[2] = np.nan, 0
    values, scales = kernels.quantize_matrices(jnp.asarray(w))
    want = portable.quantize_matrices(jnp.asarray(w))
    assert values.shape == want[0].shape and scales.shape == want[1].shape
    same(values, want[0])
    same(scales, want[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_fp8_operands_weights_both_layouts(pool, rng, dtype):
    w = jnp.asarray(magnitudes(rng, 2, 256, 384, dtype=dtype))
    for name, options in (("quantize_matrices", {"transpose": False}), ("quantize_masters", {})):
        for got, want in zip(*(getattr(k, name)(w, **options) for k in (kernels, portable)), strict=True):
            assert got.shape == want.shape
            same(got, want)


@pytest.mark.parametrize("transpose", [True, False])
def test_fp8_operands_weights_in_two_arrays(pool, rng, transpose):
    w = jnp.asarray(magnitudes(rng, 3, 256, 200 if transpose else 256))
    for num_home in (1, 2):
        parts = SplitWeights(w[:num_home], w[num_home:])
        found = (k.quantize_matrices(parts, transpose=transpose) for k in (kernels, portable))
        for got, want in zip(*found, strict=True):
            same(got, want)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("sizes", "used"), [((0, 0, 0, 0), 1), ((3, 0, 2, 0), 3)])
def test_fp8_operands_weights_of_slots_in_use(pool, rng, sizes, used, transpose):
    w = jnp.asarray(magnitudes(rng, 4, 256, 256))
    parts = SplitWeights(w[:1], w[1:])
    found = kernels.quantize_matrices(parts, jnp.array(sizes, jnp.int32), transpose=transpose)
    for got, want in zip(found, portable.quantize_matrices(parts, transpose=transpose), strict=True):
        same(got[:used], want[:used])
        assert np.isnan(np.asarray(got[used:], np.float32)).all(), "free slots were written"


BLOCKS = jnp.array([5, 0, 130, 128, 3], jnp.int32)  # 5 blocks in use, two of them of partially filled groups.
IN_BLOCKS, BLOCK_ROWS = 266, 290


@pytest.mark.parametrize("kind", ["bf16", "f32", "FP8", "both layouts"])
def test_fp8_operands_columns(pool, rng, kind):
    """The blocks in use match the portable function, with zeros after the rows of a group; nothing else is written."""
    x = magnitudes(rng, BLOCK_ROWS, 256, dtype=jnp.float32 if kind == "f32" else jnp.bfloat16)
    x[8, 130], x[20], x[:, 3], x[IN_BLOCKS:] = np.nan, 0, 0, np.nan
    x = jnp.asarray(x)
    rows = portable.quantize_rows(x, BLOCKS) if kind == "FP8" else x
    if kind == "both layouts":
        (by_rows, by_columns), (want_rows, want) = (k.quantize_both_ways(x, BLOCKS) for k in (kernels, portable))
        for got, expected in zip(by_rows, want_rows, strict=True):
            same(got[:IN_BLOCKS], expected[:IN_BLOCKS])
        assert (np.asarray(by_rows[0])[IN_BLOCKS:].view(np.uint8) == 0xFF).all(), "rows past the groups were written"
    else:
        by_columns, want = (k.quantize_columns(rows, BLOCKS) for k in (kernels, portable))
    same(by_columns[0][:, : 5 * 128], want[0][:, : 5 * 128])
    same(by_columns[1][:5], want[1][:5])
    assert np.isnan(np.asarray(by_columns[1])).sum() > 1  # That of the NaN, and the unwritten ones.
    assert (np.asarray(by_columns[0])[:, 5 * 128 :].view(np.uint8) == 0xFF).all(), "places not in use were written"


GPT_OSS_GATES = Experts(interleaved=True, alpha=1.702, clamp=1.0, up_offset=1.0)


def hidden_rows(rng, experts, sizes, num_rows, inner):
    """Draw hidden rows, NaN past the groups, with a bias for interleaved gates."""
    columns = 2 * inner if experts.gated else inner
    hidden = rng.standard_normal((num_rows, columns)).astype(jnp.bfloat16)
    weights = rng.random(num_rows).astype(np.float32)
    bias = jnp.asarray(rng.standard_normal((sizes.shape[0], columns)), jnp.bfloat16) if experts.interleaved else None
    hidden[int(sizes.sum()) :], weights[int(sizes.sum()) :] = np.nan, np.nan
    return HiddenRows(jnp.asarray(hidden), jnp.asarray(weights), bias, sizes)


def check_nearest(got, want):
    """If the last bits of the activations differ, a value may round to its neighbor."""
    error = np.abs(got - want)
    assert (error <= np.maximum(np.abs(want) * 2.0**-3, 2.0**-9)).all() and (error > 0).mean() < 0.01


@pytest.mark.parametrize("experts", [Experts(), Experts("gelu", gated=False), GPT_OSS_GATES], ids=str)
def test_fp8_operands_activated_columns(pool, rng, experts):
    rows = hidden_rows(rng, experts, BLOCKS, BLOCK_ROWS, 128)
    got, want = (k.activate_columns(experts, rows) for k in (kernels, portable))
    np.testing.assert_allclose(np.asarray(got[1])[:5], np.asarray(want[1])[:5], rtol=1e-5)
    got, want = (np.asarray(pair[0]).astype(np.float32)[:, : 5 * 128] for pair in (got, want))
    check_nearest(got, want)
    assert not got[:, 5:128].any() and np.abs(want).max() == 448


@pytest.mark.parametrize("experts", [
    *(Experts(name, gated=gated) for name in ("silu", "gelu", "relu") for gated in (True, False)),
    *(GPT_OSS_GATES, Experts(weight_on="input")),
], ids=str)  # fmt: skip
def test_fp8_operands_activation(pool, rng, experts):
    rows = hidden_rows(rng, experts, SIZES, ROWS, 256)
    got, want = (k.activate_quantized(experts, rows) for k in (kernels, portable))
    assert want[0].shape == (ROWS, 256)
    np.testing.assert_allclose(np.asarray(got[1])[:USED], np.asarray(want[1])[:USED], rtol=1e-5)
    check_nearest(*(np.asarray(pair[0]).astype(np.float32)[:USED] for pair in (got, want)))
