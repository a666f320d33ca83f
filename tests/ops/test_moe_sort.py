"""`moe_sort` with numbers beyond 32 bits and invalid arguments; tests/contract/test_sorted_slots.py has the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep


@pytest.mark.parametrize("number", [2**32, 2**32 + 1, 2**31, -(2**31) - 1, 3])
@pytest.mark.parametrize("kind", [int, np.int64, np.asarray], ids=["int", "scalar", "array"])
def test_moe_sort_num_tokens_beyond_32_bits(number, kind):
    ids = np.array([[1], [0], [1]], np.int32)
    got = jax_ep.moe_sort(ids, num_experts=2, block_size=2, num_tokens=kind(number))
    assert (np.asarray(got.slots) >= 0).sum() == (3 if number > 0 else 0)


def test_moe_sort_ids_beyond_32_bits():
    ids = np.array([[2**32 + 1], [0], [1], [-(2**33)]], np.int64)
    slots = np.asarray(jax_ep.moe_sort(ids, num_experts=2, block_size=2, num_tokens=4).slots)
    assert sorted(slots[slots >= 0]) == [1, 2]
    with pytest.raises(ValueError, match="topk_idx contains"):
        jax_ep.moe_sort(ids, num_experts=2, block_size=2)
    with pytest.raises(TypeError, match=r"topk_idx has dtype uint.*, expected int32"):
        jax_ep.moe_sort(np.ones((4, 1), np.uint64), num_experts=2, block_size=2)


@pytest.mark.parametrize(
    ("first", "error", "match"),
    [
        (0.0, TypeError, "first_expert=0.0 is a float"),
        (False, TypeError, "first_expert=False is a bool"),
        (jnp.int32(0), TypeError, "first_expert is an array.*static"),
        (np.array([0, 1]), TypeError, "first_expert is a ndarray"),
        (-1, ValueError, "first_expert=-1, expected at least 0"),
        (2, ValueError, "reach past num_experts=2"),
    ],
)
def test_moe_sort_invalid_first_expert(first, error, match):
    with pytest.raises(error, match=match):
        jax_ep.moe_sort(np.array([[1]], np.int32), num_experts=2, block_size=2, first_expert=first)


def test_moe_sort_traced_first_expert():
    sort = lambda first: jax_ep.moe_sort(np.array([[1]], np.int32), num_experts=2, block_size=2, first_expert=first)  # noqa: E731
    with pytest.raises(TypeError, match=r"first_expert is a traced array, expected an int; pass a static one"):
        jax.jit(sort)(1)
