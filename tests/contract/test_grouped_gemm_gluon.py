"""grouped_gemm of FP8 operands by the kernel in Gluon: the tests of all implementations, with tiles of many shapes."""

import jax
import jax.numpy as jnp
import pytest
from test_grouped_gemm_fp8 import (  # noqa: F401
    Problem,
    gemm,
    test_grouped_gemm_fp8_accumulates_in_float32,
    test_grouped_gemm_fp8_groups,
    test_grouped_gemm_fp8_invalid_sizes,
    test_grouped_gemm_fp8_nan_stays_in_group,
    test_grouped_gemm_fp8_result_dtypes,
    test_grouped_gemm_fp8_vmap,
)

import harness
from cases import BF16, assert_close

IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("grouped_gemm_fp8")

TILES = {
    "one wave": [64, 1, 0, 63],
    "two waves": [128, 65, 127],
    "bands": [1500, 0, 129],
    "many empty groups": [0] * 70 + [3] + [0] * 40 + [140],
    "spare rows": [130, 0],
}
SHAPES = [(128, 257), (768, 384)]
if jax.default_backend() == "gpu":  # More tiles than programs.
    SHAPES.append((2048, 7168))
    TILES["many rows"] = [4096, 17, 0, 900, 128, 64, 2000, 1]
    TILES["many empty groups"] = [0] * 7 + [3] + [0] * 4 + [140]  # more weights do not fit into memory


@pytest.mark.parametrize("sizes", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_grouped_gemm_gluon_tiles(implementation, sizes, depth, columns, rng):
    spare = 300 if sizes == TILES["spare rows"] else 0
    problem = Problem(rng, sum(sizes) + spare, sizes, depth, columns)
    got = problem.call(gemm(implementation, preferred_element_type=jnp.bfloat16))
    assert got.dtype == BF16
    assert_close(got, problem.want())
    assert not got[problem.used :].any(), "rows past the groups are not zero"
