"""weight_gradient_fp8 by the kernel in Gluon: the tests of all implementations, and tiles of many shapes."""

import numpy as np
import pytest
from test_weight_gradient_fp8 import (  # noqa: F401
    assert_near,
    rows_of,
    test_weight_gradient_fp8_accumulates_in_float32,
    test_weight_gradient_fp8_groups,
    test_weight_gradient_fp8_nan_stays_in_group,
    test_weight_gradient_fp8_two_arrays,
    weight_gradient,
)

import harness
import oracle_fp8
from cases import BF16

IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("weight_gradient_fp8")


@pytest.mark.parametrize(("depth", "columns"), [(128, 640), (640, 264)])
def test_weight_gradient_gluon_tiles(implementation, depth, columns, rng):
    sizes = [130, 0, 500, 1]
    lhs, rhs = rows_of(rng, 640, sizes, depth, BF16), rows_of(rng, 640, sizes, columns, BF16)
    got = weight_gradient(implementation, BF16)(lhs, rhs, np.array(sizes, np.int32))
    want = oracle_fp8.weight_gradient(*(np.nan_to_num(x.astype(np.float32)) for x in (lhs, rhs)), np.array(sizes))
    assert got.dtype == BF16
    assert_near(got, want, 1e-2)
