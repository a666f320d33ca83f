"""FP8 operands on a GPU against NumPy, bit by bit, because the interpreter does not execute GPU instructions."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_ep.core.fp8 import num_blocks
from jax_ep.megakernels import activation

pytestmark = pytest.mark.usefixtures("one_process")

GROUPS = 24
LEAST = np.float32(2.0**-120)


def rounded(values, largest):
    """Round float32 to e4m3 bytes and scales; the largest magnitudes of blocks broadcast."""
    # Multiply by the inverse, like the kernels; dividing by the scale, like the oracle, may give other bits.
    scales = np.maximum(largest * np.float32(1 / 448), LEAST)
    scaled = np.clip(values * (np.float32(1) / scales), -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def as_columns(x, sizes):
    """Quantize float32 rows `[R, H]` column-wise: bytes `[H, P]`, scales, and the number of used positions."""
    places = num_blocks(x.shape[0], GROUPS) * 128
    values = np.zeros((x.shape[1], places), np.uint8)
    scales = np.zeros((places // 128, x.shape[1]), np.float32)
    place, ends = 0, np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        for row in range(start, end, 128):
            block = np.zeros((128, x.shape[1]), np.float32)
            block[: min(128, end - row)] = x[row : min(row + 128, end)]
            codes, scales[place // 128] = rounded(block, np.abs(block).max(axis=0))
            values[:, place : place + 128] = codes.T
            place += 128
    return values, scales, place


def as_bytes(x):
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8))


@pytest.mark.parametrize("rows", [1, 3000, 20000] if jax.default_backend() == "gpu" else [1, 300])
def test_fp8_bits_columns(rows, rng):
    sizes = rng.multinomial(rows, rng.dirichlet(np.ones(GROUPS))).astype(np.int32)
    x = rng.standard_normal((rows, 640)) * 10.0 ** rng.integers(-6, 6, (rows, 1))
    x = np.where(rng.random(x.shape) < 0.1, 0, x).astype(jnp.bfloat16)
    values, scales = map(np.asarray, activation.quantize_rows(jnp.asarray(x), sizes))
    in_fp8 = values.astype(np.float32).reshape(rows, -1, 128) * scales[:, :, None]
    in_fp8 = in_fp8.reshape(rows, -1)

    by_rows, both = activation.quantize_both_ways(jnp.asarray(x), sizes)
    cases = {
        "rows": (activation.quantize_columns(jnp.asarray(x), sizes), x.astype(np.float32)),
        "rows in FP8": (activation.quantize_columns((*map(jnp.asarray, (values, scales)),), sizes), in_fp8),
        "both layouts": (both, x.astype(np.float32)),
    }
    for name, (got, source) in cases.items():
        want, want_scales, used = as_columns(source, sizes)
        np.testing.assert_array_equal(as_bytes(got[0])[:, :used], want[:, :used], err_msg=name)
        np.testing.assert_array_equal(np.asarray(got[1])[: used // 128], want_scales[: used // 128], err_msg=name)
    groups = x.astype(np.float32).reshape(rows, -1, 128)
    want, want_scales = rounded(groups, np.abs(groups).max(axis=2, keepdims=True))
    for got in (by_rows, (values, scales)):
        np.testing.assert_array_equal(as_bytes(jnp.asarray(got[0])), want.reshape(rows, -1))
        np.testing.assert_array_equal(np.asarray(got[1]), want_scales[:, :, 0])


@pytest.mark.parametrize("exponent", [0, 1, 30, 126, 127, 200, 254])
def test_fp8_bits_inverse_scales(on_gpu, exponent):
    """All mantissas are rounded like a division."""
    jax_triton = pytest.importorskip("jax_triton")
    source = Path(__file__).parents[1] / "megakernels" / "kernels_for_tests" / "scales.py"
    spec = importlib.util.spec_from_file_location("scales", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bits = (np.uint32(exponent) << 23 | np.arange(1 << 23, dtype=np.uint32)).view(np.int32)
    shape = jax.ShapeDtypeStruct(bits.shape, jnp.float32)
    launch = {"out_type": (shape, shape), "grid": (bits.size // 1024,), "BLOCK": 1024}
    scales, inverse = map(np.asarray, jax_triton.triton_call(jnp.asarray(bits), kernel=module.invert, **launch))
    np.testing.assert_array_equal(inverse, np.float32(1) / scales)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 1024, 4096 if jax.default_backend() == "gpu" else 640)], ids=str)
def test_fp8_bits_matrices(shape, dtype, rng):
    w = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (*shape[:2], 1))).astype(dtype)
    w[0, 3, 5], w[1, 128:, :128] = np.inf, 0
    groups, depth, columns = shape
    blocks = w.astype(np.float32).reshape(groups, depth // 128, 128, columns // 128, 128)
    with np.errstate(invalid="ignore"):
        codes, scales = rounded(blocks, np.abs(blocks).max(axis=(2, 4), keepdims=True))
    codes, scales = codes.reshape(shape), scales[:, :, 0, :, 0]
    transposed, as_is, by_columns = activation.quantize_masters(jnp.asarray(w))
    one, of_one = activation.quantize_matrices(jnp.asarray(w))
    other, of_other = activation.quantize_matrices(jnp.asarray(w), transpose=False)
    for got, want in ((transposed, codes.swapaxes(1, 2)), (one, codes.swapaxes(1, 2)), (as_is, codes), (other, codes)):
        # Infinity times zero gives NaN of either sign.
        np.testing.assert_array_equal(*(np.where((x & 127) == 127, 127, x) for x in (as_bytes(got), want)))
    for got, want in ((by_columns, scales.swapaxes(1, 2)), (of_one, scales.swapaxes(1, 2)), (of_other, scales)):
        np.testing.assert_array_equal(np.asarray(got), want)
