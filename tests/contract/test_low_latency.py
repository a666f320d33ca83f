"""low_latency_dispatch and low_latency_combine: packed rows, FP8 scale blocks, weighted sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import low_latency_problems
import oracle
import oracle_serving
from cases import BF16, F32, FP8_WIRE, Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import compiled, run
from routings import ROUTINGS, routings

SHAPE = Shape(num_tokens=5, top_k=3, num_experts=8, hidden=256)
MAX_TOKENS = 7  # More room than tokens.


def round_trip(implementation, *, shape=SHAPE, max_tokens=MAX_TOKENS, **options):
    return low_latency_problems.round_trip(implementation, shape, max_tokens, **options)


class Problem(low_latency_problems.Problem):
    def __init__(self, rng, routing, num_ranks, *, shape=SHAPE, max_tokens=MAX_TOKENS, num_tokens=None):
        super().__init__(rng, routing, num_ranks, shape, max_tokens, num_tokens)


def test_low_latency_routings(implementation, every_mesh, rng, subtests):
    call = compiled(round_trip(implementation, quantize=False), every_mesh)
    # tests/megakernels/test_low_latency_kernels.py runs all routings in the interpreter.
    for routing in routings(implementation, every_mesh.size, most_ranks=1):
        with subtests.test(routing):
            problem = Problem(rng, routing, every_mesh.size)
            problem.check(*call(*problem.args))


@pytest.mark.parametrize("group_size", [128, 64])
@pytest.mark.slow_interpreted(unless={"group_size": [128]})
def test_low_latency_quantized(implementation, group_size, expert_mesh, rng, subtests):
    call = compiled(round_trip(implementation, group_size=group_size), expert_mesh(2))
    for routing in ("uniform", "duplicates", "one_hot", "no_experts"):
        problem = Problem(rng, routing, 2)
        real = problem.is_row
        with subtests.test(f"{routing}, exact scales"):
            # Every block peaks at 448 times a power of two, so its scale does not depend on the division.
            x = rng.uniform(-400, 400, problem.x.shape)
            x[..., ::group_size] = 448
            problem.x = (x * 2.0 ** rng.integers(-9, 2, (*x.shape[:-1], 1))).astype(BF16)
            values, want_scales = oracle.quantize(problem.x, group_size)
            d, back = call(*problem.args)
            problem.check_rows(d.tokens, values, "tokens")
            problem.check_rows(d.scales, want_scales, "scales")
            problem.check_routes(d, back)
        with subtests.test(f"{routing}, any numbers"):
            problem.x = reals(rng, *problem.x.shape, dtype=BF16)
            d, _ = call(*problem.args)
            exact = oracle.gather(problem.x.astype(F32), problem.lay)
            _, want_scales = oracle.quantize(problem.x, group_size)
            want_scales = oracle.gather(want_scales, problem.lay)
            np.testing.assert_allclose(d.scales[real], want_scales[real], rtol=2**-22)
            error = np.abs(oracle.dequantize(d.tokens, d.scales) - exact)[real]
            bound = np.maximum(np.abs(exact) * 2.0**-4, want_scales.repeat(group_size, -1) * 2.0**-10)[real]
            assert (error <= bound * (1 + 1e-6)).all()


def test_low_latency_quantized_tokens_bit_for_bit(implementation, expert_mesh, rng):
    problem = Problem(rng, "some_without_expert", 2)
    values = rng.integers(0, 256, problem.x.shape, np.uint8).view(oracle.FP8)
    scales = rng.random((*values.shape[:-1], 2)).astype(F32)
    d, back = run(round_trip(implementation), expert_mesh(2), (values, scales), *problem.args[1:])
    problem.check_rows(d.tokens, values, "values")
    problem.check_rows(d.scales, scales, "scales")
    problem.check_routes(d, back)


def test_low_latency_num_tokens_on_device(implementation, expert_mesh, rng, subtests):
    """One compiled function handles every batch size."""
    call = compiled(round_trip(implementation, quantize=False), expert_mesh(2))
    for count in ([0, 0], [5, 5], [1, 4], [3, 0]):
        with subtests.test(str(count)):
            num_tokens = np.array(count, np.int32)
            problem = Problem(rng, "uniform", 2, num_tokens=num_tokens)
            problem.x[np.arange(SHAPE.num_tokens) >= num_tokens[:, None]] = np.nan  # These must not be read.
            problem.check(*call(*problem.args, num_tokens))


@pytest.mark.parametrize("count", [*(np.int8(3), np.uint8(3), np.uint32(3), 3, -1, 2**40, np.int64(2**40))], ids=repr)
@pytest.mark.slow_interpreted(unless={"count": [-1]})
def test_low_latency_num_tokens_integer_dtypes(implementation, expert_mesh, rng, count):
    """More tokens than int8 can count; a number past the end counts as all."""
    shape = Shape(num_tokens=300, top_k=1, num_experts=2, hidden=16)

    # As an array if JAX has the dtype.
    on_device = isinstance(count, np.generic) and count.dtype.itemsize <= 4

    def fn(x, topk_idx):
        options = {"num_experts": 2, "max_tokens_per_rank": 300, "quantize": False}
        options["num_tokens"] = jnp.asarray(count) if on_device else count
        return jax_ep.low_latency_dispatch(x, topk_idx, implementation=implementation, **options).group_sizes

    ids = ROUTINGS["uniform"](rng, 1, shape)
    sizes = run(fn, expert_mesh(1), reals(rng, 1, shape.num_tokens, shape.hidden, dtype=BF16), ids)
    assert int(sizes.sum()) == min(max(int(count), 0), shape.num_tokens)


@pytest.mark.parametrize(
    ("num_ranks", "shape", "max_tokens"),
    [
        *((2, Shape(1, 1, 2, 8), 1), (1, Shape(4, 6, 3, 24), 4), (4, Shape(3, 2, 4, 1), 8)),
        *((4, Shape(3, 2, 4, 8), 8), (2, Shape(16, 4, 32, 40), 16), (2, Shape(37, 6, 8, 16), 40)),
        (2, Shape(0, 2, 4, 8), 3),
    ],
    ids=["all one", "many choices", "one column", "one local expert", "many experts", "many tokens", "no tokens"],
)
def test_low_latency_shapes(implementation, num_ranks, shape, max_tokens, expert_mesh, rng):
    sizes = {"shape": shape, "max_tokens": max_tokens}
    problem = Problem(rng, "duplicates", num_ranks, **sizes)
    call = round_trip(implementation, quantize=False, **sizes)
    problem.check(*run(call, expert_mesh(num_ranks), *problem.args))


def test_low_latency_combine_fp8_wire(implementation, expert_mesh, rng):
    """Whether rows or their weighted sums are quantized, the error stays within FP8's bound of each term."""
    problem = Problem(rng, "some_without_expert", 2)
    real = problem.is_row[..., None]
    y = np.where(real, reals(rng, *problem.y.shape), F32.type(np.nan))
    weights = probabilities(rng, *problem.ids.shape)
    call = round_trip(implementation, schedule=FP8_WIRE)
    _, back = run(call, expert_mesh(2), problem.x, problem.ids, weights, y)

    def weighted_sum(rows):
        return oracle_serving.low_latency_combine(rows, problem.ids, weights, problem.lay)

    scales = np.where(real, oracle.quantize(np.nan_to_num(y))[1].repeat(128, -1), 0)
    error = np.abs(back - weighted_sum(y))
    assert error.max() > 1e-3, "the wire lost nothing: it was not FP8"
    assert (error <= weighted_sum(np.abs(y)) * 2.0**-4 + weighted_sum(scales) * 2.0**-9 + 1e-6).all()


