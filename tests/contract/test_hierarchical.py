"""Expert parallelism over a Topology: across nodes once, then inside each node, against the oracle of flat ranks."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
import oracle
from cases import BASE, BF16, F32, FP8_WIRE, Shape, assert_close, assert_same_bits, integers, reals, relative_error
from harness import compiled, in_turn, make_mesh, per_rank, run, to_numpy
from jax_ep.sharding import MeshAxes
from layers import Layer

TOPOLOGY = jax_ep.Topology(node="node", local="expert")
AXES = (("node", "expert"),)
FP8 = jnp.float8_e4m3fn
UNEVEN = ("uniform", "zipf", "one_hot", "one_hot_every_slot", "no_experts", "duplicates", "out_of_range")
FEW = ("uniform", "duplicates")


@pytest.fixture(params=[(2, 4), pytest.param((4, 2), marks=pytest.mark.slow)], ids="{0[0]}x{0[1]}".format)
def nodes(request):
    """A mesh of nodes and the devices of each."""
    return make_mesh(request.param, ("node", "expert"))


@pytest.fixture
def two_nodes():
    return make_mesh((2, 2), ("node", "expert"))


def moe(shape, implementation, **options):
    options = {"axis_name": TOPOLOGY, "num_experts": shape.num_experts, "implementation": implementation} | options
    return functools.partial(jax_ep.moe, **options)


def node_pairs(topk_idx, num_experts, num_nodes):
    """Count `[W, N]` tokens of each rank with an expert in each node, token by token."""
    counts = np.zeros((len(topk_idx), num_nodes), np.int64)
    for rank, tokens in enumerate(topk_idx):
        for ids in tokens:
            for node in {int(i) * num_nodes // num_experts for i in ids if 0 <= i < num_experts}:
                counts[rank, node] += 1
    return counts


def test_hierarchical_rows_bit_for_bit(implementation, nodes, rng, subtests):
    """Compare tokens, weights, sizes and counts, and sums of integers, which are exact."""
    options = {"num_experts": BASE.num_experts, "axis_name": TOPOLOGY, "implementation": implementation}

    def fn(x, idx, weights, y):
        d = jax_ep.dispatch(x, idx, weights, alignment=2, **options)
        again = jax_ep.dispatch(x, None, weights, handle=d.handle, alignment=2, **options)
        back = jax_ep.combine(y, d.handle, axis_name=TOPOLOGY, implementation=implementation)
        counts = d.dropped, d.handle.num_invalid, d.group_sizes, jax_ep.row_experts(d.handle)
        return d.tokens, d.weights, again.tokens, again.weights, back, counts

    call = compiled(fn, nodes, axes=AXES)
    for routing in UNEVEN if implementation == "xla" else FEW:
        with subtests.test(routing):
            layer = Layer(rng, routing, nodes.size, BASE)
            lay = oracle.hierarchical_layout(layer.topk_idx, BASE.num_experts, nodes.shape["expert"], alignment=2)
            y = integers(rng, *lay.source.shape, BASE.hidden)
            y[lay.is_padding] = np.nan
            tokens, weights, again, weights_again, back, counts = call(*layer.args[:3], y)
            assert_same_bits(tokens, oracle.gather(layer.x, lay), "tokens")
            assert_same_bits(weights, oracle.gather_weights(layer.topk_weights, lay), "weights")
            assert_same_bits(again, tokens, "tokens with the handle")
            assert_same_bits(weights_again, weights, "weights with the handle")
            np.testing.assert_array_equal(back, oracle.combine(y, lay))
            dropped, num_invalid, group_sizes, experts = counts
            assert not dropped.any()
            np.testing.assert_array_equal(num_invalid, lay.num_invalid)
            np.testing.assert_array_equal(group_sizes, lay.group_sizes)
            first = np.arange(nodes.size)[:, None] * (BASE.num_experts // nodes.size)
            np.testing.assert_array_equal(experts, np.where(lay.is_padding, -1, lay.expert - first))


def test_hierarchical_tokens_cross_nodes_once(nodes, rng, subtests):
    """The plan sends the minimum between nodes: each token once per node that it needs."""
    num_nodes, num_local = nodes.devices.shape

    def fn(x, idx):
        return jax_ep.dispatch(x, idx, num_experts=BASE.num_experts, axis_name=TOPOLOGY).handle.node.row_to_assignment

    call = compiled(fn, nodes, axes=AXES)
    for routing in UNEVEN:
        with subtests.test(routing):
            layer = Layer(rng, routing, nodes.size, BASE)
            slots = call(layer.x, layer.topk_idx)
            per_token = min(num_nodes, BASE.top_k)
            sources = np.where(slots < 0, -1, slots // (BASE.num_tokens * per_token))
            pairs = node_pairs(layer.topk_idx, BASE.num_experts, num_nodes)
            for node, local, source in np.ndindex(num_nodes, num_local, num_nodes):
                rows = int((sources[node * num_local + local] == source).sum())
                assert rows == pairs[source * num_local + local, node], (node, local, source)


COLLECTIVE = re.compile(
    r"= \(?(.*?)\)? (?:all-gather|all-to-all|ragged-all-to-all|collective-permute|all-reduce|reduce-scatter)"
    r"(?:-start)?\(.*?(?:replica_groups|source_target_pairs)=(.*?), [a-z_]+="
)
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u8": 1, "s8": 1, "pred": 1}


def crosses_nodes(groups, num_local):
    """Return whether a collective has devices of several nodes in one group, for each of XLA's group notations."""
    if named := re.search(r"\{('[^}]*)\}", groups):  # mesh['node'=2,'expert'=4] {'node'}
        return "'node'" in named.group(1)
    if listed := re.findall(r"\{([\d,]+)\}", groups):  # {{0,4},{1,5}}
        parts = [[int(i) for i in group.split(",")] for group in listed]
    else:  # [4,2]<=[2,4]T(1,0)
        iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
        assert iota is not None, groups
        shape, dims, order = ([int(i) for i in part.split(",")] if part else None for part in iota.groups())
        assert shape is not None
        assert dims is not None
        parts = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    return any(len({i // num_local for i in group}) > 1 for group in parts)


def test_hierarchical_compiled_bytes(nodes, rng):
    """Collectives over nodes carry at most N * T tokens and their routing; the large ones stay inside the nodes."""
    num_nodes, num_local = nodes.devices.shape
    shape = Shape(num_tokens=16, top_k=4, num_experts=16, hidden=64)
    layer = Layer(rng, "uniform", nodes.size, shape)

    def fn(x, idx, weights):
        d = jax_ep.dispatch(x, idx, weights, num_experts=16, axis_name=TOPOLOGY, implementation="xla")
        return d.tokens, d.weights

    program = jax.jit(per_rank(fn, nodes, axes=AXES)).lower(*layer.args[:3]).compile().as_text()
    across = inside = 0
    for shapes, groups in COLLECTIVE.findall(program):
        sizes = [
            BYTES[dtype] * math.prod(int(i) for i in dims.split(",") if i)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        ]
        if crosses_nodes(groups, num_local):
            across += sum(sizes)
        else:
            inside += sum(sizes)
    routing = shape.top_k * (4 + 4) + 4 * min(num_nodes, shape.top_k)  # Ids, weights, and the nodes of a token.
    assert inside > across  # These include the tokens of all ranks of a node.
    assert 0 < across <= num_nodes * shape.num_tokens * (4 * shape.hidden + routing)


@pytest.mark.parametrize(
    "limits", [{"capacity": 12}, {"node_capacity": 5}, {"capacity": 12, "node_capacity": 7}], ids=str
)
def test_hierarchical_drops_counted(implementation, two_nodes, rng, limits):
    """Each assignment has a row or is counted where it was dropped; existing rows are right."""
    topology = jax_ep.Topology(node="node", local="expert", node_capacity=limits.get("node_capacity"))
    options = {"num_experts": BASE.num_experts, "axis_name": topology, "implementation": implementation}
    layer = Layer(rng, "one_hot_every_slot", 4, BASE)
    layer.topk_idx[1] = Layer(rng, "uniform", 4, BASE).topk_idx[1]

    def fn(x, idx):
        d = jax_ep.dispatch(x, idx, capacity=limits.get("capacity"), **options)
        ones = jnp.ones(d.tokens.shape, d.tokens.dtype)
        return d.dropped, d.handle.num_dropped, d.tokens, jax_ep.combine(ones, d.handle, axis_name=topology)

    dropped, in_handle, tokens, back = run(fn, two_nodes, layer.x, layer.topk_idx, axes=AXES)
    assert dropped.sum() > 0
    assert_same_bits(in_handle, dropped)
    assert dropped.sum() + back[..., 0].sum() == layer.topk_idx.size
    sent = {token.tobytes() for token in layer.x.reshape(-1, BASE.hidden)}
    rows = [row for row in tokens.reshape(-1, BASE.hidden) if row.any()]
    assert len(rows) == back[..., 0].sum()
    assert {row.tobytes() for row in rows} <= sent
    if "node_capacity" not in limits:
        assert_same_bits(dropped, oracle.hierarchical_layout(layer.topk_idx, BASE.num_experts, 2, **limits).dropped)


def test_hierarchical_fp8_between_nodes(implementation, two_nodes, rng):
    """Tokens match flat dispatch in FP8 bit for bit; the layer matches within the rounding of sums."""
    shape = Shape(hidden=128)
    layer = Layer(rng, "uniform", 4, shape)
    options = {"num_experts": shape.num_experts, "implementation": implementation, "axis_name": TOPOLOGY}

    def fn(*args):
        axes = (TOPOLOGY, TOPOLOGY.axes)
        tokens = [jax_ep.dispatch(*args[:3], schedule=FP8_WIRE, **options | {"axis_name": a}).tokens for a in axes]
        dx = jax.grad(lambda x: jax_ep.moe(x, *args[1:], schedule=FP8_WIRE, **options).sum())(args[0])
        return tokens, jax_ep.moe(*args, schedule=FP8_WIRE, **options), dx

    (tokens, flat), y, dx = run(fn, two_nodes, *layer.args, axes=AXES)
    x, layer.x = layer.x, oracle.to_wire(layer.x, oracle.FP8)
    want = layer.oracle()
    sent = np.zeros_like(x)
    for rank in range(4):
        for row, source, token, _, _ in want.lay.rows(rank):
            sent[source, token] = flat[rank, row]
    assert_close(sent, layer.x, "tokens of the flat exchange")
    assert_same_bits(tokens, oracle.gather(sent, oracle.hierarchical_layout(layer.topk_idx, shape.num_experts, 2)))
    assert relative_error(layer.x, x) > 1e-3
    # Partial sums are off by 2**-4 at most, by a third of that on average.
    assert relative_error(y, want.forward()) < 2**-4
    assert relative_error(dx, want.gradients(np.ones(layer.x.shape))[0]) < 2**-3.5


def test_hierarchical_quantized_pairs(two_nodes, rng):
    shape = Shape(hidden=128)
    layer = Layer(rng, "duplicates", 4, shape)
    values, scales = oracle.quantize(layer.x)

    def fn(values, scales, idx):
        return jax_ep.dispatch((values, scales), idx, num_experts=shape.num_experts, axis_name=TOPOLOGY).tokens

    got = run(fn, two_nodes, values, scales, layer.topk_idx, axes=AXES)
    lay = oracle.hierarchical_layout(layer.topk_idx, shape.num_experts, 2)
    assert_same_bits(got[0], oracle.gather(values, lay), "values")
    assert_same_bits(got[1], oracle.gather(scales, lay), "scales")


@pytest.mark.parametrize("num_blocks", [2, 4])
@pytest.mark.slow
def test_hierarchical_micro_batches(two_nodes, rng, num_blocks):
    """Micro-batches change only roundings, also with unequal sizes, and with num_tokens."""
    topology = jax_ep.Topology(node="node", local="expert", num_blocks=num_blocks)
    shape = Shape(num_tokens=7)
    layer = Layer(rng, "uniform", 4, shape)
    call = moe(shape, "xla", axis_name=topology)
    layer.topk_idx[:, 6:] = -1
    d_out = reals(rng, *layer.x.shape)

    def fn(x, idx, weights, w_gate_up, w_down, d_out):
        y, vjp = jax.vjp(lambda *a: call(a[0], idx, weights, *a[1:]), x, w_gate_up, w_down)
        return y, vjp(d_out)

    y, (dx, d_gate_up, d_down) = run(fn, two_nodes, *layer.args, d_out, axes=AXES)
    want = layer.oracle()
    assert_close(y, want.forward(), "moe")
    exact = want.gradients(d_out.astype(np.float64))
    assert_close(dx, exact[0], "dx")
    assert_close(d_gate_up, layer.per_rank(exact[2]), "gradient of w_gate_up")
    assert_close(d_down, layer.per_rank(exact[3]), "gradient of w_down")


@pytest.mark.slow
def test_hierarchical_scan_and_remat(two_nodes, rng):
    """Two layers under scan, jit and checkpoint, in bfloat16, match those without; the handle is a pytree."""
    layer = Layer(rng, "zipf", 4, BASE, BF16)
    call = moe(BASE, "xla")

    def once(x, args):
        d = jax_ep.dispatch(x, args[0], num_experts=BASE.num_experts, axis_name=TOPOLOGY)
        handle = jax.tree.unflatten(*reversed(jax.tree.flatten(d.handle)))
        return x + call(x, *args) + jax_ep.combine(d.tokens, handle, axis_name=TOPOLOGY)

    def fn(x, *args):
        def scanned(x):
            step = jax.checkpoint(lambda x, _: (once(x, args), None))
            return jax.lax.scan(step, x, None, length=2)[0].astype(F32).sum()

        plain = jax.grad(lambda x: once(once(x, args), args).astype(F32).sum())(x)
        return jax.grad(scanned)(x), plain

    scanned, plain = run(fn, two_nodes, *layer.args, axes=AXES)
    assert np.abs(plain.astype(F32)).max() > 1
    assert_close(scanned, plain.astype(np.float64), "scan")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow(unless={"check_vma": [True]})
def test_hierarchical_sharded_moe(two_nodes, rng, check_vma):
    """Global arrays, and replicated weights of a custom shard_map, whose gradients are summed."""
    layer = Layer(rng, "uniform", 4, BASE)
    x, idx, weights = (a.reshape(-1, a.shape[-1]) for a in layer.args[:3])
    if check_vma:
        call = jax_ep.sharding.sharded_moe(two_nodes, num_experts=BASE.num_experts, axes=MeshAxes(TOPOLOGY))
    else:
        spec = P(TOPOLOGY.axes)
        call = jax.shard_map(moe(BASE, "xla"), mesh=two_nodes, in_specs=spec, out_specs=spec, check_vma=False)
    got = to_numpy(jax.jit(call)(x, idx, weights, layer.w_gate_up, layer.w_down))
    assert_close(got, layer.oracle().forward().reshape(got.shape), "sharded_moe")


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.slow(unless={"in_fp8": [True]})
def test_hierarchical_low_latency_moe(implementation, two_nodes, rng, in_fp8):
    shape = Shape(hidden=128, intermediate=128)
    layer = Layer(rng, "uniform", 4, shape)  # Decoding assigns a token to an expert once.

    def fn(x, idx, weights, w_gate_up, w_down):
        matrices = (w_gate_up, w_down)
        if in_fp8:
            matrices = [jax_ep.quantize(w, "fp8", activations="fp8") for w in (w_gate_up, w_down)]
        options = {"num_experts": shape.num_experts, "axis_name": TOPOLOGY}
        layer = functools.partial(jax_ep.low_latency_moe, implementation=implementation)
        operands = x, idx, weights, *matrices
        nested = functools.partial(layer, **options)
        return in_turn([(nested, operands), (functools.partial(nested, axis_name=TOPOLOGY.axes), operands)])

    layer.topk_idx[:, 5:] = -1
    got, flat = run(fn, two_nodes, *layer.args, axes=AXES)
    want = layer.oracle().forward()
    if in_fp8:
        assert relative_error(got, flat) < 0.01  # Quantizing tokens again adds a small error.
        assert relative_error(got, want) < 0.1
    else:
        assert_close(got, want, "low_latency_moe")


@pytest.mark.slow
def test_hierarchical_flax_layer(two_nodes, rng):
    """Only the axis changes: outputs, metrics and gradients are those of the flat layer."""
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    x = reals(rng, 2, 8, 10)

    def run_layer(axis_name):
        def loss(layer, x):
            y, metrics = layer(x)
            return (y**2).sum(), (y, metrics)

        layer = MoE(10, 6, 8, 2, axes=MeshAxes(axis_name), mesh=two_nodes, dtype=F32, rngs=nnx.Rngs(0))
        return nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer, x)

    hierarchical, flat = (to_numpy(jax.tree.leaves(run_layer(axes))) for axes in (TOPOLOGY, TOPOLOGY.axes))
    for got, want in zip(hierarchical, flat, strict=True):
        if got.dtype == F32:
            assert_close(got, want.astype(np.float64))
        else:
            np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="node_capacity=4"):
        MoE(10, 6, 8, 2, axes=MeshAxes(jax_ep.Topology("node", "expert", node_capacity=4)), rngs=nnx.Rngs(0))


def test_hierarchical_misuse(two_nodes):
    """Invalid axes, sizes and handles are errors that state the actual value."""
    x, idx = np.ones((4, 2, 4), F32), np.zeros((4, 2, 1), np.int32)
    other = jax_ep.Topology(node="expert", local="node")

    def refused(error, message, fn):
        with pytest.raises(error, match=message):
            jax.eval_shape(per_rank(fn, two_nodes, axes=AXES), x, idx)

    def dispatch(x, idx, num_experts=4, axis_name=TOPOLOGY, **options):
        return jax_ep.dispatch(x, idx, num_experts=num_experts, axis_name=axis_name, **options)

    missing = jax_ep.Topology(node="pod", local="expert")
    bound = "dispatch: axis_name=Topology.*'pod'.*axes bound here.*; expected axes .* has 'pod' and 'expert', pass"
    refused(ValueError, bound, lambda *a: dispatch(*a, 4, missing))
    refused(ValueError, "num_experts is 6, expected a multiple of 4, the ranks", lambda *a: dispatch(*a, num_experts=6))
    handle_of = lambda *a: dispatch(*a).handle  # noqa: E731
    refused(ValueError, "axis of the handle", lambda *a: jax_ep.combine(a[0], handle_of(*a), axis_name=other))
    refused(TypeError, "HierarchicalHandle, expected", lambda *a: jax_ep.combine(a[0], handle_of(*a), axis_name="node"))
    flat = lambda *a: dispatch(*a, axis_name=TOPOLOGY.axes).handle  # noqa: E731
    refused(TypeError, "expected the HierarchicalHandle", lambda *a: jax_ep.combine(a[0], flat(*a), axis_name=TOPOLOGY))
    refused(ValueError, "the number of tokens", lambda *a: dispatch(a[0][:1], None, handle=handle_of(*a)))
    refused(ValueError, "topk_idx is None and handle is None", lambda x, idx: dispatch(x, None))
    refused(
        NotImplementedError,
        "low_latency_dispatch: axis_name=Topology.*pass the tuple",
        lambda *a: (
            jax_ep.low_latency_dispatch(
                *a, num_experts=4, max_tokens_per_rank=2, axis_name=TOPOLOGY, quantize=False
            ).tokens
        ),
    )
    blocks = jax_ep.Topology(node="node", local="expert", num_blocks=2)
    matrices = jnp.ones((1, 4, 6)), jnp.ones((1, 3, 4))
    refused(
        ValueError,
        "capacity=4 with num_blocks=2",
        lambda x, idx: jax_ep.moe(x, idx, jnp.ones((2, 1)), *matrices, num_experts=4, axis_name=blocks, capacity=4),
    )
