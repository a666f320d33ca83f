"""The plan kernel: every field of the handle matches `layout.make_handle` bit for bit, and the ep_group."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import harness
import jax_ep
from jax_ep import context
from jax_ep.core import layout as rows
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.megakernels import exchange, launch
from jax_ep.types import Handle, Layout, Options

FIELDS = ("row_to_assignment", "assignment_to_row", "group_sizes", "topk_idx", "num_invalid", "num_dropped")
HOSTILE = np.array([-(2**31), 2**31 - 1, -2, -1, 2**30, -(2**30)], np.int32)
EXPERT = harness.EXPERT
ALSO_ON_GPUS = True
TRANSPORT = "shared_memory" if jax.default_backend() == "cpu" else None


@pytest.fixture
def heaps(kept_context):
    """A context whose mesh, of four devices, is known to programs on four ranks; other programs compute their group."""
    kept_context(harness.make_mesh((4,), (EXPERT,)))


def planner(layout):
    """Return the fields of the handles of all ranks."""
    mesh = harness.make_mesh((layout.num_ranks,), (EXPERT,))

    def fn(ids):
        handle = exchange.plan(Options("dispatch", (EXPERT,)), ids, layout)
        assert isinstance(handle, Handle)
        return tuple(getattr(handle, name) for name in FIELDS)

    return harness.compiled(fn, mesh)


def check(layout, ids, call):
    got = call(ids)
    for rank in range(layout.num_ranks):
        num_invalid = rows.count_invalid(jnp.asarray(ids[rank]), layout.num_experts)
        want = rows.make_handle(jnp.asarray(ids), rank, num_invalid, layout)
        for name, field in zip(FIELDS, got, strict=True):
            expected = np.asarray(getattr(want, name))
            assert (field[rank].dtype, field[rank].shape) == (expected.dtype, expected.shape), name
            np.testing.assert_array_equal(field[rank], expected, f"{name} of rank {rank}, {layout}")


def check_routings(rng, layout):
    call = planner(layout)
    for ids in routings(rng, layout).values():
        check(layout, ids, call)


def routings(rng, layout):
    """Draw ids `[W, T, K]`, from arbitrary 32-bit values to a single expert."""
    shape = (layout.num_ranks, layout.num_tokens, layout.top_k)
    uniform = rng.integers(0, layout.num_experts, shape, dtype=np.int32)
    last = np.full(shape, layout.num_experts - 1, np.int32)
    near = np.concatenate([HOSTILE, [layout.num_experts, layout.num_experts + 1]]).astype(np.int32)
    mixed = np.where(rng.random(shape) < 0.5, rng.choice(near, shape), uniform)
    return {"one expert": last, "hostile": mixed}


def random_layout(rng, num_ranks):
    """Draw odd sizes, and a capacity that is sufficient, too small, or far too large."""
    experts, tokens, top_k = num_ranks * int(rng.integers(1, 20)), int(rng.integers(1, 100)), int(rng.integers(1, 8))
    alignment = int(rng.choice([1, 1, 3, 16]))
    sizes = Layout(num_ranks, experts, tokens, top_k, 0, alignment)
    enough = rows.dropless_capacity(sizes.num_slots, sizes.num_local_experts, alignment)
    capacity = int(rng.choice([enough, rows.round_up(max(1, enough // 7), alignment), alignment, 2 * enough]))
    return Layout(num_ranks, experts, tokens, top_k, capacity, alignment)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_plan_kernel_random_layouts_and_invalid_ids(heaps, rng, num_ranks):
    for _ in range(2):
        check_routings(rng, random_layout(rng, num_ranks))


LAYOUTS = {
    "one slot": Layout(4, 4, 1, 1, 4),
    "one expert per rank, K=3": Layout(2, 2, 50, 3, 300),
    "many experts": Layout(2, 2 * 300, 40, 5, 4096, 8),
    "most experts": Layout(1, 1024, 60, 3, 180),
    "too many experts, sorted": Layout(2, 2 * 1025, 30, 3, 180),
    "one row": Layout(4, 8, 33, 4, 1),
    "huge alignment": Layout(2, 4, 9, 2, 1 << 12, 1 << 11),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_plan_kernel_edge_sizes(heaps, rng, name):
    check_routings(rng, LAYOUTS[name])


@pytest.mark.parametrize(
    "blocks",
    [
        {"tile": {"block": 256, "blocks_at_once": 2}, "source_blocks": 16, "fill_rows": 2048},
        {"tile": {"block": 2048, "blocks_at_once": 1}, "source_blocks": 2, "fill_rows": 1024},
    ],
    ids=["many blocks", "long blocks"],
)
def test_plan_kernel_blocks_of_many_parts(heaps, rng, monkeypatch, blocks):
    """The tiles of large all-to-alls, at sizes that an interpreter can handle."""
    layout = Layout(2, 12, 300, 7, 4000, 4)
    config, chosen = exchange.plan_config(layout)
    sizes = dataclasses.replace(chosen, **blocks | {"tile": dataclasses.replace(chosen.tile, **blocks["tile"])})
    monkeypatch.setattr(exchange, "plan_config", lambda layout: (config, sizes))
    check_routings(rng, layout)


def test_plan_kernel_tiles_cover_layouts():
    for layout in (*LAYOUTS.values(), Layout(63, 63, 1 << 18, 8, 1 << 27), Layout(4, 256, 32768, 8, 1 << 20)):
        _, sizes = exchange.plan_config(layout)
        source_blocks = -(-layout.num_tokens * layout.top_k // sizes.tile.block)
        assert layout.num_ranks * source_blocks <= 256
        assert source_blocks <= sizes.source_blocks
        assert layout.num_local_experts <= sizes.tile.bins
        assert sizes.tile.block % sizes.tile.lanes == 0


def test_plan_kernel_ignores_heap_content(heaps, rng):
    layout = Layout(4, 12, 100, 3, 400, 2)
    call, other = planner(layout), planner(Layout(4, 12, 120, 5, 2400))
    ids = routings(rng, layout)["hostile"]
    first = call(ids)
    for _ in range(2):
        other(rng.integers(0, 12, (4, 120, 5), dtype=np.int32))
        for a, b in zip(first, call(ids), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", [("expert",), ("data", "expert"), ("b", "data"), ("b",)], ids="-".join)
def test_plan_kernel_given_mesh_without_exchange(no_context, monkeypatch, axis, check_vma):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, {jax.device_count()} present")
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "expert", "b"))
    jax_ep.init(mesh, transport=TRANSPORT)
    context.reserve("test", 1)
    types = []

    def fn(x):
        group = launch.group_on(axis, varying_axes(x))
        types.append(jax.typeof(group))
        return group[None, None, None]

    def run():
        spec = P("data", "expert", "b")
        program = jax.jit(jax.shard_map(lambda x: fn(x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))
        x = np.zeros((2, 2, 2), np.float32)
        return np.asarray(program(x)), "all_gather" in program.lower(x).as_text()

    known, exchanged = run()
    assert not exchanged
    monkeypatch.setattr(context, "given_mesh", lambda: None)
    asked, exchanged = run()
    assert exchanged
    np.testing.assert_array_equal(known, asked)
    assert len(set(types)) == 1, "typed as varying over other axes"


def test_plan_kernel_replicated_results(no_context):
    """Their groups differ over the axis: only an all-to-all gives one with the right type."""
    mesh = harness.make_mesh((2, 2), ("data", EXPERT))
    jax_ep.init(mesh, transport=TRANSPORT)
    layout = Layout(2, 4, 3, 2, 12)
    ids = np.arange(12, dtype=np.int32).reshape(6, 2) % 4

    def fn(ids):
        return exchange.plan(Options("dispatch", (EXPERT,)), ids, layout).row_to_assignment[None]

    row_to_assignment = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(EXPERT), out_specs=P(EXPERT)))(ids)
    want = [
        rows.make_handle(jnp.asarray(ids.reshape(2, 3, 2)), r, jnp.int32(0), layout).row_to_assignment for r in range(2)
    ]
    np.testing.assert_array_equal(np.asarray(row_to_assignment), np.stack(want))


def received(heap):
    """Return the data areas of two ranks, or nothing if this process cannot access them."""
    if TRANSPORT is None:
        return np.empty(0)
    return np.stack([heap._memory.pool.heap(n, heap.data.allocation)[heap.layout.data :] for n in range(2)])


def test_plan_kernel_other_mesh_fails(no_context):
    first, second = harness.make_mesh((2,), (EXPERT,)).devices
    jax_ep.init(Mesh([first, second], (EXPERT,)), transport=TRANSPORT, timeout_s=harness.PATIENCE_S)
    layout = Layout(2, 4, 3, 2, 12)
    ids = np.arange(12, dtype=np.int32).reshape(6, 2) % 4

    def fn(ids):
        handle = exchange.plan(Options("dispatch", (EXPERT,)), ids, layout)
        return handle.row_to_assignment, handle.assignment_to_row

    def run(devices):
        mesh = Mesh(devices, (EXPERT,))
        program = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(EXPERT), out_specs=P(EXPERT)))
        return [np.asarray(x) for x in program(ids)]

    right = run([first, second])
    heap = context.heap("test")
    data = received(heap)
    wrong = ()
    # On GPUs a later part of this program, or the check of a later call, reports it; no other error may occur.
    wrong_mesh = pytest.raises(jax.errors.JaxRuntimeError, match="is another device in dispatch")
    with contextlib.suppress(jax.errors.JaxRuntimeError) if TRANSPORT is None else wrong_mesh:
        wrong = run([second, first])
    assert "rank 1 is another device in dispatch than in the mesh given" in heap.failure()
    assert "expected device 1, got device 0" in heap.failure()
    np.testing.assert_array_equal(received(heap), data)
    for array, size in zip(wrong, (layout.capacity, layout.num_slots), strict=False):
        assert array.min() >= -1
        assert array.max() < size
    with pytest.raises(Exception, match="is another device"):
        run([first, second])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"mesh given to jax_ep.init.*call finalize\(\)"):
        context.heap("test")
    jax_ep.finalize()
    jax_ep.init(Mesh([second, first], (EXPERT,)), transport=TRANSPORT)
    for got, want in zip(run([second, first]), right, strict=True):
        np.testing.assert_array_equal(got, want)
