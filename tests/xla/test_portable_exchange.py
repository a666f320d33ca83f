"""Segments of `xla`, in rounds, for any size: same results, fewer bytes, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F16, F32, Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import compiled, make_mesh, per_rank
from jax_ep.types import Layout
from jax_ep.xla import exchange
from portable_ways import both_ways, record_sizes, take, tokens_between
from routings import FEW_ROUTINGS, ROUTINGS

WIDE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=256)


@pytest.fixture(autouse=True)
def in_rounds(monkeypatch):
    take("rounds", monkeypatch)


def round_trip(shape, wire=None, **options):
    """Return rows, and sums of other rows, `[W, ...]` of each."""

    def fn(x, ids, y):
        schedule = {"implementation": "xla", "schedule": jax_ep.Schedule(wire_dtype=wire)}
        sent = jax_ep.dispatch(x, ids, num_experts=shape.num_experts, **schedule, **options)
        return sent.tokens, jax_ep.combine(y, sent.handle, **schedule)

    return fn


# Dropless and aligned, cut within a group, cut to a single row, fewer rows than tokens of a rank.
@pytest.mark.parametrize(("capacity", "alignment"), [(None, 4), (8, 4), (1, 1), (20, 1)])
def test_xla_exchange_matches_oracle(capacity, alignment, mesh, rng, subtests):
    options = {"capacity": capacity, "alignment": alignment}
    call = compiled(round_trip(BASE, **options), mesh)
    for routing in ROUTINGS:
        with subtests.test(routing):
            ids = ROUTINGS[routing](rng, mesh.size, BASE)
            lay = oracle.layout(ids, BASE.num_experts, **options)
            x = reals(rng, mesh.size, BASE.num_tokens, BASE.hidden, dtype=BF16)
            y = integers(rng, *lay.source.shape, BASE.hidden, dtype=BF16)
            y[lay.is_padding] = np.nan
            rows, sums = call(x, ids, y)
            assert_same_bits(rows, oracle.gather(x, lay), "rows")
            np.testing.assert_array_equal(sums.astype(np.float64), oracle.combine(y, lay), "sums")


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("wire", [None, jnp.float8_e4m3fn], ids=["as they are", "fp8"])
def test_xla_exchange_matches_gathered(dtype, wire, mesh, rng, monkeypatch):
    """Sums have one order: over the rows of a rank, rounded for sending, then over ranks.

    XLA may fuse the multiplications by scales with these sums, differently in each program, and skip a rounding.
    """
    ids = ROUTINGS["duplicates"](rng, mesh.size, WIDE)
    lay = oracle.layout(ids, WIDE.num_experts)
    x = reals(rng, mesh.size, WIDE.num_tokens, WIDE.hidden, dtype=dtype)
    y = reals(rng, *lay.source.shape, WIDE.hidden, dtype=dtype)
    (rows, sums), (rows_wanted, sums_wanted) = both_ways(monkeypatch, round_trip(WIDE, wire), mesh, x, ids, y)
    assert_same_bits(rows, rows_wanted, "rows")
    if wire is None:
        np.testing.assert_array_equal(sums, sums_wanted)
    else:
        assert_close(sums, sums_wanted, "sums")


@pytest.mark.parametrize("routing", FEW_ROUTINGS)
def test_xla_exchange_quantized_pairs(routing, mesh, rng):
    """Any bits of any dtype and shape are preserved."""

    def fn(values, scales, ids):
        kwargs = {"num_experts": WIDE.num_experts, "implementation": "xla"}
        return jax_ep.dispatch((values, scales), ids, **kwargs).tokens

    ids = ROUTINGS[routing](rng, mesh.size, WIDE)
    lay = oracle.layout(ids, WIDE.num_experts)
    values = rng.integers(0, 256, (mesh.size, WIDE.num_tokens, 256), np.uint8).view(oracle.FP8)
    scales = rng.integers(0, 2**32, (mesh.size, WIDE.num_tokens, 2), np.uint32).view(F32)
    got = compiled(fn, mesh)(values, scales, ids)
    assert_same_bits(got[0], oracle.gather(values, lay), "values")
    assert_same_bits(got[1], oracle.gather(scales, lay), "scales")


def layer(x, weights, gate_up, down, ids):
    """`moe` recomputed in the backward pass, and its gradients."""

    @jax.checkpoint
    def call(x, weights, gate_up, down):
        return jax_ep.moe(x, ids, weights, gate_up, down, num_experts=BASE.num_experts, implementation="xla")

    out, pull = jax.vjp(call, x, weights, gate_up, down)
    return out, *pull(jnp.cos(out))


def layer_arguments(rng, num_ranks, batch=()):
    ids = np.stack([ROUTINGS["zipf"](rng, num_ranks, BASE) for _ in range(int(np.prod(batch)))], 1)
    ids = ids.reshape(num_ranks, *batch, *ids.shape[2:])
    local = BASE.num_experts // num_ranks
    gate_up = reals(rng, num_ranks, local, BASE.hidden, 2 * BASE.intermediate)
    down = reals(rng, num_ranks, local, BASE.intermediate, BASE.hidden)
    return reals(rng, *ids.shape[:-1], BASE.hidden), probabilities(rng, *ids.shape), gate_up, down, ids


@pytest.mark.parametrize("check_vma", [True, False])
def test_xla_exchange_layer_and_gradients(check_vma, mesh, rng, monkeypatch):
    arguments = layer_arguments(rng, mesh.size)
    for got, wanted in zip(*both_ways(monkeypatch, layer, mesh, *arguments, check_vma=check_vma), strict=True):
        assert_close(got, wanted, "result or gradient")


@pytest.mark.parametrize("batch", [(2,), (2, 2)], ids=["vmap", "vmap of vmap"])
def test_xla_exchange_vmap(batch, expert_mesh, rng, monkeypatch):
    """Batched problems have their own numbers of rounds."""
    fn = layer
    for _ in batch:
        fn = jax.vmap(fn, in_axes=(0, 0, None, None, 0))
    arguments = layer_arguments(rng, 2, batch)
    for got, wanted in zip(*both_ways(monkeypatch, fn, expert_mesh(2), *arguments), strict=True):
        assert_close(got, wanted, "result or gradient")


@pytest.mark.parametrize("axes", [("expert",), ("data", "expert")], ids=len)
def test_xla_exchange_subgroups(axes, rng):
    """Experts over some axes of a mesh, or over several."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    num_ranks = 2 * len(axes)

    def fn(x, ids):
        kwargs = {"num_experts": BASE.num_experts, "implementation": "xla", "axis_name": axes}
        sent = jax_ep.dispatch(x, ids, **kwargs)
        return sent.tokens, jax_ep.combine(sent.tokens, sent.handle, axis_name=axes, implementation="xla")

    ids = np.stack([ROUTINGS["uniform"](rng, num_ranks, BASE) for _ in range(4 // num_ranks)])
    x = integers(rng, *ids.shape[:-1], BASE.hidden)
    stacked = [a.reshape(2, 2, *a.shape[2:]) for a in (x, ids)]
    rows, sums = (a.reshape(*ids.shape[:2], *a.shape[2:]) for a in compiled(fn, mesh)(*stacked))
    for group in range(len(ids)):
        lay = oracle.layout(ids[group], BASE.num_experts)
        assert_same_bits(rows[group], oracle.gather(x[group], lay), "rows")
        np.testing.assert_array_equal(sums[group], oracle.combine(oracle.gather(x[group], lay), lay), "sums")


# ---- What is chosen, and what it costs -----------------------------------------------------------------------------


def test_xla_exchange_segments_threshold(monkeypatch):
    """If most tokens go to most ranks, all tokens go to all ranks, unless they exceed the rows."""
    monkeypatch.undo()

    def pays(num_ranks, top_k, capacity=1 << 30):
        return exchange.segments_pay(Layout(num_ranks, 256, 4096, top_k, capacity))

    assert not pays(4, 8) and not pays(8, 8) and not pays(28, 8)  # 90, 66 and 25.3 percent of the bytes of "to all".
    assert pays(29, 8) and pays(64, 8) and pays(8, 2)  # 24.5, 12 and 23 percent.
    assert pays(9, 8, 8 * 4096) and not pays(8, 8, 8 * 4096)


def programs(num_ranks, shape, capacity, mesh, *, plan):
    """Compile dispatch, which creates its handle if `plan`, and combine."""
    options = {"num_experts": shape.num_experts, "implementation": "xla", "capacity": capacity}
    x = jax.ShapeDtypeStruct((num_ranks, shape.num_tokens, shape.hidden), F32)
    y = jax.ShapeDtypeStruct((num_ranks, capacity, shape.hidden), F32)
    ids = jax.ShapeDtypeStruct((num_ranks, shape.num_tokens, shape.top_k), np.int32)
    handle = jax.eval_shape(per_rank(lambda x, i: jax_ep.dispatch(x, i, **options).handle, mesh), x, ids)
    by_ids = (lambda x, i: jax_ep.dispatch(x, i, **options).tokens, (x, ids))
    by_handle = (lambda x, h: jax_ep.dispatch(x, None, handle=h, **options).tokens, (x, handle))
    combine = (lambda y, h: jax_ep.combine(y, h, implementation="xla"), (y, handle))
    calls = {"dispatch": by_ids if plan else by_handle, "combine": combine}
    return {name: jax.jit(per_rank(fn, mesh)).lower(*args).compile() for name, (fn, args) in calls.items()}


def test_xla_exchange_memory_independent_of_ranks(expert_mesh):
    """Temporary memory at the capacity of a balanced load is 1.25 times the rows; gathering takes at least 4 times."""
    shape = Shape(num_tokens=512, top_k=2, num_experts=8, hidden=1024)
    capacity = shape.num_tokens * shape.top_k
    row_bytes = capacity * shape.hidden * 4
    found = {}
    for num_ranks in (2, 4, 8):
        for name, program in programs(num_ranks, shape, capacity, expert_mesh(num_ranks), plan=True).items():
            found.setdefault(name, []).append(program.memory_analysis().temp_size_in_bytes)
    for name, of_ranks in found.items():
        assert max(of_ranks) < 1.5 * row_bytes, name
        numbers = 32 * (8 - 2) * capacity  # Per assignment of all ranks, to find its row.
        assert of_ranks[2] <= of_ranks[0] + numbers, (name, of_ranks)


def test_xla_exchange_tokens_minimal(expert_mesh, rng, monkeypatch):
    """Each token is sent once to each rank with one of its experts, and back, without empty sums."""
    shape, sizes = Shape(num_tokens=20, top_k=3, num_experts=16, hidden=12), []
    record_sizes(monkeypatch, lambda _, rank, sent: sizes.append((int(rank), sent.tolist())))
    ids = ROUTINGS["duplicates"](rng, 4, shape)
    x, y = reals(rng, 4, 20, 12), reals(rng, 4, 240, 12)
    compiled(round_trip(shape), expert_mesh(4))(x, ids, y)
    jax.effects_barrier()
    least = tokens_between(ids, shape.num_experts)
    there_and_back = [*enumerate(least.tolist()), *enumerate(least.T.tolist())]
    assert sorted(sizes) == sorted(there_and_back)
