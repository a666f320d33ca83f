"""`jax_ep.Router` as a value: which fields it rejects, and that equal values are one to `jit`."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import Router

WRONG = [
    ({"score": "tanh"}, ValueError, "'tanh'", "'softmax', 'sigmoid', 'sparsemixer'"),
    ({"score": None}, ValueError, "None", "'softmax'"),
    ({"group_score": "mean"}, ValueError, "'mean'", "'top2_sum', 'max'"),
    ({"group_score": ["max"]}, ValueError, r"\['max'\]", "'top2_sum', 'max'"),
    *(
        ({name: value}, TypeError, f"{name}=", "True or False")
        for name in ("renormalize", "logit_bias", "selection_bias")
        for value in (1, None, "yes", jnp.ones(8))
    ),
    *(
        ({name: value}, TypeError, f"{name}=", "expected an int")
        for name in ("num_groups", "topk_groups", "num_identity_experts")
        for value in (2.0, None, True, "2")
    ),
    *(({name: 0}, ValueError, f"{name}=0", "at least 1") for name in ("num_groups", "topk_groups")),
    ({"num_identity_experts": -1}, ValueError, "num_identity_experts=-1", "at least 0"),
    ({"group_score": "max"}, ValueError, "group_score='max' with num_groups=1", "leave group_score out"),
    ({"topk_groups": 2}, ValueError, "topk_groups=2 exceeds num_groups=1", "lower topk_groups"),
    *(({"scale": value}, TypeError, "scale is", "pass a float") for value in (None, "2", jnp.ones(()), [1.0], True)),
    *(
        ({"scale": value}, ValueError, "scale=", "finite float32 other than 0")
        for value in (0, -0.0, float("nan"), np.float32("inf"), 10**400, 1e39, 1e-45)
    ),
    *(
        ({"score": "sparsemixer"} | fields, ValueError, "with score='sparsemixer'", "leave them out")
        for fields in ({"scale": 2.0}, {"num_groups": 2}, {"selection_bias": True})
    ),
]


@pytest.mark.parametrize(("fields", "error", "got", "remedy"), WRONG, ids=[f"{w[0]}"[:60] for w in WRONG])
def test_router_with_a_wrong_field(fields, error, got, remedy):
    with pytest.raises(error, match=r"^Router: ") as caught:
        Router(**fields)
    assert re.search(got, str(caught.value)) and re.search(remedy, str(caught.value)), caught.value


def test_equal_routers_are_one_value():
    wide = Router("sigmoid", num_groups=np.int64(4), topk_groups=2, scale=np.float32(2.5), renormalize=np.True_)
    assert wide == Router("sigmoid", num_groups=4, topk_groups=2, scale=2.5)
    assert len({wide, Router("sigmoid", num_groups=4, topk_groups=2, scale=2.5), Router()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        wide.scale = 1.0
    logits, before = jnp.ones((2, 8)), jax_ep.routing._choose._cache_size()
    for _ in range(2):
        jax_ep.topk_router(logits, 2, router=Router(scale=1.375))
    assert jax_ep.routing._choose._cache_size() == before + 1


@pytest.mark.parametrize("num_experts", [1, 2, 4])
def test_identity_experts_leave_one_that_computes(num_experts):
    router = Router(num_identity_experts=num_experts)
    with pytest.raises(ValueError, match=f"topk_router: {num_experts} experts with num_identity_experts={num_experts}"):
        jax_ep.topk_router(jnp.ones((2, num_experts)), 1, router=router)
