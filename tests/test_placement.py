"""Placement: plans keep their guarantees, and a layer with copies equals the layer without, including gradients."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.placement
from cases import BASE, F32, integers, reals
from harness import make_mesh, run
from jax_ep.core import relayout
from jax_ep.placement import Placement, move, plan
from layers import Layer, check_gradients, with_gradients
from stored_experts import dense, quantized

RANKS = (1, 2, 4)


def random_loads(rng, *shape):
    """Draw loads from nearly equal to concentrated on a few experts; some are zero."""
    loads = rng.random(shape) ** rng.integers(0, 12) * 1000
    return np.where(rng.random(shape) < 0.1, 0, np.floor(loads))


def random_placement(rng, num_ranks, *, extra=4):
    """Draw any valid placement, not only those of `plan`: copies may share a rank."""
    slots = np.concatenate([np.arange(8), rng.integers(0, 8, extra)])
    return Placement(rng.permutation(slots), 8, num_ranks)


def copies_of(placement):
    return [set(np.flatnonzero(placement.physical_to_logical == e).tolist()) for e in range(placement.num_experts)]


@pytest.mark.parametrize("kind", ["idle", "one busy", "ties", "skewed", "huge"])
def test_placement_copies_on_different_ranks(kind, rng):
    for _ in range(60):
        num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        num_slots = num_ranks * (-(-num_experts // num_ranks) + int(rng.integers(0, 4)))
        loads = {
            "idle": np.zeros(num_experts),
            "one busy": np.where(np.arange(num_experts) == rng.integers(num_experts), 1e9, 0),
            "ties": rng.integers(0, 3, num_experts),
            "skewed": random_loads(rng, num_experts),
            "huge": rng.random(num_experts) * np.finfo(np.float64).max,
        }[kind]
        placement = plan(loads, num_slots=num_slots, num_ranks=num_ranks)
        for expert in range(num_experts):
            on_ranks = (placement.physical_to_logical.reshape(num_ranks, -1) == expert).sum(axis=1)
            assert on_ranks.max() == 1 or placement.num_copies[expert] > num_ranks, (loads, placement)


def test_placement_plan_random_loads(rng):
    for _ in range(200):
        num_nodes, num_groups = int(rng.choice([1, 2])), int(rng.choice([1, 2, 4]))
        num_ranks = num_nodes * int(rng.choice([1, 2, 4]))
        num_experts = num_groups * int(rng.integers(1, 9))
        num_slots = num_ranks * int(rng.integers(-(-num_experts // num_ranks), 2 * num_experts))
        if num_groups > 1 and num_groups % num_nodes:
            continue
        loads = random_loads(rng, num_experts)
        sizes = {"num_slots": num_slots, "num_ranks": num_ranks, "num_nodes": num_nodes, "num_groups": num_groups}
        placement = plan(loads, **sizes)
        held = placement.physical_to_logical.reshape(num_ranks, -1)
        assert set(held.reshape(-1).tolist()) == set(range(num_experts)), "an expert has no slot"
        assert placement.num_copies.tolist() == [len(found) for found in copies_of(placement)]
        rank_loads = placement.rank_loads(loads)
        assert rank_loads.sum() == pytest.approx(loads.sum())
        heaviest = (loads / placement.num_copies).max(initial=0)
        if num_groups == 1:
            assert rank_loads.max() <= rank_loads.mean() + heaviest * (1 + 1e-9)
        else:
            node_of_rank = np.arange(num_ranks) // (num_ranks // num_nodes)
            groups = [np.unique(held[node_of_rank == node] // (num_experts // num_groups)) for node in range(num_nodes)]
            assert sorted(np.concatenate(groups).tolist()) == list(range(num_groups)), "copies of a group on two nodes"
            for node in range(num_nodes):
                on_node = rank_loads[node_of_rank == node]
                assert on_node.max() <= on_node.mean() + heaviest * (1 + 1e-9)


def test_placement_plan_splits_busiest_expert(rng):
    """An expert with half of all load gets as many copies as it needs, each on another rank."""
    loads = np.ones(16)
    loads[5] = 16
    placement = plan(loads, num_slots=24, num_ranks=8)
    ranks = [slot // 3 for slot in copies_of(placement)[5]]
    assert len(ranks) == len(set(ranks)) == 8
    contiguous = Placement(np.arange(16), 16, 8)
    assert contiguous.rank_loads(loads).max() == 17
    assert placement.rank_loads(loads).max() <= 4


def test_placement_plan_more_slots_than_ranks():
    """Then copies must share ranks, as few as possible."""
    placement = plan([3, 1], num_slots=12, num_ranks=2)
    assert placement.num_copies.tolist() == [9, 3]
    assert placement.rank_loads([3, 1]).tolist() == pytest.approx([2, 2])
    assert plan(np.zeros(4), num_slots=8, num_ranks=2).num_copies.tolist() == [2, 2, 2, 2]


def test_placement_plan_per_layer(rng):
    loads = random_loads(rng, 3, 16)
    together = plan(loads, num_slots=20, num_ranks=4)
    for layer in range(3):
        alone = plan(loads[layer], num_slots=20, num_ranks=4)
        assert (together[layer].physical_to_logical == alone.physical_to_logical).all()
        assert (together[layer].logical_to_physical == alone.logical_to_physical).all()
        assert (together.rank_loads(loads)[layer] == alone.rank_loads(loads[layer])).all()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_placement_remap(num_ranks, expert_mesh, rng):
    """Copies have equal shares of their expert's tokens, and ranks begin with different ones."""
    placement = random_placement(rng, num_ranks)
    ids = rng.integers(-2, 10, (num_ranks, 24, 3)).astype(np.int32)
    got = run(placement.remap, expert_mesh(num_ranks), ids)
    known = (ids >= 0) & (ids < 8)
    assert (placement.physical_to_logical[got[known]] == ids[known]).all()
    assert (got[ids < 0] == ids[ids < 0]).all() and (got[ids >= 8] == 12).all()
    for rank, token, k in np.argwhere(known):
        copies = sorted(copies_of(placement)[ids[rank, token, k]])
        assert got[rank, token, k] == copies[(token + rank) % len(copies)]


