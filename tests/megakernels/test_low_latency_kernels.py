"""The low-latency kernels: every routing with both algorithms, the halves of the area, its growth, and failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import harness
import jax_ep
import oracle_serving
from cases import BF16, FP8_WIRE, Shape, assert_same_bits, integers, reals
from jax_ep import context
from jax_ep.megakernels import low_latency
from routings import ROUTINGS

SHAPE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=16)


@pytest.fixture
def mesh(two_ranks):
    return two_ranks


def round_trip(shape, max_tokens):
    options = {"num_experts": shape.num_experts, "max_tokens_per_rank": max_tokens, "quantize": False}

    def fn(x, ids, weights, y):
        d = jax_ep.low_latency_dispatch(x, ids, **options, implementation="triton")
        return d, jax_ep.low_latency_combine(y, ids, weights, d.handle, implementation="triton")

    return fn


class Problem:
    """Inputs of one round trip, and its expected results."""

    def __init__(self, rng, routing, num_ranks, shape, max_tokens):
        self.ids = ROUTINGS[routing](rng, num_ranks, shape)
        self.weights = integers(rng, *self.ids.shape)
        # The weights of assignments without an expert are ignored.
        self.weights[(self.ids < 0) | (self.ids >= shape.num_experts)] = np.nan
        self.x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=BF16)
        self.shape, self.max_tokens = shape, max_tokens
        self.lay = oracle_serving.low_latency_layout(self.ids, shape.num_experts, max_tokens)
        y = integers(rng, *self.lay.token.shape, shape.hidden, dtype=BF16)
        self.y = np.where((self.lay.token < 0)[..., None], np.array(np.nan, BF16), y)

    @property
    def args(self):
        return self.x, self.ids, self.weights, self.y

    def check(self, d, back):
        lay, real = self.lay, self.lay.token >= 0
        assert_same_bits(d.tokens[real], oracle_serving.low_latency_gather(self.x, lay)[real], "tokens")
        assert_same_bits(d.group_sizes, lay.group_sizes, "group_sizes")
        assert_same_bits(d.handle.source_token, lay.token, "source_token")
        assert_same_bits(d.handle.source_start, lay.start, "source_start")
        assert_same_bits(d.handle.source_count, lay.count, "source_count")
        assert_same_bits(d.handle.assignment_to_row, self.assignment_to_row(), "assignment_to_row")
        invalid = ((self.ids < -1) | (self.ids >= self.shape.num_experts)).sum((1, 2), dtype=np.int32)
        assert_same_bits(np.ravel(d.handle.num_invalid), invalid, "num_invalid")
        weights = np.where(np.isnan(self.weights), 0, self.weights)
        want = oracle_serving.low_latency_combine(self.y, self.ids, weights, lay)
        np.testing.assert_array_equal(back.astype(np.float64), want)

    def assignment_to_row(self):
        num_ranks, _, top_k = self.ids.shape
        rows = np.full((num_ranks, num_ranks, self.max_tokens, top_k), -1, np.int32)
        for source, token, k in np.ndindex(*self.ids.shape):
            place = self.lay.row_of(source, token, int(self.ids[source, token, k]))
            if place is not None:
                rank, local, row = place
                rows[rank, source, token, k] = local * num_ranks * self.max_tokens + row
        return rows


WAYS = {"few tokens": (1 << 20, 1 << 20), "many tokens": (0, 0)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(2, 9), (3, 7)])
@pytest.mark.slow
def test_low_latency_kernels_routings_both_algorithms(monkeypatch, mesh, rng, subtests, way, num_ranks, max_tokens):
    comparisons, rows = WAYS[way]
    monkeypatch.setattr(low_latency, "_MOST_COMPARISONS", comparisons)
    monkeypatch.setattr(low_latency, "_MOST_ROWS", rows)
    shape = Shape(7, 3, 4 * num_ranks, 16)
    call = harness.compiled(round_trip(shape, max_tokens), harness.make_mesh((num_ranks,), (harness.EXPERT,)))
    for routing in ROUTINGS:
        with subtests.test(routing):
            problem = Problem(rng, routing, num_ranks, shape, max_tokens)
            problem.check(*call(*problem.args))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.slow(unless={"way": ["many tokens"], "quantize": [True]})
def test_low_latency_kernels_fp8_and_float32(monkeypatch, mesh, rng, way, quantize):
    """Quantization matches XLA bit for bit; sums of rows rounded to FP8 stay within their bound."""
    comparisons, rows = WAYS[way]
    monkeypatch.setattr(low_latency, "_MOST_COMPARISONS", comparisons)
    monkeypatch.setattr(low_latency, "_MOST_ROWS", rows)
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
    (tokens, scales, back, _), (want, want_scales, want_back, magnitudes) = harness.run(fn, mesh, x, ids, weights, y)
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(scales, want_scales)
    # Both round to 2^-4: one the rows, the other their sums on a rank.
    bound = 1e-5 + (magnitudes / 8 if quantize else 0)
    np.testing.assert_array_less(np.abs(back - want_back), bound)


@pytest.mark.slow
def test_low_latency_kernels_overlapping_groups(mesh, rng):
    """Pairs of devices have separate halves, so launches of other groups and sizes may come in between."""
    jax_ep.finalize()
    jax_ep.init(transport="shared_memory")  # Without a mesh: the ep_group is not known before a program runs.
    others = Mesh(np.array(jax.devices())[[1, 2]], (harness.EXPERT,))
    four = harness.make_mesh((4,), (harness.EXPERT,))
    small, large = SHAPE, Shape(num_tokens=20, top_k=2, num_experts=8, hidden=48)
    runs = [
        (m, s, harness.compiled(round_trip(s, s.num_tokens), m)) for m in (mesh, others, four) for s in (small, large)
    ]
    for index in rng.permutation(3 * len(runs)):
        where, shape, call = runs[index % len(runs)]
        problem = Problem(rng, "uniform", where.size, shape, shape.num_tokens)
        problem.check(*call(*problem.args))


@pytest.mark.slow
def test_low_latency_kernels_programs_before_growth(mesh, rng):
    first = Problem(rng, "uniform", 2, SHAPE, 7)
    call = harness.compiled(round_trip(SHAPE, 7), mesh)
    first.check(*call(*first.args))
    before = context.heap("test").buffers
    context.reserve("test", 0, before.buffer_bytes + 1)
    large = Shape(num_tokens=30, top_k=3, num_experts=8, hidden=256)
    second = Problem(rng, "zipf", 2, large, 30)
    second.check(*harness.run(round_trip(large, 30), mesh, *second.args))
    after = context.heap("test").buffers
    assert after.buffer_bytes >= before.buffer_bytes * 3 // 2
    assert after.id > before.id
    first.check(*call(*first.args))
    data = np.zeros((2, 100, 4096), np.float32)  # And the data area next to it.
    harness.run(lambda x, ids: jax_ep.dispatch(x, ids, num_experts=8, implementation="triton").tokens, mesh, data,
                np.zeros((2, 100, 1), np.int32))  # fmt: skip
    first.check(*call(*first.args))


@pytest.mark.slow
def test_low_latency_kernels_fixed_heap():
    jax_ep.finalize()
    mesh = harness.make_mesh((2,), (harness.EXPERT,))
    rng = np.random.default_rng(0)
    problem = Problem(rng, "uniform", 2, SHAPE, 7)
    call = harness.compiled(round_trip(SHAPE, 7), mesh)
    needed = 2_110_000
    for name in ("dispatch", "combine"):  # Each has buffers of its size.
        jax_ep.init(mesh, transport="shared_memory", heap_bytes=needed)
        with pytest.raises(ValueError, match=rf"low_latency_{name}: .*heap_bytes={needed} per device") as failure:
            call(*problem.args)
        needed = int(str(failure.value).split("but this call needs ")[1].split(";")[0])
        jax_ep.finalize()
    jax_ep.init(mesh, transport="shared_memory", heap_bytes=needed)
    problem.check(*harness.run(round_trip(SHAPE, 7), mesh, *problem.args))
    jax_ep.finalize()


@pytest.mark.parametrize(
    ("hidden", "max_tokens", "top_k", "reason"),
    [(12, 4, 2, "not whole 16-byte words"), (16, 1025, 2, "1025 exceeds 1024"), (16, 4, 17, "K=17 exceeds 16")],
)
@pytest.mark.slow(unless={"top_k": [17]})
def test_low_latency_kernels_unsupported_uses_xla(mesh, rng, hidden, max_tokens, top_k, reason):
    shape = Shape(num_tokens=2, top_k=top_k, num_experts=4, hidden=hidden)
    problem = Problem(rng, "duplicates", 2, shape, max_tokens)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(harness.per_rank(round_trip(shape, max_tokens), mesh), *problem.args)
    options = {"num_experts": 4, "max_tokens_per_rank": max_tokens, "quantize": False}

    def fn(x, ids, weights):  # Combine must accept the handle of any implementation.
        d = jax_ep.low_latency_dispatch(x, ids, **options)
        return jax_ep.low_latency_combine(d.tokens.repeat(8, axis=2), ids, weights, d.handle)

    got = harness.run(fn, mesh, problem.x.astype(np.float32), problem.ids, np.ones(problem.ids.shape, np.float32))
    np.testing.assert_allclose(got, top_k * problem.x.astype(np.float32).repeat(8, axis=2), rtol=1e-6)
