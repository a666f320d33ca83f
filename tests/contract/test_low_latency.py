"""low_latency_dispatch and low_latency_combine: packed rows, FP8 groups, weighted sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_serving
import pytest
from cases import BASE, BF16, F32, ROUTINGS, Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import compiled, per_rank, refusals_skip, run
from jax.sharding import Mesh

import jax_ep

SHAPE = Shape(num_tokens=5, top_k=3, num_experts=8, hidden=256)
MAX_TOKENS = 7  # more room than tokens


def round_trip(implementation: str, *, shape: Shape = SHAPE, max_tokens: int = MAX_TOKENS, **options: Any):
    def fn(x, topk_idx, topk_weights, y, num_tokens=None):
        out = jax_ep.low_latency_dispatch(
            x,
            topk_idx,
            num_experts=shape.num_experts,
            max_tokens_per_rank=max_tokens,
            num_tokens=num_tokens,
            implementation=implementation,
            **options,
        )
        back = jax_ep.low_latency_combine(y, topk_idx, topk_weights, out.handle, implementation=implementation)
        handle = out.handle
        return out.tokens, out.scales, out.group_sizes, (handle.source_token, handle.source_count,
                                                         handle.source_start), back  # fmt: skip

    return fn


class Problem:
    def __init__(
        self,
        rng: np.random.Generator,
        routing: str,
        num_ranks: int,
        *,
        shape: Shape = SHAPE,
        max_tokens: int = MAX_TOKENS,
        num_tokens: np.ndarray | None = None,
    ):
        self.topk_idx = ROUTINGS[routing](rng, num_ranks, shape)
        self.topk_weights = integers(rng, *self.topk_idx.shape)
        self.lay = oracle_serving.low_latency_layout(self.topk_idx, shape.num_experts, max_tokens, num_tokens)
        self.x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=BF16)
        # Exact sums in any order; rows past the count are poisoned.
        y = integers(rng, *self.lay.token.shape, shape.hidden, dtype=BF16)
        self.y = np.where((self.lay.token < 0)[..., None], np.array(np.nan, BF16), y)

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return self.x, self.topk_idx, self.topk_weights, self.y

    def check_routes(self, group_sizes: np.ndarray, handle: Any, back: np.ndarray) -> None:
        assert_same_bits(group_sizes, self.lay.group_sizes, "group_sizes")
        assert_same_bits(handle[0], self.lay.token, "source_token")
        assert_same_bits(handle[1], self.lay.count, "source_count")
        assert_same_bits(handle[2], self.lay.start, "source_start")
        want = oracle_serving.low_latency_combine(self.y, self.topk_idx, self.topk_weights, self.lay)
        assert back.dtype == self.y.dtype
        np.testing.assert_array_equal(back.astype(np.float64), want)


def test_routings(implementation: str, every_mesh: Mesh, rng: np.random.Generator, subtests: pytest.Subtests) -> None:
    call = compiled(round_trip(implementation, quantize=False), every_mesh)
    for routing in ROUTINGS:
        with subtests.test(routing):
            problem = Problem(rng, routing, every_mesh.size)
            tokens, scales, *rest = call(*problem.args)
            assert scales is None
            assert_same_bits(tokens, oracle_serving.low_latency_gather(problem.x, problem.lay), "tokens")
            problem.check_routes(*rest)


@pytest.mark.parametrize("group_size", [128, 64])
def test_quantised(implementation: str, group_size: int, expert_mesh: Any, rng: Any, subtests: Any) -> None:
    call = compiled(round_trip(implementation, group_size=group_size), expert_mesh(2))
    for routing in ("uniform", "duplicates", "one_hot", "no_experts"):
        problem = Problem(rng, routing, 2)
        real = problem.lay.token >= 0
        with subtests.test(f"{routing}, exact scales"):
            # Every group peaks at 448 times a power of two, so its scale does not depend on how one divides.
            x = rng.uniform(-400, 400, problem.x.shape)
            x[..., ::group_size] = 448
            problem.x = (x * 2.0 ** rng.integers(-9, 2, (*x.shape[:-1], 1))).astype(BF16)
            values, want_scales = oracle.quantize(problem.x, group_size)
            tokens, scales, *rest = call(*problem.args)
            assert_same_bits(tokens, oracle_serving.low_latency_gather(values, problem.lay), "tokens")
            assert_same_bits(scales[real], oracle_serving.low_latency_gather(want_scales, problem.lay)[real], "scales")
            problem.check_routes(*rest)
        with subtests.test(f"{routing}, any numbers"):
            problem.x = reals(rng, *problem.x.shape, dtype=BF16)
            tokens, scales, *_ = call(*problem.args)
            exact = oracle_serving.low_latency_gather(problem.x.astype(F32), problem.lay)
            _, want_scales = oracle.quantize(problem.x, group_size)
            want_scales = oracle_serving.low_latency_gather(want_scales, problem.lay)
            np.testing.assert_allclose(scales[real], want_scales[real], rtol=2**-22)
            error = np.abs(oracle.dequantize(tokens, scales) - exact)
            bound = np.maximum(np.abs(exact) * 2.0**-4, want_scales.repeat(group_size, -1) * 2.0**-10)
            assert (error <= bound * (1 + 1e-6)).all()


def test_quantised_tokens_arrive_as_they_are(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    problem = Problem(rng, "some_without_expert", 2)
    values = rng.integers(0, 256, problem.x.shape, np.uint8).view(oracle.FP8)
    scales = rng.random((*values.shape[:-1], 2)).astype(F32)
    got = run(round_trip(implementation), expert_mesh(2), (values, scales), *problem.args[1:])
    assert_same_bits(got[0], oracle_serving.low_latency_gather(values, problem.lay), "values")
    real = problem.lay.token >= 0
    assert_same_bits(got[1][real], oracle_serving.low_latency_gather(scales, problem.lay)[real], "scales")
    problem.check_routes(*got[2:])


def test_num_tokens_on_the_device(implementation: str, expert_mesh: Any, rng: Any, subtests: Any) -> None:
    """One compiled function serves every batch size."""
    call = compiled(round_trip(implementation, quantize=False), expert_mesh(2))
    for count in ([0, 0], [5, 5], [1, 4], [3, 0]):
        with subtests.test(str(count)):
            num_tokens = np.array(count, np.int32)
            problem = Problem(rng, "uniform", 2, num_tokens=num_tokens)
            problem.x[np.arange(SHAPE.num_tokens) >= num_tokens[:, None]] = np.nan  # nobody may look
            tokens, _, *rest = call(*problem.args, num_tokens)
            assert_same_bits(tokens, oracle_serving.low_latency_gather(problem.x, problem.lay), "tokens")
            problem.check_routes(*rest)


@pytest.mark.parametrize(
    ("num_ranks", "shape", "max_tokens"),
    [(2, Shape(1, 1, 2, 3), 1), (1, Shape(4, 6, 3, 7), 4), (4, Shape(3, 2, 4, 1), 8), (2, Shape(16, 4, 32, 5), 16)],
    ids=["one of everything", "one rank, more choices than experts", "one local expert", "many experts"],
)
def test_shapes(implementation: str, num_ranks: int, shape: Shape, max_tokens: int, expert_mesh: Any, rng: Any) -> None:
    sizes = {"shape": shape, "max_tokens": max_tokens}
    problem = Problem(rng, "duplicates", num_ranks, **sizes)
    call = round_trip(implementation, quantize=False, **sizes)
    tokens, _, *rest = run(call, expert_mesh(num_ranks), *problem.args)
    assert_same_bits(tokens, oracle_serving.low_latency_gather(problem.x, problem.lay), "tokens")
    problem.check_routes(*rest)


def test_fp8_on_the_way_back(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Whatever is quantised, rows or their weighted sums, the error stays within FP8's bound of each term."""

    def fn(x, topk_idx, topk_weights, y):
        out = jax_ep.low_latency_dispatch(
            x, topk_idx, num_experts=8, max_tokens_per_rank=MAX_TOKENS, implementation=implementation
        )
        return jax_ep.low_latency_combine(
            y, topk_idx, topk_weights, out.handle, wire_dtype=jnp.float8_e4m3fn, implementation=implementation
        )

    problem = Problem(rng, "some_without_expert", 2)
    real = (problem.lay.token >= 0)[..., None]
    y = np.where(real, reals(rng, *problem.y.shape), F32.type(np.nan))
    weights = probabilities(rng, *problem.topk_idx.shape)
    back = run(fn, expert_mesh(2), problem.x, problem.topk_idx, weights, y)

    def weighted_sum(rows: np.ndarray) -> np.ndarray:
        return oracle_serving.low_latency_combine(rows, problem.topk_idx, weights, problem.lay)

    scales = np.where(real, oracle.quantize(np.nan_to_num(y))[1].repeat(128, -1), 0)
    error = np.abs(back - weighted_sum(y))
    assert error.max() > 1e-3, "the wire lost nothing: it was not FP8"
    assert (error <= weighted_sum(np.abs(y)) * 2.0**-4 + weighted_sum(scales) * 2.0**-9 + 1e-6).all()