def test_placement_prefers_own_node(expert_mesh, rng):
    placement = Placement([0, 1, 0, 0, 2, 3, 0, 1], 4, 4, num_nodes=2)
    ids = rng.integers(-1, 4, (4, 12, 2)).astype(np.int32)
    got = run(lambda ids: placement.remap(ids, prefer_own_node=True), expert_mesh(4), ids)
    for rank, token, k in np.argwhere(ids >= 0):
        copies = sorted(copies_of(placement)[ids[rank, token, k]])
        near = [slot for slot in copies if slot // 4 == rank // 2] or copies
        assert got[rank, token, k] == near[(token + rank) % len(near)]


def test_placement_change_does_not_recompile(rng):
    remap = jax.jit(lambda placement, ids: placement.remap(ids, axis_name=()))
    ids = rng.integers(0, 8, (5, 2)).astype(np.int32)
    for _ in range(3):
        placement = plan(random_loads(rng, 8), num_slots=12, num_ranks=4)
        assert (placement.physical_to_logical[remap(placement, ids)] == ids).all()
    assert remap._cache_size() == 1


def test_placement_equality():
    one, two = (plan([3, 1, 2, 4], num_slots=8, num_ranks=4) for _ in range(2))
    assert one == two == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == jax.jit(lambda p: p)(one)
    assert hash(one) == hash(two) and one != "placement"
    others = (
        plan([9, 1, 2, 4], num_slots=8, num_ranks=4),
        Placement(one.physical_to_logical, 4, 2),
        plan([[1.0]], num_slots=1, num_ranks=1),
    )
    assert one not in others and len({one, two, *others}) == 4
    with pytest.raises(TypeError, match=r"traced.* close over it"):
        jax.jit(lambda p: p == one)(two)


def test_placement_scan_over_layers(rng):
    placements = plan(random_loads(rng, 3, 8), num_slots=12, num_ranks=4)
    ids, w = rng.integers(0, 8, (3, 5, 2)).astype(np.int32), integers(rng, 3, 8, 4)

    def layer(carry, inputs):
        placement, ids, w = inputs
        return carry, (placement.remap(ids, axis_name=()), placement.expand(w, axis_name=()))

    slots, expanded = jax.jit(lambda *inputs: jax.lax.scan(layer, None, inputs)[1])(placements, ids, w)
    for i in range(3):
        assert (placements[i].physical_to_logical[slots[i]] == ids[i]).all()
        assert (expanded[i] == w[i][placements[i].physical_to_logical]).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.slow(unless={"kind": [AxisType.Explicit]})
def test_placement_expand_and_gradient(num_ranks, kind, rng):
    """With integers, whose sums are exact; on one axis of ranks or two, as global arrays."""
    sizes, names = ((2, 2), ("node", "expert")) if num_ranks == 4 else ((num_ranks,), ("expert",))
    of_mesh = names[::-1] if kind == AxisType.Explicit else names  # Ranks may be in another order than the mesh's.
    mesh, placement = make_mesh(sizes, of_mesh, kind), random_placement(rng, num_ranks)
    spec = P(names)
    tree = {"w": integers(rng, 8, 3, 2), "b": (integers(rng, 8).astype(jnp.bfloat16),)}
    tree = jax.device_put(tree, jax.NamedSharding(mesh, spec))

    def shard(fn):
        return jax.shard_map(lambda t: fn(t, axis_name=names), mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def both(tree, weights):
        expanded, transpose = jax.vjp(shard(placement.expand), tree)
        return expanded, transpose(weights), jax.vjp(shard(placement.sum_copies), weights)[1](tree)[0]

    weights = jax.tree.map(lambda leaf: integers(rng, 12, *leaf.shape[1:]).astype(leaf.dtype), tree)
    weights = jax.device_put(weights, jax.NamedSharding(mesh, spec))
    expanded, (gradient,), again = both(tree, weights)
    for path, leaf in jax.tree.leaves_with_path(tree):
        value = lambda t: dict(jax.tree.leaves_with_path(t))[path]  # noqa: B023, E731
        assert (np.asarray(value(expanded)) == np.asarray(leaf)[placement.physical_to_logical]).all()
        assert (np.asarray(value(again)) == np.asarray(leaf)[placement.physical_to_logical]).all()
        want = np.zeros(leaf.shape)
        np.add.at(want, placement.physical_to_logical, np.asarray(value(weights), np.float64))
        assert value(gradient).dtype == leaf.dtype
        assert (np.asarray(value(gradient), np.float64) == want).all()


def test_placement_rows_sent_once(expert_mesh, rng):
    mesh, placement = expert_mesh(4), plan(random_loads(rng, 16), num_slots=24, num_ranks=4)
    source = placement.physical_to_logical // 4
    target = np.arange(24) // 6
    pairs = np.array([(s, t) for s, t in zip(source, target, strict=True) if s != t])
    busiest = max(np.bincount(side).max() for side in pairs.T)
    expand = jax.shard_map(placement.expand, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    text = jax.jit(expand).lower(jax.ShapeDtypeStruct((16, 7, 3), F32)).as_text()
    found = re.findall(r"(?<=stablehlo\.)(collective_permute|all_\w+|reduce_scatter)", text)
    assert found == ["collective_permute"] * busiest
    sent = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])> : tensor<(\d+)x2", text)
    assert sum(int(number) for _, number in sent) == len(pairs)


def test_placement_quantized_experts(expert_mesh, rng):
    placement, mesh = random_placement(rng, 4), expert_mesh(4)
    expand = jax.jit(jax.shard_map(placement.expand, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    w = reals(rng, 8, 128, 128)
    for expert_format in ("fp8", "int4"):
        experts = quantized(w, format=expert_format)
        got, want = (np.asarray(dense(e, dtype=jnp.float32)) for e in (expand(experts), experts))
        assert (got == want[placement.physical_to_logical]).all(), expert_format


@pytest.mark.parametrize("num_ranks", RANKS)
def test_placement_move(num_ranks, expert_mesh, rng):
    mesh = expert_mesh(num_ranks)
    old, new = random_placement(rng, num_ranks), random_placement(rng, num_ranks, extra=8)
    w = {"mu": integers(rng, 8, 3), "count": rng.integers(0, 9, 8).astype(np.int32)}
    stored = jax.tree.map(lambda leaf: leaf[old.physical_to_logical], w)
    spec = P("expert")
    moved = jax.jit(jax.shard_map(lambda t: move(t, old, new), mesh=mesh, in_specs=spec, out_specs=spec))(stored)
    whole = move(stored, old, new, axis_name=())
    for name, leaf in w.items():
        assert (moved[name] == leaf[new.physical_to_logical]).all()
        assert (whole[name] == leaf[new.physical_to_logical]).all()


def test_placement_local_rows_not_sent(expert_mesh, rng):
    """An unchanged placement sends nothing, and a row comes from its own node if there is a copy."""
    old = plan(random_loads(rng, 8), num_slots=12, num_ranks=4)
    program = jax.shard_map(
        lambda w: move(w, old, old), mesh=expert_mesh(4), in_specs=P("expert"), out_specs=P("expert")
    )
    assert "collective_permute" not in jax.jit(program).lower(jax.ShapeDtypeStruct((12, 3), F32)).as_text()
    old = Placement([0, 1, 2, 3, 0, 1, 2, 3], 4, 4, num_nodes=2)
    new = Placement([2, 3, 0, 1, 2, 3, 0, 1], 4, 4, num_nodes=2)
    sources = jax_ep.placement._nearest(old, new)
    assert (sources // 4 == np.arange(8) // 4).all()


def test_relayout_edge_coloring(rng):
    for _ in range(30):
        num_ranks = int(rng.integers(2, 20))
        edges = [(int(a), int(b)) for a, b in rng.integers(0, num_ranks, (int(rng.integers(1, 120)), 2))]
        colors = relayout.color(edges, num_ranks)
        assert max(colors) + 1 == max(np.bincount(side).max() for side in np.array(edges).T)
        for side in (0, 1):
            assert len({(edge[side], found) for edge, found in zip(edges, colors, strict=True)}) == len(edges)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_placement_layer_with_copies(num_ranks, expert_mesh, rng):
    """The layer equals the oracle of the layer without copies: its result, and every gradient."""
    layer = Layer(rng, "zipf", num_ranks, BASE)
    loads = np.bincount(layer.topk_idx[layer.topk_idx >= 0].reshape(-1), minlength=BASE.num_experts)
    placement = plan(loads, num_slots=12, num_ranks=num_ranks)
    assert placement.num_copies.max() > 1 or num_ranks == 1
    cotangent = reals(rng, *layer.x.shape)

    def moe(x, ids, weights, *matrices):
        slots, held = placement.remap(ids), placement.expand(matrices)
        return jax_ep.moe(x, slots, weights, *held, num_experts=placement.num_slots, implementation="xla")

    got = run(with_gradients(moe), expert_mesh(num_ranks), *layer.args, cotangent)
    check_gradients(got, layer, cotangent)


def test_placement_rows_match_plan(rng):
    """For even shares, `dispatch` with a remapped routing gives ranks the loads of `rank_loads`."""
    ids = np.where(rng.random((4, 24, 1)) < 0.5, 0, rng.integers(0, 8, (4, 24, 1))).astype(np.int32)
    ids = np.repeat(ids, 24, axis=1)  # Each choice at all positions: shares of 2, 3 and 4 copies are even.
    placement = plan(np.bincount(ids.reshape(-1), minlength=8), num_slots=16, num_ranks=4)
    x = np.ones((4, ids.shape[1], 2), F32)

    def rows(x, ids):
        axes = ("a", "b")
        slots = placement.remap(ids, axis_name=axes)
        return jax_ep.dispatch(x, slots, num_experts=16, axis_name=axes, implementation="xla").group_sizes.sum()

    got = run(rows, make_mesh((2, 2), ("a", "b")), *(a.reshape(2, 2, *a.shape[1:]) for a in (x, ids)))
    assert got.reshape(-1).tolist() == placement.rank_loads(np.bincount(ids.reshape(-1), minlength=8)).tolist()


THREE = Placement([0, 1, 0, 2], 3, 2)
IDS = np.zeros((2, 1), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "fragments"),
    [
        (lambda: Placement([0, 1, 3], 3, 1), ValueError, ("has 3", "[0, 3)", "num_experts")),
        (lambda: Placement([0, 1, 0], 3, 1), ValueError, ("no slot for expert 2", "add one")),
        (lambda: Placement([0, 1, 2], 3, 2), ValueError, ("num_slots is 3", "multiple of 2, num_ranks")),
        (lambda: Placement([0, 1, 2], 3, 3, 2), ValueError, ("num_ranks is 3", "multiple of 2, num_nodes")),
        (lambda: Placement([0.0, 1.0], 2, 1), TypeError, ("float64", "integers")),
        (lambda: Placement([[[0, 1]]], 2, 1), ValueError, ("(1, 1, 2)", "[layers, P]")),
        (lambda: plan([1, 2, 3, 4], num_slots=2, num_ranks=2), ValueError, ("2 slots for 4 experts", "at least")),
        (lambda: plan([1, -2], num_slots=2, num_ranks=2), ValueError, ("-2", "finite numbers from 0")),
        (lambda: plan([1, np.nan], num_slots=2, num_ranks=2), ValueError, ("nan", "finite")),
        (lambda: plan(["a"], num_slots=2, num_ranks=2), TypeError, ("<U1", "real numbers")),
        (lambda: plan([[1], [2, 3]], num_slots=4, num_ranks=2), TypeError, ("plan: loads is a list", "an array")),
        (lambda: plan(3.0, num_slots=2, num_ranks=2), ValueError, ("()", "[layers, E]")),
        (
            lambda: plan(np.ones(6), num_slots=8, num_ranks=4, num_nodes=2, num_groups=3),
            ValueError,
            ("num_groups=3", "multiple of num_nodes=2", "leave it out"),
        ),
        (lambda: plan(np.ones(4), num_slots=4, num_ranks=True), TypeError, ("num_ranks", "bool")),
        (lambda: jax.jit(lambda x: plan(x, num_slots=4, num_ranks=2).num_copies)(np.ones(4)), TypeError, ("traced",)),
        (lambda: THREE.rank_loads([1, 2]), ValueError, ("(2,)", "(3,)")),
        (lambda: THREE[0], IndexError, ("single layer",)),
        (lambda: THREE.remap(IDS + 7, axis_name=()), ValueError, ("7", "[0, 3)")),
        (lambda: THREE.remap(IDS), ValueError, ("axis_name=('expert',)", "shard_map")),
        (lambda: THREE.remap(IDS, axis_name=(), prefer_own_node=True), ValueError, ("prefer_own_node",)),
        (lambda: THREE.remap(IDS, axis_name=3), TypeError, ("remap: axis_name=3 is an int",)),
        (lambda: THREE.expand(np.ones(3), axis_name=None), TypeError, ("expand: axis_name=None",)),
        (lambda: THREE.sum_copies(np.ones(4), axis_name=("a", "a")), ValueError, ("sum_copies: axis_name=", "twice")),
        (lambda: THREE.expand(np.ones((4, 2)), axis_name=()), ValueError, ("(4, 2)", "3 rows", "jax.shard_map")),
        (lambda: THREE.sum_copies({"a": np.ones(3)}, axis_name=()), ValueError, ("tree['a']", "(3,)", "4 rows")),
        (lambda: THREE.sum_copies(np.ones(4, bool), axis_name=()), TypeError, ("tree has dtype bool, expected numb",)),
        (
            lambda: THREE.sum_copies(jax.random.split(jax.random.key(0), 4), axis_name=()),
            TypeError,
            ("dtype key<fry>",),
        ),
        (lambda: plan(np.ones((2, 3)), num_slots=4, num_ranks=2).remap(IDS), ValueError, ("2 layers",)),
        (lambda: move(np.ones(4), THREE, None), TypeError, ("NoneType", "Placement")),
        (lambda: move(np.ones(4), THREE, Placement([0, 1], 2, 2)), ValueError, ("is 2", "3", "same experts")),
        (lambda: move(np.ones(4), THREE, Placement([0, 1, 2], 3, 1)), ValueError, ("is 1", "2", "same ranks")),
    ],
)
def test_placement_errors(call, error, fragments):
    with pytest.raises(error) as raised:
        call()
    assert [text for text in fragments if text not in str(raised.value)] == [], str(raised.value)


def test_placement_errors_on_ranks(expert_mesh):
    def shard(fn):
        return jax.shard_map(fn, mesh=expert_mesh(4), in_specs=P("expert"), out_specs=P("expert"))

    with pytest.raises(ValueError, match=r"is 4, expected 2; plan\(\) for as many ranks"):
        shard(THREE.remap)(np.zeros((4, 1), np.int32))
    with pytest.raises(ValueError, match="num_experts is 3, expected a multiple of 4, the ranks"):
        shard(Placement([0, 1, 2, 0], 3, 4).expand)(np.zeros(4))
    placement = plan(np.ones(4), num_slots=8, num_ranks=4)
    traced = jax.jit(lambda placement, w: shard(placement.expand)(w))
    with pytest.raises(TypeError, match="is traced, expected concrete values"):
        traced(placement, np.zeros(4))
