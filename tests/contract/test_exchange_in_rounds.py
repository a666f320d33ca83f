"""The exchange of `xla` for large arrays, in rounds: the tests of dispatch and combine, fewer bytes, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dispatch_combine import (  # noqa: F401
    test_dispatch_combine_capacity_and_alignment,
    test_dispatch_combine_dtypes,
    test_dispatch_combine_fp8_wire,
    test_dispatch_combine_handle_reuse,
    test_dispatch_combine_routings,
    test_dispatch_combine_shapes,
    test_dispatch_quantized_tokens_bit_for_bit,
)
from test_subgroups import test_subgroups_group_over_two_axes  # noqa: F401
from test_transforms import test_transforms_vmap_handles  # noqa: F401

import jax_ep
import oracle
from cases import BF16, F16, F32, Shape, assert_close, assert_same_bits, reals
from harness import compiled, per_rank
from jax_ep.types import Layout
from jax_ep.xla import exchange
from portable_ways import both_ways, record_sizes, take, tokens_between
from routings import ROUTINGS

IMPLEMENTATIONS = ("xla",)
WIDE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=256)


@pytest.fixture(autouse=True)
def in_rounds(monkeypatch):
    take("rounds", monkeypatch)


def round_trip(shape, wire=None):
    """Return rows, and sums of other rows, `[W, ...]` of each."""

    def fn(x, ids, y):
        schedule = {"implementation": "xla", "schedule": jax_ep.Schedule(wire_dtype=wire)}
        sent = jax_ep.dispatch(x, ids, num_experts=shape.num_experts, **schedule)
        return sent.tokens, jax_ep.combine(y, sent.handle, **schedule)

    return fn


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("wire", [None, jnp.float8_e4m3fn], ids=["as they are", "fp8"])
def test_exchange_in_rounds_matches_gathered(dtype, wire, mesh, rng, monkeypatch):
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


def test_exchange_in_rounds_segments_threshold(monkeypatch):
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


def test_exchange_in_rounds_memory_independent_of_ranks(expert_mesh):
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


def test_exchange_in_rounds_tokens_minimal(expert_mesh, rng, monkeypatch):
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
