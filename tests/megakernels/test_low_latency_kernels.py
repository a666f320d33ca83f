"""The low-latency kernels: every routing with both algorithms, the halves of the area, its growth, and failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
import low_latency_problems
from cases import FP8_WIRE, Shape, reals
from jax_ep import context
from jax_ep.megakernels import low_latency
from low_latency_problems import Problem
from routings import ROUTINGS

SHAPE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=16)


def round_trip(shape, max_tokens):
    return low_latency_problems.round_trip("triton", shape, max_tokens, quantize=False)


WAYS = {"few tokens": (1 << 20, 1 << 20), "many tokens": (0, 0)}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Choose each algorithm."""
    for name, value in zip(("_MOST_COMPARISONS", "_MOST_ROWS"), WAYS[request.param], strict=True):
        monkeypatch.setattr(low_latency, name, value)


@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(2, 9), (3, 7)])
def test_low_latency_kernels_both_algorithms(two_ranks, way, rng, subtests, num_ranks, max_tokens):
    shape = Shape(7, 3, 4 * num_ranks, 16)
    call = harness.compiled(round_trip(shape, max_tokens), harness.make_mesh((num_ranks,), (harness.EXPERT,)))
    for routing in ROUTINGS:
        with subtests.test(routing):
            problem = Problem(rng, routing, num_ranks, shape, max_tokens)
            problem.check(*call(*problem.args))


@pytest.mark.parametrize("quantize", [False, True])
def test_low_latency_kernels_fp8_and_float32(two_ranks, way, rng, quantize):
    """Quantization matches XLA bit for bit; sums of rows rounded to FP8 stay within their bound."""
    shape = Shape(5, 3, 4, 384)
    options = {"num_experts": shape.num_experts, "max_tokens_per_rank": 5, "quantize": quantize}
    wire = {"schedule": FP8_WIRE} if quantize else {}

    def fn(x, ids, weights, y):
        def run(name):
            d = jax_ep.low_latency_dispatch(x, ids, **options, implementation=name)
            real = jnp.arange(d.tokens.shape[1])[None, :] < d.group_sizes[:, None]
            tokens = jnp.where(real[:, :, None], jax.lax.bitcast_convert_type(d.tokens, bits), 0)
            scales = jnp.where(real[:, :, None], d.scales, 0) if quantize else jnp.zeros(())
            back = jax_ep.low_latency_combine(y, ids, weights, d.handle, **wire, implementation=name)
            magnitudes = jax_ep.low_latency_combine(jnp.abs(y), ids, jnp.abs(weights), d.handle, implementation=name)
            return tokens, scales, back, magnitudes

        return run("triton"), run("xla")

    bits = jnp.uint8 if quantize else jnp.uint32
    ids = ROUTINGS["duplicates"](rng, 2, shape)
    x, weights = reals(rng, 2, 5, shape.hidden), reals(rng, *ids.shape)
    y = reals(rng, 2, shape.num_experts // 2, 10, shape.hidden)
    (tokens, scales, back, _), (want, want_scales, want_back, magnitudes) = harness.run(
        fn, two_ranks, x, ids, weights, y
    )
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(scales, want_scales)
    # Both round to 2^-4: one the rows, the other their sums on a rank.
    bound = 1e-5 + (magnitudes / 8 if quantize else 0)
    np.testing.assert_array_less(np.abs(back - want_back), bound)


def test_low_latency_kernels_programs_before_growth(two_ranks, rng):
    first = Problem(rng, "uniform", 2, SHAPE, 7)
    call = harness.compiled(round_trip(SHAPE, 7), two_ranks)
    first.check(*call(*first.args))
    before = context.heap("test").buffers
    context.reserve("test", 0, before.buffer_bytes + 1)
    large = Shape(num_tokens=30, top_k=3, num_experts=8, hidden=256)
    second = Problem(rng, "zipf", 2, large, 30)
    second.check(*harness.run(round_trip(large, 30), two_ranks, *second.args))
    after = context.heap("test").buffers
    assert after.buffer_bytes >= before.buffer_bytes * 3 // 2
    assert after.id > before.id
    first.check(*call(*first.args))
    data = np.zeros((2, 100, 4096), np.float32)  # And the data area next to it.
    harness.run(lambda x, ids: jax_ep.dispatch(x, ids, num_experts=8, implementation="triton").tokens, two_ranks, data,
                np.zeros((2, 100, 1), np.int32))  # fmt: skip
    first.check(*call(*first.args))


def test_low_latency_kernels_fixed_heap():
    jax_ep.finalize()
    two_ranks = harness.make_mesh((2,), (harness.EXPERT,))
    rng = np.random.default_rng(0)
    problem = Problem(rng, "uniform", 2, SHAPE, 7)
    call = harness.compiled(round_trip(SHAPE, 7), two_ranks)
    needed = 2_110_000
    for name in ("dispatch", "combine"):  # Each has buffers of its size.
        jax_ep.init(two_ranks, transport="shared_memory", heap_bytes=needed)
        with pytest.raises(ValueError, match=rf"low_latency_{name}: .*heap_bytes={needed} per device") as failure:
            call(*problem.args)
        needed = int(str(failure.value).split("but this call needs ")[1].split(";")[0])
        jax_ep.finalize()
    jax_ep.init(two_ranks, transport="shared_memory", heap_bytes=needed)
    problem.check(*harness.run(round_trip(SHAPE, 7), two_ranks, *problem.args))
    jax_ep.finalize()


@pytest.mark.parametrize(
    ("hidden", "max_tokens", "top_k", "reason"),
    [(12, 4, 2, "not whole 16-byte words"), (16, 1025, 2, "1025 exceeds 1024"), (16, 4, 17, "K=17 exceeds 16")],
)
def test_low_latency_kernels_unsupported_uses_xla(two_ranks, rng, hidden, max_tokens, top_k, reason):
    shape = Shape(num_tokens=2, top_k=top_k, num_experts=4, hidden=hidden)
    problem = Problem(rng, "duplicates", 2, shape, max_tokens)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(harness.per_rank(round_trip(shape, max_tokens), two_ranks), *problem.args)
    options = {"num_experts": 4, "max_tokens_per_rank": max_tokens, "quantize": False}

    def fn(x, ids, weights):  # Combine must accept the handle of any implementation.
        d = jax_ep.low_latency_dispatch(x, ids, **options)
        return jax_ep.low_latency_combine(d.tokens.repeat(8, axis=2), ids, weights, d.handle)

    got = harness.run(fn, two_ranks, problem.x.astype(np.float32), problem.ids, np.ones(problem.ids.shape, np.float32))
    np.testing.assert_allclose(got, top_k * problem.x.astype(np.float32).repeat(8, axis=2), rtol=1e-6)