def test_low_latency_two_batches_in_flight(implementation, expert_mesh, rng):
    """Two dispatches before either combine, and the second is combined first."""
    options = {"num_experts": 8, "max_tokens_per_rank": MAX_TOKENS, "quantize": False, "implementation": implementation}

    def fn(*problems):
        sent = [jax_ep.low_latency_dispatch(x, idx, **options) for x, idx, _, _ in problems]
        back = [
            jax_ep.low_latency_combine(y, idx, weights, out.handle, implementation=implementation)
            for (_, idx, weights, y), out in reversed(list(zip(problems, sent, strict=True)))
        ]
        return [out.tokens for out in sent], back[::-1]

    problems = [Problem(rng, routing, 2) for routing in ("uniform", "zipf")]
    for problem, tokens, back in zip(problems, *run(fn, expert_mesh(2), *(p.args for p in problems)), strict=True):
        problem.check_rows(tokens, problem.x, "tokens")
        want = oracle_serving.low_latency_combine(problem.y, problem.ids, problem.exact_weights, problem.lay)
        np.testing.assert_array_equal(back.astype(np.float64), want)


def test_low_latency_rows_past_counts_ignored(implementation, expert_mesh, rng):
    """A GEMM over all rows may compute with anything there."""
    shape, num_ranks = Shape(num_tokens=6, top_k=3, num_experts=8, hidden=12), 2
    weights = probabilities(rng, num_ranks, shape.num_tokens, shape.top_k)
    topk_idx = ROUTINGS["some_without_expert"](rng, num_ranks, shape)
    x = reals(rng, num_ranks, shape.num_tokens, shape.hidden)
    w = reals(rng, num_ranks, shape.num_experts // num_ranks, shape.hidden, shape.hidden)

    def layer(x, w, topk_idx, topk_weights):
        sizes = {"num_experts": shape.num_experts, "max_tokens_per_rank": MAX_TOKENS}
        out = jax_ep.low_latency_dispatch(x, topk_idx, **sizes, quantize=False, implementation=implementation)
        y = jnp.einsum("lrh,lhn->lrn", out.tokens, w)
        return jax_ep.low_latency_combine(y, topk_idx, topk_weights, out.handle, implementation=implementation)

    out = run(layer, expert_mesh(num_ranks), x, w, topk_idx, weights)
    experts = w.reshape(-1, shape.hidden, shape.hidden).astype(np.float64)
    chosen = np.where((topk_idx >= 0)[..., None, None], experts[topk_idx], 0) * weights[..., None, None]
    assert_close(out, np.einsum("wth,wthn->wtn", x, chosen.sum(axis=2)), "out")


def test_low_latency_scan_with_other_dispatches(implementation, expert_mesh, rng):
    """Each step of a decode loop gets its own data, whatever runs between two of them."""
    shape, num_ranks = Shape(num_tokens=2, top_k=2, num_experts=4, hidden=16), 2
    options = {"num_experts": shape.num_experts, "implementation": implementation}

    def fn(x, ids, weights):
        def step(x, at):
            index, ids = at
            low = {"max_tokens_per_rank": shape.num_tokens, "quantize": False, **options}
            sent = jax_ep.low_latency_dispatch(x, ids, **low)

            def others(x):
                d = jax_ep.dispatch(x, ids, **options)
                return jax_ep.combine(d.tokens, d.handle, implementation=implementation)

            # Once between dispatch and combine, once after both, and not at all.
            between = jax.lax.cond(index % 3 == 0, others, lambda x: x + x, x)
            rows = sent.tokens + 0 * between.sum()
            back = jax_ep.low_latency_combine(rows, ids, weights, sent.handle, implementation=implementation)
            after = jax.lax.cond(index % 3 == 1, others, lambda x: x + x, back)
            return (after + between - x) % 61, None

        return jax.lax.scan(step, x, (jnp.arange(10, dtype=jnp.int32), ids))[0]

    ids = np.stack([ROUTINGS["uniform"](rng, num_ranks, shape) for _ in range(10)], axis=1)
    x = integers(rng, num_ranks, shape.num_tokens, shape.hidden)
    weights = integers(rng, num_ranks, shape.num_tokens, shape.top_k)
    want = x.astype(np.float64)
    for _ in range(10):  # Two distinct experts per token, so each round trip doubles.
        want = np.mod(2 * want * weights.sum(-1, keepdims=True) + want, 61)
    np.testing.assert_array_equal(run(fn, expert_mesh(num_ranks), x, ids, weights), want)


def test_low_latency_rank_ahead_of_peers(implementation, expert_mesh, rng):
    """Only rank 0 receives, so on GPUs the other rank sends again while rank 0 is still working."""
    shape, num_steps = Shape(num_tokens=6, top_k=2, num_experts=4, hidden=16), 12
    options = {"num_experts": 4, "max_tokens_per_rank": 6, "quantize": False, "implementation": implementation}

    def fn(x, ids):
        def step(previous, x):
            d = jax_ep.low_latency_dispatch(x + 0 * previous, ids, **options)
            return d.group_sizes[0].astype(jnp.float32), d.tokens

        return jax.lax.scan(step, 0 * x[0, 0, 0], x)[1]

    ids = rng.integers(0, 2, (2, shape.num_tokens, shape.top_k), np.int32)
    x = reals(rng, 2, num_steps, shape.num_tokens, shape.hidden)
    lay = oracle_serving.low_latency_layout(ids, shape.num_experts, shape.num_tokens)
    tokens = run(fn, expert_mesh(2), x, ids)
    for step in range(num_steps):
        want = oracle.gather(x[:, step], lay)
        assert_same_bits(tokens[:, step][lay.token >= 0], want[lay.token >= 0], f"tokens of launch {step}")
