"""Random shapes and routings on one to four ranks against the NumPy oracle.

There are two kinds of search. `test_fuzz_*_shapes` draws static sizes, so every example compiles: few examples.
`test_fuzz_*_routings*` keeps the sizes and draws ids, weights and tokens for functions that are compiled once: many
examples. Inputs are small integers, so float32 results are exact and compared bit for bit.
"""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import harness
import jax_ep
import oracle
from cases import assert_close, assert_same_bits, integers, probabilities, reals
from oracle_experts import MoE

# In CI the examples are the same in every run; otherwise they are new, and Hypothesis prints how to repeat a failure.
FUZZ = settings(
    derandomize="CI" in os.environ,
    deadline=None,  # The first example of a shape compiles.
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
NUM_SHAPES = settings(FUZZ, max_examples=12)
NUM_ROUTINGS = settings(FUZZ, max_examples=100)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static sizes of one example; `capacity` None is dropless."""

    num_ranks: int
    num_tokens: int
    top_k: int
    num_local: int
    hidden: int
    alignment: int = 1
    capacity: int | None = None

    @property
    def num_experts(self):
        return self.num_ranks * self.num_local

    @property
    def layout(self):
        return {"num_experts": self.num_experts, "capacity": self.capacity, "alignment": self.alignment}


@st.composite
def problems(draw):
    alignment = draw(st.sampled_from([1, 1, 4, 16]))
    blocks = draw(st.none() | st.integers(1, 8))
    most = {"num_ranks": 4, "num_tokens": 9, "top_k": 5, "num_local": 4, "hidden": 17}
    sizes = {name: draw(st.integers(1, value)) for name, value in most.items()}
    return Problem(**sizes, alignment=alignment, capacity=None if blocks is None else blocks * alignment)


@st.composite
def routings(draw, problem):
    """Draw expert ids `[W, T, K]`: any mixture of a few experts, all experts, -1 and values out of range."""
    pool = draw(
        st.sampled_from(
            [
                range(problem.num_experts),
                range(-1, problem.num_experts),
                [draw(st.integers(0, problem.num_experts - 1))],
                [-1, draw(st.integers(0, problem.num_experts - 1))],
                [-1],
                [-(2**31), -2, -1, 0, problem.num_experts - 1, problem.num_experts, 2**31 - 1],
            ]
        )
    )
    count = problem.num_ranks * problem.num_tokens * problem.top_k
    ids = draw(st.lists(st.sampled_from(list(pool)), min_size=count, max_size=count))
    return np.array(ids, np.int32).reshape(problem.num_ranks, problem.num_tokens, problem.top_k)


SEEDS = st.integers(0, 2**32 - 1)
RESULTS = "tokens", "weights", "group_sizes", "dropped", "num_invalid", "combined", "dx", "dweights", "dy"


@functools.lru_cache(maxsize=1)
def _round_trip(problem):
    """Compile one function: dispatch, combine of other rows, and both transposes."""

    def per_rank(x, topk_idx, topk_weights, y):
        def dispatched(x, topk_weights):
            sent = jax_ep.dispatch(x, topk_idx, topk_weights, **problem.layout)
            return (sent.tokens, sent.weights), sent

        rows, transpose, sent = jax.vjp(dispatched, x, topk_weights, has_aux=True)
        dx, dweights = transpose((y, y[:, 0]))
        combined, transpose = jax.vjp(lambda y: jax_ep.combine(y, sent.handle), y)
        (dy,) = transpose(x)
        counts = sent.group_sizes, sent.dropped, sent.handle.num_invalid
        return dict(zip(RESULTS, (*rows, *counts, combined, dx, dweights, dy), strict=True))

    return harness.compiled(per_rank, harness.make_mesh((problem.num_ranks,), (harness.EXPERT,)))


def _check_round_trip(problem, ids, seed):
    rng = np.random.default_rng(seed)
    layout = oracle.layout(ids, problem.num_experts, capacity=problem.capacity, alignment=problem.alignment)
    num_rows = layout.source.shape[1]
    x = integers(rng, problem.num_ranks, problem.num_tokens, problem.hidden)
    weights = integers(rng, *ids.shape)
    y = integers(rng, problem.num_ranks, num_rows, problem.hidden)
    poisoned = np.where(layout.is_padding[..., None], np.float32(np.nan), y)  # Padding must never be read.
    got = _round_trip(problem)(x, ids, weights, poisoned)
    combined = oracle.combine(y, layout).astype(np.float32)
    d_weights = oracle.scatter_weights(y[..., 0], layout).astype(np.float32)
    rows, counts = oracle.gather(x, layout), (layout.group_sizes, layout.dropped, layout.num_invalid)
    want = rows, oracle.gather_weights(weights, layout), *counts, combined, combined, d_weights, rows
    for name, expected in zip(RESULTS, want, strict=True):
        # Adding 0 turns -0 into 0: the sign of an empty sum is not specified.
        assert_same_bits(got[name] + got[name].dtype.type(0), expected + expected.dtype.type(0), name)


@NUM_SHAPES
@given(st.data(), problems(), SEEDS)
@pytest.mark.slow
def test_fuzz_dispatch_combine_shapes(data, problem, seed):
    _check_round_trip(problem, data.draw(routings(problem)), seed)


DROPLESS = Problem(num_ranks=4, num_tokens=3, top_k=3, num_local=2, hidden=5)
TIGHT = Problem(num_ranks=3, num_tokens=4, top_k=2, num_local=3, hidden=4, alignment=4, capacity=12)


@NUM_ROUTINGS
@given(routings(DROPLESS), SEEDS)
@example(np.full((4, 3, 3), -1, np.int32), 0)
@example(np.full((4, 3, 3), 7, np.int32), 0)
def test_fuzz_dispatch_combine_routings_dropless(ids, seed):
    _check_round_trip(DROPLESS, ids, seed)


@NUM_ROUTINGS
@given(routings(TIGHT), SEEDS)
@example(np.full((3, 4, 2), 8, np.int32), 0)
def test_fuzz_dispatch_combine_routings_tight_capacity(ids, seed):
    _check_round_trip(TIGHT, ids, seed)


@functools.lru_cache(maxsize=1)
def _layer(problem, intermediate, activation, gated):
    def per_rank(x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def layer(x, topk_weights, w_gate_up, w_down):
            options = {"num_experts": problem.num_experts, "capacity": problem.capacity}
            options["experts"] = jax_ep.Experts(activation, gated=gated)
            return jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, **options)

        out, transpose = jax.vjp(layer, x, topk_weights, w_gate_up, w_down)
        return out, transpose(d_out)

    return harness.compiled(per_rank, harness.make_mesh((problem.num_ranks,), (harness.EXPERT,)))


def _check_layer(problem, intermediate, activation, gated, ids, seed):
    rng = np.random.default_rng(seed)
    layout = oracle.layout(ids, problem.num_experts, capacity=problem.capacity)
    x, d_out = (reals(rng, problem.num_ranks, problem.num_tokens, problem.hidden) for _ in range(2))
    weights = probabilities(rng, *ids.shape)
    local = (problem.num_ranks, problem.num_local)
    w_gate_up = reals(rng, *local, problem.hidden, intermediate * (2 if gated else 1))
    w_down = reals(rng, *local, intermediate, problem.hidden)
    out, gradients = _layer(problem, intermediate, activation, gated)(x, ids, weights, w_gate_up, w_down, d_out)
    whole = [w.reshape(problem.num_experts, *w.shape[2:]) for w in (w_gate_up, w_down)]
    expected = MoE(x, weights, *whole, layout, activation)
    assert_close(out, expected.forward(), "output", tolerance=2e-5)
    names = ("dx", "dtopk_weights", "dw_gate_up", "dw_down")
    for name, got, want in zip(names, gradients, expected.gradients(d_out.astype(np.float64)), strict=True):
        assert_close(got, want.reshape(got.shape), name, tolerance=2e-5)


@NUM_SHAPES
@given(st.data(), problems(), st.integers(1, 9), st.sampled_from(["silu", "gelu", "relu"]), st.booleans(), SEEDS)
@pytest.mark.slow
def test_fuzz_moe_shapes(data, problem, intermediate, activation, gated, seed):
    problem = dataclasses.replace(problem, alignment=1)  # moe has no alignment.
    ids = data.draw(routings(problem))
    _check_layer(problem, intermediate, activation, gated, ids, seed)


LAYER = Problem(num_ranks=4, num_tokens=3, top_k=2, num_local=2, hidden=6)
LAYER_TIGHT = dataclasses.replace(LAYER, capacity=4)


@settings(NUM_ROUTINGS, max_examples=50)
@given(routings(LAYER), SEEDS)
@example(np.full((4, 3, 2), -1, np.int32), 0)
def test_fuzz_moe_routings(ids, seed):
    _check_layer(LAYER, 5, "silu", True, ids, seed)


@settings(NUM_ROUTINGS, max_examples=50)
@given(routings(LAYER_TIGHT), SEEDS)
@example(np.full((4, 3, 2), 7, np.int32), 0)
def test_fuzz_moe_routings_tight_capacity(ids, seed):
    _check_layer(LAYER_TIGHT, 5, "gelu", False, ids, seed)
