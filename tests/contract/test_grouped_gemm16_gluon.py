"""grouped_gemm of 16-bit operands and its gradients by the kernels in Gluon: the tests of all implementations, and
tiles of all heights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_gemm import (
    check,
    test_grouped_gemm_nan_stays_in_group,
    test_grouped_gemm_preferred_element_type,
    test_grouped_gemm_two_arrays,
    with_gradients,
)

import harness
import jax_ep
import oracle
from cases import BF16, F16, F32, assert_close, assert_same_bits, reals
from jax_ep.core.layout import Bias
from jax_ep.ops import registry

__all__ = [
    "test_grouped_gemm_nan_stays_in_group",
    "test_grouped_gemm_preferred_element_type",
    "test_grouped_gemm_two_arrays",
]
IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("grouped_gemm", "weight_gradient")

TILES = {
    "one to five waves": [1, 64, 65, 128, 129, 192, 200, 260],
    "same heights": [512, 0, 576, 640],
    "other heights": [449, 0, 700],
    "many waves": [2049, 3, 1],
    "many empty groups": [0] * 70 + [3] + [0] * 40 + [140],
}
SHAPES = [(72, 264), (200, 96)]
if jax.default_backend() == "gpu":  # More tiles than programs.
    SHAPES.append((2048, 7168))
    TILES["many rows"] = [4096, 17, 0, 900, 128, 64, 2000, 1]
    TILES["many empty groups"] = [0] * 7 + [3] + [0] * 4 + [140]  # more gradients do not fit into memory


@pytest.mark.parametrize("sizes", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
@pytest.mark.slow_interpreted(unless={"depth": [72]})
def test_grouped_gemm_gluon_heights(implementation, sizes, depth, columns, rng):
    check(with_gradients(implementation), rng, sum(sizes) + 70, sizes, depth, columns, BF16)


@pytest.mark.parametrize("out", [F16, F32], ids=str)
def test_grouped_gemm_gluon_bias(implementation, out, rng):
    sizes = np.array([130, 0, 70], np.int32)
    lhs, rhs = reals(rng, 230, 40, dtype=F16), reals(rng, 3, 40, 264, dtype=F16)
    bias, scales = reals(rng, 3, 264, dtype=F16), reals(rng, 230)
    lhs[200:] = np.nan
    run = registry.GROUPED_GEMM.by(implementation).grouped_gemm
    got = run(*map(jnp.asarray, (lhs, rhs, sizes)), transpose=False, out_dtype=out, bias=Bias(bias, scales))
    group = np.repeat(np.arange(3), sizes)
    want = oracle.grouped_gemm(lhs, rhs, sizes)
    want[:200] += scales[:200, None] * bias[group].astype(np.float64)
    assert got.dtype == out
    assert_close(np.asarray(got), want)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the interpreter and the emulator add in different orders")
@pytest.mark.parametrize("transpose", [False, True])
def test_grouped_gemm_gluon_bits(implementation, transpose, rng):
    """Rows have the bits of Triton's kernel, which computes groups of fewer and of more rows."""
    sizes = np.array([130, 0, 70, 300, 1], np.int32)
    lhs, rhs = reals(rng, 510, 1000, dtype=BF16), reals(rng, 5, 1000, 520, dtype=BF16)
    rhs = np.swapaxes(rhs, 1, 2) if transpose else rhs
    run = registry.GROUPED_GEMM.by(implementation).grouped_gemm

    def call(gluon):
        with jax_ep.tuning.override("grouped_gemm", gluon=gluon):
            return np.asarray(jax.jit(lambda *a: run(*a, transpose=transpose, out_dtype=BF16))(lhs, rhs, sizes))

    assert_same_bits(call(True), call(False))
