"""The fused GEMM + combine kernel: one launch, any number of programs, interleaved launches, failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import harness
import jax_ep
import oracle_serving
from cases import BF16, Shape, integers
from jax_ep.megakernels import launch, low_latency, masked, requirements
from jax_ep.ops.moe_low_latency import low_latency_gemm_combine
from routings import ROUTINGS

SHAPE = Shape(num_tokens=6, top_k=3, num_experts=8, hidden=24, intermediate=16)
OPTIONS = {"implementation": "triton"}


@pytest.fixture
def mesh(two_ranks):
    return two_ranks


class Problem:
    def __init__(self, rng, routing, num_ranks, shape=SHAPE):
        self.ids = ROUTINGS[routing](rng, num_ranks, shape)
        self.valid = (self.ids >= 0) & (self.ids < shape.num_experts)
        self.weights = integers(rng, *self.ids.shape)
        self.lay = oracle_serving.low_latency_layout(self.ids, shape.num_experts, shape.num_tokens)
        self.lhs = integers(rng, *self.lay.token.shape, shape.intermediate, dtype=BF16)
        local = shape.num_experts // num_ranks
        self.rhs = integers(rng, num_ranks, local, shape.hidden, shape.intermediate, dtype=BF16)

    @property
    def args(self):
        return self.ids, np.where(self.valid, self.weights, np.float32(np.nan)), self.lhs, self.rhs

    def check(self, got):
        y = np.stack([oracle_serving.masked_grouped_gemm(*rank) for rank in zip(self.lhs, self.rhs, strict=True)])
        want = oracle_serving.low_latency_combine(y, self.ids, np.where(self.valid, self.weights, 0), self.lay)
        np.testing.assert_array_equal(got, want)


def fused(shape=SHAPE):
    def fn(ids, weights, lhs, rhs):
        x = jnp.zeros((shape.num_tokens, 8), jnp.bfloat16)
        sizes = {"num_experts": shape.num_experts, "max_tokens_per_rank": shape.num_tokens, "quantize": False}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes, **OPTIONS)
        arguments = (lhs, jnp.swapaxes(rhs, 1, 2), d.group_sizes, ids, weights, d.handle)
        return low_latency_gemm_combine(*arguments, preferred_element_type=jnp.float32, **OPTIONS)

    return fn


@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.slow(unless={"programs": [2]})
def test_low_latency_gemm_one_launch_any_num_programs(monkeypatch, mesh, rng, programs):
    def no_product(*_, **__):
        raise AssertionError("a separate GEMM")

    monkeypatch.setattr(masked, "launch", no_product)
    for module in (launch, low_latency):
        monkeypatch.setattr(module, "num_programs", lambda tasks, each: programs)
    problem = Problem(rng, "duplicates", 2)
    call = harness.compiled(fused(), mesh)
    for _ in range(3):
        problem.check(call(*problem.args))


@pytest.mark.slow
def test_low_latency_gemm_interleaved_groups(mesh, rng):
    """Every kernel finds consistent control words, and pairs of devices have separate halves."""
    jax_ep.finalize()
    jax_ep.init(transport="shared_memory")
    others = Mesh(np.array(jax.devices())[[1, 2]], (harness.EXPERT,))
    four = harness.make_mesh((4,), (harness.EXPERT,))
    large = Shape(num_tokens=9, top_k=2, num_experts=8, hidden=40, intermediate=136)
    runs = [(m, s, harness.compiled(fused(s), m)) for m in (mesh, others, four) for s in (SHAPE, large)]

    def exchange(x, ids):
        d = jax_ep.dispatch(x, ids, num_experts=8, **OPTIONS)
        return jax_ep.combine(d.tokens, d.handle, **OPTIONS)

    throughput = harness.compiled(exchange, four)
    for index in rng.permutation(3 * len(runs)):
        where, shape, call = runs[index % len(runs)]
        problem = Problem(rng, "uniform", where.size, shape)
        problem.check(call(*problem.args))
        if index % 3 == 0:
            x, ids = integers(rng, 4, 3, 8), rng.integers(0, 8, (4, 3, 2), np.int32)
            np.testing.assert_array_equal(throughput(x, ids), 2 * x)


def test_low_latency_gemm_unsupported_runs_separately(monkeypatch, mesh, rng):
    monkeypatch.setattr(requirements, "_MOST_LOW_LATENCY_ROWS", 17)
    problem = Problem(rng, "uniform", 2)
    problem.check(harness.run(fused(), mesh, problem.ids, problem.weights, problem.lhs, problem.rhs))
