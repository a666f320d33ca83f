"""Dispatch + grouped GEMM in one kernel in Gluon: the tests of fused layers, and the bits of two kernels."""

import functools

import jax
import numpy as np
import pytest
from test_fused import mode, test_fused_dispatch_modes, test_fused_halves

import harness
import jax_ep
from cases import BF16, F16, Shape, assert_close, assert_same_bits
from harness import run
from jax_ep.types import Schedule
from layers import Layer

__all__ = ["mode", "test_fused_dispatch_modes", "test_fused_halves"]
IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("grouped_gemm", "weight_gradient")

# Groups of several tiles, steps that end past the rows, and columns that end within a tile.
SHAPE = Shape(num_tokens=101, top_k=3, num_experts=4, hidden=200, intermediate=136)
if jax.default_backend() == "gpu":  # more tiles than programs
    SHAPE = Shape(num_tokens=3000, top_k=3, num_experts=8, hidden=1032, intermediate=1024)


def by_mode(fn, mesh, arrays):
    """Return the results of a call that takes a schedule, in one kernel and in two."""
    schedules = (Schedule(dispatch_mode=dispatch_mode) for dispatch_mode in ("fused", "serial"))
    return tuple(run(functools.partial(fn, schedule), mesh, *arrays) for schedule in schedules)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.slow(unless={"num_ranks": [2], "dtype": [BF16]})
def test_fused_gluon_same_bits(implementation, num_ranks, alignment, dtype, expert_mesh, rng):
    """Rows, their weights and all gradients, also of tokens without an expert."""
    x, ids, weights, w, _ = Layer(rng, "some_without_expert", num_ranks, SHAPE, dtype).args

    def fn(schedule, x, ids, weights, w):
        def call(x, weights, w):
            sizes = {"num_experts": SHAPE.num_experts, "alignment": alignment, "schedule": schedule}
            found = jax_ep.dispatch_grouped_gemm(x, ids, weights, w, **sizes, implementation=implementation)
            return found.hidden, found.weights

        found, pull = jax.vjp(call, x, weights, w)
        return *found, *pull(found)

    for got, want in zip(*by_mode(fn, expert_mesh(num_ranks), (x, ids, weights, w)), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("experts", [jax_ep.Experts(), jax_ep.Experts("gelu", clamp=1.5, up_offset=1.0)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_gluon_activated(implementation, num_ranks, experts, expert_mesh, rng):
    """Without a gradient the kernel stores activated rows; a bias of the results needs the weights of rows, too."""
    *arrays, w_down = Layer(rng, "zipf", num_ranks, SHAPE, BF16).args
    bias = rng.standard_normal((num_ranks, SHAPE.num_experts // num_ranks, SHAPE.hidden)).astype(BF16)

    def fn(schedule, *arrays):
        *others, b_down = arrays
        sizes = {"num_experts": SHAPE.num_experts, "experts": experts, "schedule": schedule}
        return jax_ep.moe(*others, biases=(None, b_down), **sizes, implementation=implementation)

    got, want = by_mode(fn, expert_mesh(num_ranks), (*arrays, w_down, bias))
    assert_same_bits(got, want)


def test_fused_gluon_balance(implementation, expert_mesh, rng):
    """Weights of copied experts are in a second array."""
    arrays = Layer(rng, "one_hot", 2, SHAPE, BF16).args

    def fn(schedule, *arrays):
        options = {"num_experts": SHAPE.num_experts, "balance": jax_ep.Balance(), "schedule": schedule}
        return jax_ep.moe(*arrays, **options, implementation=implementation)

    got, want = by_mode(fn, expert_mesh(2), arrays)
    assert_close(got, want.astype(np.float64), tolerance=1e-2)
