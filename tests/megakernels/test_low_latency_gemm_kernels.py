"""The fused GEMM + combine kernel: one launch, any number of programs, interleaved launches, failures."""

from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import harness
import jax_ep
import low_latency_problems
from cases import Shape, integers
from jax_ep.megakernels import launch, low_latency, masked, requirements
from layers import round_trip
from low_latency_problems import GemmProblem, Problem, gemm_combine

SHAPE = Shape(num_tokens=6, top_k=3, num_experts=8, hidden=24, intermediate=16)


def fused(shape=SHAPE):
    return gemm_combine("triton", shape, shape.num_tokens, preferred_element_type=jnp.float32)


def problem_of(rng, routing, num_ranks, shape=SHAPE):
    return GemmProblem(rng, routing, num_ranks, shape, shape.num_tokens)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_low_latency_gemm_one_launch_any_num_programs(monkeypatch, two_ranks, rng, programs):
    monkeypatch.setattr(masked, "launch", Mock(side_effect=AssertionError("a separate GEMM")))
    for module in (launch, low_latency):
        monkeypatch.setattr(module, "num_programs", lambda tasks, each: programs)
    problem = problem_of(rng, "duplicates", 2)
    call = harness.compiled(fused(), two_ranks)
    for _ in range(3):
        np.testing.assert_array_equal(call(*problem.args), problem.want())


def test_low_latency_gemm_interleaved_groups(two_ranks, rng):
    """Every kernel finds consistent control words, which pairs of devices share; they have separate halves."""
    jax_ep.finalize()
    jax_ep.init(transport="shared_memory")  # Without a mesh: the ep_group is not known before a program runs.
    others = Mesh(np.array(jax.devices())[[1, 2]], (harness.EXPERT,))
    four = harness.make_mesh((4,), (harness.EXPERT,))
    large = Shape(num_tokens=20, top_k=2, num_experts=8, hidden=48, intermediate=136)
    runs = []
    for mesh, shape in ((two_ranks, SHAPE), (others, large), (four, SHAPE)):
        exchange = low_latency_problems.round_trip("triton", shape, shape.num_tokens, quantize=False)
        runs.append((mesh, shape, *(harness.compiled(fn, mesh) for fn in (fused(shape), exchange))))
    throughput = {
        mesh: harness.compiled(partial(round_trip, num_experts=8), mesh) for mesh in (two_ranks, others, four)
    }
    for index in rng.permutation(6 * len(runs)):
        mesh, shape, gemm, exchange = runs[index % len(runs)]
        if index // len(runs) % 2:
            problem = problem_of(rng, "uniform", mesh.size, shape)
            np.testing.assert_array_equal(gemm(*problem.args), problem.want())
        else:
            problem = Problem(rng, "uniform", mesh.size, shape, shape.num_tokens)
            problem.check(*exchange(*problem.args))
        if index % 5 == 0:
            x, ids = integers(rng, mesh.size, 3, 8), rng.integers(0, 8, (mesh.size, 3, 2), np.int32)
            np.testing.assert_array_equal(throughput[mesh](x, ids), 2 * x)


def test_low_latency_gemm_unsupported_runs_separately(monkeypatch, two_ranks, rng):
    monkeypatch.setattr(requirements, "_MOST_LOW_LATENCY_ROWS", 17)
    problem = problem_of(rng, "uniform", 2)
    np.testing.assert_array_equal(harness.run(fused(), two_ranks, *problem.args), problem.want())
