"""Dispatch, combine and the layer over all devices of several nodes: one axis, one axis per level, and a Topology."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep
import oracle
from cases import Shape, assert_close, assert_same_bits, integers, reals
from harness import compiled, make_mesh
from jax_ep.types import AxisName
from layers import Layer
from oracle_experts import MoE

SHAPE = Shape(num_tokens=5, top_k=3, num_experts=16, hidden=8, intermediate=4)
ROUTINGS = ("duplicates", "zipf", "some_without_expert")


@dataclasses.dataclass(frozen=True)
class Over:
    """The mesh and axes over which tokens are sent.

    Attributes:
      mesh: all devices.
      axis_name: the argument of the functions.
      ranks_per_node: set if tokens go over nodes first, which orders rows by the local rank before the node.
    """

    mesh: Mesh
    axis_name: AxisName
    ranks_per_node: int = 1

    def compiled(self, fn):
        """Compile `fn` of the ranks' arrays, `[W, ...]` with the ranks in the order of `axis_name`."""
        return compiled(fn, self.mesh, axes=(self.mesh.axis_names,))

    def oracle(self, layer, **options):
        lay = oracle.hierarchical_layout(layer.topk_idx, SHAPE.num_experts, self.ranks_per_node, **options)
        return MoE(layer.x, layer.topk_weights, layer.w_gate_up, layer.w_down, lay)


@pytest.fixture(params=["topology", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flat", "nodes"))])
def over(request):
    num_nodes = jax.process_count() if jax.process_count() > 1 else 2
    num_ranks = jax.device_count() // num_nodes * num_nodes
    if num_ranks < num_nodes:
        pytest.skip(f"needs {num_nodes} devices, {jax.device_count()} present")
    if request.param == "flat":
        return Over(make_mesh((num_ranks,), ("expert",)), "expert")
    mesh = make_mesh((num_nodes, num_ranks // num_nodes), ("node", "expert"))
    if jax.process_count() > 1:
        processes = [{device.process_index for device in row} for row in mesh.devices]
        assert processes == [{process} for process in range(num_nodes)], "a node is not a process"
    if request.param == "nodes":
        return Over(mesh, ("node", "expert"))
    return Over(mesh, jax_ep.Topology(node="node", local="expert"), num_ranks // num_nodes)


def test_nodes_dispatch_and_combine(implementation, over, rng, subtests):
    """Rows match bit for bit, and sums of whole numbers, which do not depend on the order."""

    def fn(x, topk_idx, topk_weights, y):
        options = {"num_experts": SHAPE.num_experts, "axis_name": over.axis_name, "implementation": implementation}
        sent = jax_ep.dispatch(x, topk_idx, topk_weights, **options)
        back = jax_ep.combine(y, sent.handle, axis_name=over.axis_name, implementation=implementation)
        return sent.tokens, sent.weights, sent.group_sizes, back

    call = over.compiled(fn)
    for routing in ROUTINGS:
        with subtests.test(routing):
            layer = Layer(rng, routing, over.mesh.size, SHAPE)
            lay = over.oracle(layer).lay
            y = integers(rng, *lay.source.shape, SHAPE.hidden)
            tokens, weights, group_sizes, back = call(layer.x, layer.topk_idx, layer.topk_weights, y)
            assert_same_bits(tokens, oracle.gather(layer.x, lay), "tokens")
            assert_same_bits(weights, oracle.gather_weights(layer.topk_weights, lay), "weights")
            assert_same_bits(group_sizes, lay.group_sizes, "group_sizes")
            assert_same_bits(back, oracle.combine(y, lay).astype(y.dtype), "combined")


def test_nodes_moe_and_gradients(implementation, over, rng, subtests):
    """The layer, and the gradients of its tokens, router weights and both weights, match those among all ranks."""

    def fn(axis_name, x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def layer(x, topk_weights, w_gate_up, w_down):
            arrays = (x, topk_idx, topk_weights, w_gate_up, w_down)
            return jax_ep.moe(*arrays, num_experts=16, axis_name=axis_name, implementation=implementation)

        out, vjp = jax.vjp(layer, x, topk_weights, w_gate_up, w_down)
        return out, vjp(d_out)

    call = over.compiled(functools.partial(fn, over.axis_name))
    for routing in ROUTINGS:
        with subtests.test(routing):
            layer = Layer(rng, routing, over.mesh.size, SHAPE)
            d_out = reals(rng, *layer.x.shape)
            out, gradients = call(*layer.args, d_out)
            want = over.oracle(layer)
            assert_close(out, want.forward(), "moe")
            names = ("dx", "d_topk_weights", "d_w_gate_up", "d_w_down")
            for name, got, exact in zip(names, gradients, want.gradients(d_out.astype(np.float64)), strict=True):
                assert_close(got.reshape(exact.shape), exact, name)
    if isinstance(over.axis_name, jax_ep.Topology):
        flat = over.compiled(functools.partial(fn, over.mesh.axis_names))(*layer.args, d_out)
        for got, exact in zip(jax.tree.leaves((out, gradients)), jax.tree.leaves(flat), strict=True):
            assert_close(got, exact.astype(np.float64), "flat moe")


@pytest.mark.slow
def test_nodes_capacity(implementation, over, rng):
    """Rows past it are dropped and counted, on each rank as in one process."""

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down):
        options = {"num_experts": 16, "axis_name": over.axis_name, "capacity": 6, "implementation": implementation}
        sent = jax_ep.dispatch(x, topk_idx, topk_weights, **options)
        return sent.dropped, jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, **options)

    layer = Layer(rng, "zipf", over.mesh.size, SHAPE)
    want = over.oracle(layer, capacity=6)
    assert want.lay.dropped.sum() > 0
    dropped, out = over.compiled(fn)(*layer.args)
    assert_same_bits(dropped, want.lay.dropped, "dropped")
    assert_close(out, want.forward(), "moe")
