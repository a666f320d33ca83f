"""GEMMs of prepacked 4-bit weights by the kernel in Gluon: the tests of all implementations, and what it rejects."""

import jax
import numpy as np
import pytest
import test_quantized_gemm
from test_zero_sizes import PRODUCTS, test_zero_sizes_grouped_gemm

import harness
import jax_ep
from cases import BF16, F16, reals
from stored_experts import PREPACKED, store

IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("quantized_gemm")


@pytest.mark.parametrize("stored", PREPACKED)
@pytest.mark.parametrize("groups", test_quantized_gemm.GROUPS)
def test_quantized_gemm_gluon_grouped(implementation, groups, stored, rng):
    test_quantized_gemm.test_quantized_gemm_grouped(implementation, groups, BF16, stored, rng)


@pytest.mark.parametrize("stored", PREPACKED)
@pytest.mark.parametrize("block_m", [16, 128])
def test_quantized_gemm_gluon_masked(implementation, block_m, stored, rng):
    with jax_ep.tuning.override("quantized_gemm_gluon", block_m=block_m):
        test_quantized_gemm.test_quantized_gemm_masked(implementation, None, stored, rng)


def test_quantized_gemm_gluon_mxfp4_scales(implementation, rng):
    test_quantized_gemm.test_quantized_gemm_mxfp4_scales(implementation, BF16, True, rng)


@pytest.mark.parametrize("layout", ["prepacked int4", "prepacked mxfp4"])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_quantized_gemm_gluon_zero_sizes(implementation, layout, sizes):
    test_zero_sizes_grouped_gemm(layout, sizes, implementation)


@pytest.mark.parametrize(
    ("stored", "dtype", "columns", "words"),
    [
        ("mxfp4", BF16, 32, "mxfp4 weights of N=32"),
        ("int8", BF16, 32, "int8 weights of N=32"),
        ("mxfp4 prepacked", F16, 32, "float16 rows"),
        ("mxfp4 prepacked", BF16, 30, "N=30 and block_size=32"),
        ("int4 prepacked of 32", BF16, 32, "N=32 and block_size=32"),
    ],
)
def test_quantized_gemm_gluon_other_operands(implementation, stored, dtype, columns, words, rng):
    stored, _, block = stored.partition(" of ")
    rhs = store(reals(rng, 1, 128, columns), stored, block_size=int(block) if block else None)
    lhs, sizes = reals(rng, 4, 128, dtype=dtype), np.array([4], np.int32)
    with pytest.raises(NotImplementedError, match=rf"^grouped_gemm: gluon=True .*{words}.*, expected prepacked"):
        jax.jit(lambda *operands: jax_ep.grouped_gemm(*operands, implementation=implementation))(lhs, rhs, sizes)
