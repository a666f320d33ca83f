"""FP8 weights in blocks of 128 by 128, within the documented error; NaN is never lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import oracle_serving
from cases import BF16, F32, assert_same_bits, reals
from harness import make_mesh
from jax_ep.quantization import dequantize, dequantize_fp8, quantize, quantize_fp8, with_layout
from jax_ep.serving import serving_weights


def largest_of_blocks(w: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each block of [..., N, K], [..., ceil(N / 128), K / 128]."""
    rows = range(0, w.shape[-2], 128)
    columns = range(0, w.shape[-1], 128)
    blocks = [[np.abs(w[..., i : i + 128, j : j + 128]).max(axis=(-2, -1)) for j in columns] for i in rows]
    return np.moveaxis(np.array(blocks), (0, 1), (-2, -1))


@pytest.mark.parametrize(("leading", "depth", "columns"), [((3,), 256, 200), ((), 128, 1), ((2, 2), 128, 256)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_quantize_fp8_error(
    leading: tuple[int, ...], depth: int, columns: int, dtype: np.dtype, rng: np.random.Generator
) -> None:
    w = (reals(rng, *leading, depth, columns) * 10.0 ** rng.uniform(-6, 0, (*leading, depth, columns))).astype(dtype)
    values, scales = map(np.asarray, jax.tree.leaves(jax.jit(partial(quantize, format="fp8"))(w)))
    assert values.dtype == oracle.FP8 and scales.dtype == F32
    want = np.swapaxes(w, -1, -2).astype(np.float64)
    assert values.shape == want.shape
    np.testing.assert_allclose(scales, largest_of_blocks(want) / 448, rtol=1e-6)
    error = np.abs(oracle_serving.dequantize_blocks(values, scales) - want)
    each = scales.repeat(128, -2)[..., :columns, :].repeat(128, -1)
    bound = np.maximum(np.abs(want) * 2.0**-4, each * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all() and (error / bound).max() > 0.5


def test_quantize_fp8_round_trip(rng: np.random.Generator) -> None:
    w = quantize(reals(rng, 2, 256, 300), "fp8")
    for dtype in (F32, BF16):
        got = np.asarray(dequantize(w, dtype))
        want = oracle_serving.dequantize_blocks(np.asarray(w.values), np.asarray(w.scales)).astype(F32).astype(dtype)
        np.testing.assert_array_equal(got, np.swapaxes(want, 1, 2))


def test_quantize_fp8_zeros_and_nan() -> None:
    w = np.zeros((256, 256), F32)
    w[3, 200] = np.nan
    back = np.asarray(dequantize(quantize(jnp.asarray(w), "fp8"), jnp.float32))
    affected = np.isnan(back)
    assert affected[:128, 128:].all() and affected.sum() == 128 * 128
    assert not back[~affected].any()


def test_quantize_fp8_nan_fills_block() -> None:
    x = np.zeros((256, 256), F32)
    x[3, 200] = np.nan
    affected = np.isnan(np.asarray(dequantize_fp8(*quantize_fp8(jnp.asarray(x)), jnp.float32)))
    assert affected[3, 128:].all() and affected.sum() == 128


@pytest.mark.parametrize(("inner", "compiled"), [(384, False), (384, True), (192, True)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow(unless={"kind": [AxisType.Auto], "inner": [192]})
def test_quantize_fp8_weights_sharded_same_bits(kind: AxisType, inner: int, compiled: bool, rng: Any) -> None:
    """More than one block along both axes, experts and columns sharded over devices."""

    def fn(w_gate_up: Any, w_down: Any) -> Any:
        pair = quantize(w_gate_up, "fp8")
        rows = quantize_fp8(jnp.swapaxes(w_gate_up, -1, -2))
        back = dequantize(pair, jnp.float32), dequantize_fp8(*rows, jnp.bfloat16)
        return pair, rows, back, serving_weights(w_gate_up, w_down, "fp8", activations="fp8")

    mesh = make_mesh((2, 2), ("expert", "tensor"), kind)
    matrices = reals(rng, 4, 256, 2 * inner), reals(rng, 4, inner, 256)
    specs = [(P("expert"), P("expert")), (P("expert", "tensor"), P("expert", None, "tensor"))]
    want = jax.tree.leaves(fn(*matrices))
    for spec in specs:
        placed = [jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip(matrices, spec, strict=True)]
        found = jax.tree.leaves((jax.jit(fn) if compiled else fn)(*placed))
        for got, right in zip(found, want, strict=True):
            assert_same_bits(np.asarray(got), np.asarray(right), str(spec))
            if kind == AxisType.Explicit:
                assert jax.typeof(got).sharding.spec[0] == "expert"


def test_quantize_fp8_weights_blocks_split_by_axes() -> None:
    mesh = make_mesh((2,), ("tensor",), AxisType.Explicit)
    w = jax.device_put(jnp.ones((4, 384, 256)), NamedSharding(mesh, P(None, "tensor")))
    with pytest.raises(ValueError, match=r"axis -2 of w is 384, 3 blocks of 128, .* 2 devices of .*reshard"):
        quantize(w, "fp8")
    with pytest.raises(ValueError, match=r"axis -2 of w is 384, 3 blocks of 128, .* 2 devices of .*reshard"):
        quantize(w, "int4")
    with pytest.raises(ValueError, match=r"with_layout: axis -1 of w is 384, 3 blocks of 128, .* 2 devices"):
        with_layout(quantize(w, "mxfp4"), "prepacked")
    q = quantize(w, "int4", block_size=32)  # Its scales need no steps of 128.
    assert_same_bits(np.asarray(with_layout(with_layout(q, "prepacked"), "transposed").values), np.asarray(q.values))


def test_serving_weights_transposed_and_padded(rng: np.random.Generator) -> None:
    w_gate_up, w_down = reals(rng, 2, 3, 128, 2 * 72), reals(rng, 2, 3, 72, 128)
    same = serving_weights(w_gate_up, w_down, None)
    np.testing.assert_array_equal(same.w_gate_up.values, np.swapaxes(w_gate_up, -1, -2))
    np.testing.assert_array_equal(same.w_down.values, np.swapaxes(w_down, -1, -2))
    pair = serving_weights(w_gate_up, w_down, "fp8", activations="fp8")[:2]
    up, down = (oracle_serving.dequantize_blocks(*map(np.asarray, (w.values, w.scales))) for w in pair)
    assert up.shape == (2, 3, 256, 128) and down.shape == (2, 3, 128, 128)
    for half, start in ((0, 0), (1, 128)):
        want = np.swapaxes(w_gate_up[..., half * 72 : (half + 1) * 72], -1, -2)
        np.testing.assert_allclose(up[..., start : start + 72, :], want, atol=0.2)
        assert not up[..., start + 72 : start + 128, :].any()
    np.testing.assert_allclose(down[..., :72], np.swapaxes(w_down, -1, -2), atol=0.2)
    assert not down[..., 72:].any()


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp4"])
def test_serving_weights_pad_for_fp8_tokens(format: str, rng: np.random.Generator) -> None:
    found = serving_weights(reals(rng, 3, 128, 2 * 96), reals(rng, 3, 96, 128), format, activations="fp8")
    assert (found.w_gate_up.shape, found.w_down.shape) == ((3, 128, 256), (3, 128, 128))
    assert found.w_down.activations == "fp8" and not found.w_down.is_prepacked


@pytest.mark.parametrize("format", ["int4", "mxfp4", "int8"])
def test_serving_weights_4_bits_prepacked(format: str, rng: np.random.Generator) -> None:
    w_gate_up, w_down = reals(rng, 3, 128, 2 * 128), reals(rng, 3, 128, 128)
    found = serving_weights(w_gate_up, w_down, format)
    for got, w in ((found.w_gate_up, w_gate_up), (found.w_down, w_down)):
        want = quantize(w, format)
        assert got.is_prepacked == (format != "int8")
        back = with_layout(got, "transposed") if got.is_prepacked else got
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(want), strict=True):
            assert_same_bits(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("up", "down", "fp8", "message"),
    [
        ((2, 128, 64), (2, 64, 128), True, "w_gate_up has 64 columns"),
        ((2, 64, 128), (2, 64, 128), True, r"axis -2 of w_gate_up is 64, expected 128"),
        (
            (2, 96, 256),
            (2, 128, 96),
            True,
            r"serving_weights: H, axis -2 of w_gate_up, is 96, expected a multiple of 128",
        ),
        ((4, 128, 384), (2, 192, 128), True, r"\(4, 128, 384\) and w_down \(2, 192, 128\), expected the same axes"),
        ((256,), (2, 128, 96), False, r"w_gate_up has shape \(256,\), expected rank 2 or more, \[..., K, N\]"),
    ],
)
def test_serving_weights_wrong_shapes(up: tuple, down: tuple, fp8: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serving_weights(jnp.ones(up), jnp.ones(down), "fp8" if fp8 else None)


def test_serving_weights_different_dtypes() -> None:
    with pytest.raises(TypeError, match="w_down has dtype bfloat16, expected float32, the dtype of w_gate_up"):
        serving_weights(jnp.ones((2, 128, 256)), jnp.ones((2, 128, 128), jnp.bfloat16), "fp8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_fp8([1.0]), "quantize_fp8: x is a list, not an array"),
        (lambda: dequantize_fp8(None, None, jnp.float32), "dequantize_fp8: values is a NoneType, not an array"),
        (lambda: dequantize_fp8(*quantize_fp8(jnp.ones((1, 128))), "number"), "dtype='number' is not a dtype"),
    ],
)
def test_quantization_invalid_types(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_quantize_fp8_scalar() -> None:
    with pytest.raises(ValueError, match=r"quantize_fp8: x has shape \(\), expected rank 1 or more"):
        quantize_fp8(jnp.float32(1))
