"""Segments for decode-sized batches of `xla`, of any size: the same rows and sums, fewer bytes, less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import low_latency_problems
import oracle_serving
import portable_ways
from cases import BF16, F32, FP8_WIRE, Shape, assert_close, assert_same_bits, probabilities, reals
from harness import compiled, per_rank
from jax_ep.types import Layout
from jax_ep.xla import ragged
from portable_ways import both_ways, lowered, record_sizes, take, tokens_between
from routings import ROUTINGS

SHAPE = Shape(num_tokens=5, top_k=2, num_experts=16, hidden=128)
MAX_TOKENS = 6  # More room than tokens.
NUM_RANKS = 8  # More than 2 K, so that ragged all-to-alls have several windows.


@pytest.fixture(params=portable_ways.WAYS)
def way(request, monkeypatch):
    take(request.param, monkeypatch)
    return request.param


def round_trip(shape=SHAPE, max_tokens=MAX_TOKENS, **options):
    return low_latency_problems.round_trip("xla", shape, max_tokens, **options)


# Routing all tokens to one expert fills a rank far beyond the first window.
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.slow(unless={"routing": ["one_hot"]})
def test_xla_low_latency_matches_oracle(way, routing, expert_mesh, rng):
    case = low_latency_problems.Problem(rng, routing, NUM_RANKS, SHAPE, MAX_TOKENS)
    case.check(*compiled(round_trip(quantize=False), expert_mesh(NUM_RANKS))(*case.args))


def problem(rng, num_ranks, shape=SHAPE, dtype=F32):
    ids = ROUTINGS["duplicates"](rng, num_ranks, shape)
    x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=dtype)
    local = shape.num_experts // num_ranks
    return x, ids, probabilities(rng, *ids.shape), reals(rng, num_ranks, local, num_ranks * MAX_TOKENS, shape.hidden)


@pytest.mark.slow
def test_xla_low_latency_quantized(way, mesh, rng, monkeypatch):
    """Values and scales are sent together, and rows are rounded to FP8 before they are added."""
    fn = round_trip(schedule=FP8_WIRE)
    (d, sums), (wanted, sums_wanted) = both_ways(monkeypatch, way, fn, mesh, *problem(rng, mesh.size))
    assert_same_bits(d.tokens, wanted.tokens)
    assert_same_bits(d.scales, wanted.scales)
    assert_close(sums, sums_wanted.astype(np.float64), "sums")


@pytest.mark.slow(unless={"way": ["rounds"]})
def test_xla_low_latency_gradients(way, mesh, rng, monkeypatch):
    """Compare gradients of both functions with the oracle, and with "to all"."""
    gradients = low_latency_problems.gradients("xla", SHAPE, MAX_TOKENS)

    def of_gradients(x, ids, weights, y, *cotangents):
        def loss(x, weights, y, *cotangents):
            return sum(jnp.sum(jnp.sin(g)) for g in gradients(x, ids, weights, y, *cotangents))

        return jax.grad(loss, (1, 2, 3, 4))(x, weights, y, *cotangents)

    x, ids, weights, y = problem(rng, mesh.size)
    lay = oracle_serving.low_latency_layout(ids, SHAPE.num_experts, MAX_TOKENS)
    d_rows, d_out = reals(rng, *y.shape), reals(rng, *x.shape)
    got = compiled(gradients, mesh)(x, ids, weights, y, d_rows, d_out)
    low_latency_problems.check_gradients(got, ids, lay, weights, y, d_rows, d_out)
    seconds = both_ways(monkeypatch, way, of_gradients, mesh, x, ids, weights, y, d_rows, d_out)
    for got, exact in zip(*seconds, strict=True):
        assert np.abs(exact).max() > 0.1
        assert_close(got, exact.astype(np.float64), "second derivative")


@pytest.mark.slow(unless={"way": ["rounds"]})
def test_xla_low_latency_no_tokens(way, mesh):
    shape = Shape(num_tokens=0, top_k=2, num_experts=8, hidden=128)
    x, ids = np.zeros((mesh.size, 0, 128), BF16), np.zeros((mesh.size, 0, 2), np.int32)
    y = np.zeros((mesh.size, 8 // mesh.size, mesh.size * MAX_TOKENS, 128), BF16)
    d, sums = compiled(round_trip(shape), mesh)(x, ids, ids.astype(F32), y)
    assert d.tokens.shape == y.shape and sums.shape == x.shape
    assert not d.tokens.astype(F32).any() and not d.scales.any()


# ---- What is chosen, and what it costs -----------------------------------------------------------------------------


def programs(num_ranks, shape, mesh):
    """Compile dispatch and combine of full batches."""
    options = {"num_experts": shape.num_experts, "max_tokens_per_rank": shape.num_tokens, "implementation": "xla"}

    def dispatch(x, ids):
        return jax_ep.low_latency_dispatch(x, ids, quantize=False, **options)

    def combine(y, ids, weights, handle):
        return jax_ep.low_latency_combine(y, ids, weights, handle, implementation="xla")

    x = jax.ShapeDtypeStruct((num_ranks, shape.num_tokens, shape.hidden), F32)
    ids = jax.ShapeDtypeStruct((num_ranks, shape.num_tokens, shape.top_k), np.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, F32)
    sent = jax.eval_shape(per_rank(dispatch, mesh), x, ids)
    y = jax.ShapeDtypeStruct(sent.tokens.shape, F32)
    calls = {"dispatch": (lambda *a: dispatch(*a).tokens, (x, ids))}
    calls["combine"] = combine, (y, ids, weights, sent.handle)
    return {name: jax.jit(per_rank(fn, mesh)).lower(*args).compile() for name, (fn, args) in calls.items()}


@pytest.mark.slow
def test_xla_low_latency_memory_independent_of_ranks(expert_mesh):
    """Temporary memory at two experts per rank: a round of tokens, and the returned sums."""
    tokens, top_k, hidden = 256, 2, 2048
    found = {}
    for num_ranks in (2, 4, 8):
        shape = Shape(num_tokens=tokens, top_k=top_k, num_experts=2 * num_ranks, hidden=hidden)
        for name, program in programs(num_ranks, shape, expert_mesh(num_ranks)).items():
            found.setdefault(name, []).append(program.memory_analysis().temp_size_in_bytes)
    token_bytes, numbers = tokens * hidden * 4, 64 * 8 * tokens * top_k  # Per assignment of all ranks, to find its row.
    for name, of_ranks in found.items():
        assert max(of_ranks) < (top_k + 1.5) * token_bytes + numbers, (name, of_ranks)
        assert of_ranks[2] <= of_ranks[0] + numbers, (name, of_ranks)


@pytest.mark.parametrize("routing", ["duplicates", "one_hot"])
@pytest.mark.slow(unless={"routing": ["one_hot"]})
def test_xla_low_latency_ragged_bytes_minimal(routing, expert_mesh, rng, monkeypatch):
    """Each token is sent once to each rank with one of its experts, and back, in as few windows as possible."""
    sent, windows = np.zeros((2, NUM_RANKS, NUM_RANKS), np.int64), [0, 0]
    window = ragged.window_size(Layout(NUM_RANKS, SHAPE.num_experts, MAX_TOKENS, SHAPE.top_k, 0))

    def note(call, rank, sizes):
        is_back = call[0][0] == window  # Sums are sent from windows, tokens arrive in them.
        sent[int(is_back), int(rank)] += sizes
        windows[int(is_back)] += 1

    record_sizes(monkeypatch, note)
    ids = ROUTINGS[routing](rng, NUM_RANKS, SHAPE)
    x, weights = reals(rng, NUM_RANKS, SHAPE.num_tokens, SHAPE.hidden), probabilities(rng, *ids.shape)
    y = reals(rng, NUM_RANKS, 2, NUM_RANKS * MAX_TOKENS, SHAPE.hidden)
    compiled(round_trip(quantize=False), expert_mesh(NUM_RANKS))(x, ids, weights, y)
    jax.effects_barrier()
    least = tokens_between(ids, SHAPE.num_experts)
    np.testing.assert_array_equal(sent, [least, least.T])
    assert windows == [NUM_RANKS * -(-least.sum(0).max() // window)] * 2
    assert windows[0] > NUM_RANKS or routing != "one_hot"


def test_xla_low_latency_lowers_for_gpus(expert_mesh, monkeypatch):
    """The ragged all-to-all lowers, in FP8 too, with arrays of windows and of the tokens of one rank only."""
    monkeypatch.setattr(portable_ways.exchange, "GATHERED_BYTES", 0)
    shape = Shape(num_tokens=6, top_k=1, num_experts=16, hidden=256)
    x, y = np.zeros((8, 6, 256), F32), np.zeros((8, 2, 48, 256), F32)
    ids, weights = np.zeros((8, 6, 1), np.int32), np.zeros((8, 6, 1), F32)
    for quantize, count in ((False, 2), (True, 3)):
        text = lowered("tpu", round_trip(shape, 6, quantize=quantize), expert_mesh(8), x, ids, weights, y)
        assert text.count("@ragged_all_to_all") == count
        rows = {int(n) for n in re.findall(r"tensor<(\d+)x256x", text)}
        assert rows - {2 * 48} == {6, 2 * 6}, rows
