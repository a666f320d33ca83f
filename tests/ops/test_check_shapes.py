"""Checks of arrays by shapes that are written as strings."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.core import check


@pytest.mark.parametrize(
    ("given", "shape", "sizes"),
    [
        *(((), "[]", {}), ((3,), "[3]", {}), ((3, 0), "[T, H]", {}), ((3, 4), "[T, H >= 1]", {"T": 3})),
        *(((5,), "[..., H]", {}), ((2, 3, 5), "[..., 3, H]", {"H": 5}), ((2, 3, 5), "[N, ...]", {"N": 2})),
        *(((2,), "[N, ...]", {}), ((), "[...]", {}), ((2, 8), "[T, 2 * I]", {})),
    ],
)
def test_check_array_fits(given, shape, sizes):
    assert check.array("f", "x", np.zeros(given, np.float32), shape, **sizes).shape == given


@pytest.mark.parametrize(
    ("given", "shape", "sizes", "message"),
    [
        ((1,), "[]", {}, "expected a scalar"),
        ((3,), "[T, H]", {}, r"x has shape \(3,\), expected rank 2, \[T, H\]; reshape it"),
        ((), "[..., H]", {}, r"expected rank 1 or more, \[..., H\]"),
        ((3, 4), "[T, H]", {"T": 2}, r"expected \[2, H\]; pass it"),
        ((3, 4), "[3, 5]", {}, r"expected \[3, 5\]; pass it"),
        ((2, 3, 5), "[..., 4, H]", {}, r"expected \[..., 4, H\]; pass it"),
        ((2, 3), "[N, ...]", {"N": 3}, r"expected \[3, ...\]; pass it"),
        ((3, 0), "[T, H >= 1]", {}, r"x has shape \(3, 0\), expected H >= 1; pass it"),
    ],
)
def test_check_array_wrong_shape(given, shape, sizes, message):
    with pytest.raises(ValueError, match=f"^f: .*{message}"):
        check.array("f", "x", np.zeros(given, np.float32), shape, remedy="pass it", **sizes)


def test_check_array_wrong_kind_and_dtype():
    with pytest.raises(TypeError, match=r"^f: x is a list, not an array; pass a JAX or NumPy array \[T\]"):
        check.array("f", "x", [1], "[T]")
    with pytest.raises(TypeError, match=r"^f: x has dtype int32, expected one of float32, float16; cast"):
        check.array("f", "x", np.zeros(2, np.int32), "[T]", (jnp.float32, jnp.float16))
    # JAX narrows 64-bit NumPy arrays first.
    assert check.array("f", "x", np.zeros(2, np.int64), "[T]", (jnp.int32,)).dtype == jnp.int32
