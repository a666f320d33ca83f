"""low_latency_gemm_combine: the GEMM fused with the combine that follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
import oracle_quantized
from cases import BF16, F32, Shape, assert_close, probabilities, reals
from harness import compiled, run
from low_latency_problems import GemmProblem, gemm_combine
from routings import routings
from stored_experts import STORED, fp8_weights, store

SHAPE = Shape(num_tokens=5, top_k=3, num_experts=8, hidden=40, intermediate=24)
MAX_TOKENS = 7


def product_and_combine(implementation, shape=SHAPE, **options):
    return gemm_combine(implementation, shape, MAX_TOKENS, **options)


def problem_of(rng, routing, num_ranks, shape=SHAPE, num_tokens=None):
    return GemmProblem(rng, routing, num_ranks, shape, MAX_TOKENS, num_tokens)


def test_low_latency_gemm_combine_routings(implementation, every_mesh, rng, subtests):
    call = compiled(product_and_combine(implementation, preferred_element_type=jnp.float32), every_mesh)
    for routing in routings(implementation, every_mesh.size):
        with subtests.test(routing):
            problem = problem_of(rng, routing, every_mesh.size)
            got = call(*problem.args)
            assert got.dtype == F32
            np.testing.assert_array_equal(got, problem.want())


@pytest.mark.parametrize("expected_rows", [1, 12, 20, 100])
@pytest.mark.slow(unless={"expected_rows": [1, 100]})
def test_low_latency_gemm_combine_tile_sizes(implementation, expected_rows, expert_mesh, rng):
    shape = Shape(num_tokens=7, top_k=2, num_experts=2, hidden=264, intermediate=136)
    problem = problem_of(rng, "uniform", 2, shape)
    options = {"preferred_element_type": jnp.float32, "expected_rows": expected_rows}
    got = run(product_and_combine(implementation, shape, **options), expert_mesh(2), *problem.args)
    np.testing.assert_array_equal(got, problem.want())


@pytest.mark.parametrize("activations", [None, "int8", "fp8"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.slow(unless={"stored": ["mxfp4", "mxfp4 prepacked", "int8"], "activations": [None, "int8"]})
def test_low_latency_gemm_combine_quantized_weights(implementation, stored, activations, expert_mesh, rng):
    """Results match `masked_grouped_gemm` and `low_latency_combine` up to the rounding of sums."""
    if activations is not None and ((activations == "int8") != (stored == "int8") or stored.endswith("prepacked")):
        pytest.skip("no GEMM has these formats")
    shape = Shape(num_tokens=5, top_k=3, num_experts=8, hidden=264, intermediate=256)
    problem = problem_of(rng, "duplicates", 2, shape)
    w = np.swapaxes(reals(rng, *problem.rhs.shape), -1, -2)
    lhs = problem.poisoned(reals(rng, *problem.lhs.shape, dtype=BF16))

    def fn(x, ids, weights, lhs, w):
        rhs = store(w, stored, activations=activations)
        sizes = {"num_experts": shape.num_experts, "max_tokens_per_rank": MAX_TOKENS}
        options = {"implementation": implementation}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=False, **options)
        options["preferred_element_type"] = jnp.float32
        y = jax_ep.masked_grouped_gemm(lhs, rhs, d.group_sizes, **options)
        want = jax_ep.low_latency_combine(y, ids, weights, d.handle, implementation=implementation)
        return jax_ep.ops.moe_low_latency.low_latency_gemm_combine(
            lhs, rhs, d.group_sizes, ids, weights, d.handle, **options
        ), want

    got, want = run(fn, expert_mesh(2), problem.x, problem.ids, problem.weights, lhs, w)
    assert np.all(np.isfinite(want)) and np.any(want)
    assert_close(got, want.astype(np.float64), tolerance=1e-5)


def test_low_latency_gemm_combine_num_tokens(implementation, expert_mesh, rng):
    counts = np.array([2, 0], np.int32)
    problem = problem_of(rng, "uniform", 2, num_tokens=counts)
    call = product_and_combine(implementation, preferred_element_type=jnp.float32)
    got = run(call, expert_mesh(2), *problem.args, counts)
    np.testing.assert_array_equal(got, problem.want())
    assert not got[1].any()


def test_low_latency_gemm_combine_rows_rounded_once(implementation, expert_mesh, rng):
    problem = problem_of(rng, "duplicates", 2)
    problem.lhs, problem.rhs = (reals(rng, *x.shape, dtype=BF16) for x in (problem.lhs, problem.rhs))
    problem.weights = problem.exact_weights = probabilities(rng, *problem.ids.shape)
    got = run(product_and_combine(implementation), expert_mesh(2), *problem.args)
    assert got.dtype == BF16
    assert_close(got, problem.want())


def test_low_latency_gemm_combine_fp8(implementation, expert_mesh, rng):
    shape = Shape(num_tokens=5, top_k=3, num_experts=4, hidden=200, intermediate=256)
    problem = problem_of(rng, "uniform", 2, shape)
    lhs, rhs = (100 * reals(rng, *x.shape) for x in (problem.lhs, problem.rhs))
    lhs, rhs = (x.clip(-448, 448).astype(oracle.FP8) for x in (lhs, rhs))
    lhs_scales = (2.0 ** rng.uniform(-9, 2, (*lhs.shape[:-1], 2))).astype(F32)
    rhs_scales = (2.0 ** rng.uniform(-9, 2, (*rhs.shape[:2], 2, 2))).astype(F32)
    problem.lhs, problem.rhs = oracle.dequantize(lhs, lhs_scales), oracle_quantized.dequantize(rhs, rhs_scales, "fp8")
    want = problem.want()
    lhs, lhs_scales = problem.poisoned(lhs), problem.poisoned(lhs_scales)
    call = product_and_combine(implementation, shape)

    def fn(x, ids, weights, lhs, rhs, lhs_scales, rhs_scales):
        return call(x, ids, weights, lhs, fp8_weights(rhs, rhs_scales), lhs_scales=lhs_scales)

    got = run(fn, expert_mesh(2), *problem.args[:3], lhs, rhs, lhs_scales, rhs_scales)
    assert got.dtype == BF16
    assert_close(got, want)


def test_low_latency_gemm_combine_scan(implementation, expert_mesh, rng):
    """Consecutive steps get their own rows, through both halves of the buffers."""
    problems = [problem_of(rng, "zipf", 2) for _ in range(5)]
    call = product_and_combine(implementation, preferred_element_type=jnp.float32)

    def fn(*steps):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)

        def step(carry, at):
            x, ids, weights, lhs, rhs = at
            # Never true: makes a step depend on the previous one.
            lhs = lhs + (carry[0, 0] == 12345.678).astype(lhs.dtype)
            out = call(x, ids, weights, lhs, rhs)
            return out, out

        return jax.lax.scan(step, jnp.zeros_like(call(*steps[0])), stacked)[1]

    got = run(fn, expert_mesh(2), *(problem.args for problem in problems))
    for i, problem in enumerate(problems):
        np.testing.assert_array_equal(got[:, i], problem.want())
