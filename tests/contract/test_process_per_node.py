"""Processes with several devices each: kernels inside each, XLA's collectives between. test_processes.py runs it."""

import functools
import re

import jax
import numpy as np
import pytest

import jax_ep
from cases import BASE, BF16, Shape, assert_close, reals
from harness import PATIENCE_S, compiled, make_mesh, per_rank
from layers import Layer

pytest.importorskip("triton")
TOPOLOGY = jax_ep.Topology(node="node", local="expert")
AXES = (TOPOLOGY.axes,)


@pytest.fixture
def nodes():
    """A mesh with a node per process."""
    if jax.process_count() == 1 or jax.local_device_count() == 1:
        pytest.skip("needs several processes with several devices each: see test_processes.py")
    jax_ep.finalize()
    mesh = make_mesh((jax.process_count(), jax.local_device_count()), TOPOLOGY.axes)
    transport = "shared_memory" if jax.default_backend() == "cpu" else None
    made = jax_ep.init(mesh, axis_name=TOPOLOGY, transport=transport, timeout_s=PATIENCE_S)
    assert made.transport in ("shared_memory", "peer")
    yield mesh
    jax_ep.finalize()


def layer(axis_name, *arguments):
    return jax_ep.moe(*arguments, num_experts=BASE.num_experts, axis_name=axis_name, implementation="triton")


def test_process_per_node_layer_and_gradients(nodes, rng):
    def fn(x, ids, weights, w_gate_up, w_down, d_out):
        arrays = x, weights, w_gate_up, w_down
        y, vjp = jax.vjp(lambda x, weights, *w: layer(TOPOLOGY, x, ids, weights, *w), *arrays)
        return y, vjp(d_out)

    call = compiled(fn, nodes, axes=AXES)
    for routing in ("uniform", "one_hot"):
        problem = Layer(rng, routing, nodes.size, BASE)
        d_out = reals(rng, *problem.x.shape)
        y, gradients = call(*problem.args, d_out)
        want = problem.oracle()
        assert_close(y, want.forward(), "moe")
        for got, exact in zip(gradients, want.gradients(d_out.astype(np.float64)), strict=True):
            assert_close(got, exact.reshape(got.shape), "gradient")


def test_process_per_node_decoding(nodes, rng):
    shape = Shape(hidden=128, intermediate=128)
    problem = Layer(rng, "uniform", nodes.size, shape, BF16)

    def fn(x, ids, weights, w_gate_up, w_down):
        matrices = w_gate_up, w_down
        options = {"num_experts": shape.num_experts, "max_tokens_per_rank": shape.num_tokens, "axis_name": TOPOLOGY}
        return jax_ep.low_latency_moe(x, ids, weights, *matrices, implementation="triton", **options)

    y = compiled(fn, nodes, axes=AXES)(*problem.args)
    assert_close(y, problem.oracle().forward(), "low_latency_moe")


def test_process_per_node_exchange_unsupported(nodes, rng):
    problem = Layer(rng, "uniform", nodes.size, BASE)
    reason = f"triton: ranks of the axes {TOPOLOGY.axes} span several of the {len(nodes.devices)} processes"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(per_rank(functools.partial(layer, TOPOLOGY.axes), nodes, axes=AXES), *problem.args)