def test_two_batches_in_flight(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Two dispatches before either combine, and the second combined first."""
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
        assert_same_bits(tokens, oracle_serving.low_latency_gather(problem.x, problem.lay), "tokens")
        want = oracle_serving.low_latency_combine(problem.y, problem.topk_idx, problem.topk_weights, problem.lay)
        np.testing.assert_array_equal(back.astype(np.float64), want)


def test_gradients(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Without quantisation both functions are differentiable."""

    def fn(x, topk_idx, topk_weights, y, d_tokens, d_out):
        def dispatch(x):
            out = jax_ep.low_latency_dispatch(
                x,
                topk_idx,
                num_experts=BASE.num_experts,
                max_tokens_per_rank=BASE.num_tokens,
                quantize=False,
                implementation=implementation,
            )
            return out.tokens, out.handle

        _, dispatch_vjp, handle = jax.vjp(dispatch, x, has_aux=True)

        def combine(y, topk_weights):
            return jax_ep.low_latency_combine(y, topk_idx, topk_weights, handle, implementation=implementation)

        _, combine_vjp = jax.vjp(combine, y, topk_weights)
        return *dispatch_vjp(d_tokens), *combine_vjp(d_out)

    topk_idx = ROUTINGS["duplicates"](rng, 2, BASE)
    topk_idx[0, 1, 0] = -1
    lay = oracle_serving.low_latency_layout(topk_idx, BASE.num_experts, BASE.num_tokens)
    x, d_out = (reals(rng, 2, BASE.num_tokens, BASE.hidden) for _ in range(2))
    topk_weights = probabilities(rng, *topk_idx.shape)
    y, d_tokens = (reals(rng, *lay.token.shape, BASE.hidden) for _ in range(2))
    dx, dy, d_weights = run(fn, expert_mesh(2), x, topk_idx, topk_weights, y, d_tokens, d_out)
    want_dy, want_d_weights = oracle_serving.low_latency_combine_gradients(y, topk_idx, topk_weights, lay, d_out)
    assert_close(dx, oracle_serving.low_latency_scatter(d_tokens, lay, BASE.num_tokens), "dx")
    assert_close(dy, want_dy, "dy")
    assert_close(d_weights, want_d_weights, "d_weights")


def test_quantised_dispatch_refuses_to_be_differentiated(implementation: str, expert_mesh: Any, rng: Any) -> None:
    def fn(x, topk_idx):
        def loss(x):
            out = jax_ep.low_latency_dispatch(
                x, topk_idx, num_experts=8, max_tokens_per_rank=MAX_TOKENS, implementation=implementation
            )
            return jnp.sum(out.scales) + jnp.sum(out.tokens.astype(jnp.float32))

        return jax.grad(loss)(x)

    problem = Problem(rng, "uniform", 2)
    with refusals_skip(), pytest.raises((ValueError, TypeError), match="quantize"):
        jax.eval_shape(per_rank(fn, expert_mesh(2)), problem.x, problem.topk_idx)
