"""Result types in `jax.export`: each can be serialized, as an argument and as a result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_ep
from harness import make_mesh
from jax_ep import lora
from jax_ep.placement import plan
from jax_ep.quantization import quantize, quantize_fp8, with_layout
from jax_ep.routing import MoEMetrics
from jax_ep.serving import serving_weights
from jax_ep.sharding import sharded_moe
from jax_ep.types import Layout

LAYOUT = Layout(2, 4, 3, 2, 16, axis=("node", "expert"))
ONE = jnp.ones((2, 3))
HANDLE = jax_ep.types.Handle(ONE, ONE, ONE, ONE, None, ONE, ONE, LAYOUT)
IDS = jnp.zeros((4, 2), jnp.int32)
W = jnp.ones((2, 128, 128))
VALUES = {
    "Routing": lambda: jax_ep.types.Routing(IDS, ONE, ONE),
    "Handle": lambda: HANDLE,
    "HierarchicalHandle": lambda: jax_ep.types.HierarchicalHandle(HANDLE, HANDLE, ONE, ONE),
    "Dispatched": lambda: jax_ep.dispatch(jnp.ones((4, 8)), IDS, num_experts=2, axis_name=()),
    "DispatchedGemm": lambda: jax_ep.types.DispatchedGemm(ONE, None, ONE, HANDLE, ONE),
    "SortedTokens": lambda: jax_ep.types.SortedTokens(ONE, None, ONE, ONE, ONE),
    "LowLatencyHandle": lambda: jax_ep.types.LowLatencyHandle(ONE, ONE, ONE, ONE, ONE, LAYOUT),
    "LowLatencyDispatched": lambda: jax_ep.types.LowLatencyDispatched(
        ONE, None, ONE, jax_ep.types.LowLatencyHandle(ONE, ONE, ONE, ONE, ONE, LAYOUT, own_topk_idx=ONE)
    ),
    "QuantizedWeights": lambda: quantize(W, "int8", activations="int8"),
    "QuantizedWeights for training": lambda: quantize(W, "fp8", for_training=True),
    "QuantizedWeights without a format": lambda: quantize(W, None),
    "QuantizedWeights prepacked": lambda: with_layout(quantize(W, "mxfp4"), "prepacked"),
    "ExpertWeights": lambda: serving_weights(W, W[:, :64], "fp8", activations="fp8"),
    "ExpertWeights of arrays": lambda: jax_ep.serving.ExpertWeights(W, W, ONE),
    "MoEMetrics": lambda: MoEMetrics(load=ONE, load_balancing_loss=ONE, router_z_loss=ONE, dropped=ONE),
    "Placement": lambda: plan(np.arange(4), num_slots=6, num_ranks=2),
}


@pytest.mark.parametrize("name", VALUES)
def test_export_round_trip_of_a_result_type(name):
    value = VALUES[name]()
    exported = export.export(jax.jit(lambda value: value))(value)
    again = export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree and again.out_tree == exported.out_tree
    got = again.call(value)
    assert type(got) is type(value) and jax.tree.structure(got) == jax.tree.structure(value)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32)), got, value)


def _layer(x, logits, **options):
    weights = jnp.linspace(-0.2, 0.2, 4 * 8 * 12).reshape(4, 8, 12), jnp.linspace(-0.2, 0.2, 4 * 6 * 8).reshape(4, 6, 8)
    routing = jax_ep.topk_router(logits, 2)
    return jax_ep.fused_moe(x, routing.topk_idx, routing.topk_weights, *weights, implementation="xla", **options)


@pytest.mark.parametrize("constraints", [(), ("n >= 8", "n <= 65536")])
def test_export_of_a_symbolic_number_of_tokens(constraints, rng):
    """One program for every batch size: a layer and its gradients."""

    def both(x, logits):
        return _layer(x, logits), jax.grad(lambda *a: jnp.sum(jnp.sin(_layer(*a))), argnums=(0, 1))(x, logits)

    (n,) = export.symbolic_shape("n", constraints=constraints)
    exported = export.export(jax.jit(both))(*(jax.ShapeDtypeStruct((n, size), jnp.float32) for size in (8, 4)))
    for size in (8, 33):
        arrays = [rng.normal(size=(size, columns)).astype(np.float32) for columns in (8, 4)]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), exported.call(*arrays), both(*arrays)
        )


def test_export_of_a_handle_of_a_symbolic_number_of_tokens():
    (n,) = export.symbolic_shape("n")
    call = jax.jit(lambda x, idx: jax_ep.dispatch(x, idx, num_experts=4, axis_name=()))
    exported = export.export(call)(jax.ShapeDtypeStruct((n, 8), jnp.float32), jax.ShapeDtypeStruct((n, 2), jnp.int32))
    with pytest.raises(NotImplementedError, match=r"^export: a handle of n tokens, a symbolic number, expected"):
        exported.serialize()


def _int8(rows, columns):
    return quantize(jnp.ones((4, rows, columns)), "int8")


def _in_fp8(x):
    (rows, scales), w = quantize_fp8(x), quantize(jnp.ones((4, 128, 128)), "fp8", activations="fp8")
    return jax_ep.grouped_gemm(rows, w, jnp.ones(4, jnp.int32), lhs_scales=scales)


ONES = jnp.ones((4, 128, 256), jnp.bfloat16), jnp.ones((4, 128, 128), jnp.bfloat16)
ONES_F32 = tuple(w.astype(jnp.float32) for w in ONES)
OF_KNOWN_SIZE = {
    "fused_moe int8": lambda x, idx, w: jax_ep.fused_moe(x, idx, w, _int8(128, 256), _int8(128, 128)),
    "fused_moe fp8": lambda x, idx, w: jax_ep.fused_moe(x.astype(jnp.bfloat16), idx, w, *ONES, recipe="fp8"),
    "low_latency_moe": lambda x, idx, w: jax_ep.low_latency_moe(
        x.astype(jnp.bfloat16), idx, w, *ONES, num_experts=4, axis_name=()
    ),
    "low_latency_dispatch": lambda x, idx, w: jax_ep.low_latency_dispatch(
        x, idx, num_experts=4, max_tokens_per_rank=16, axis_name=()
    ),
    "grouped_gemm int8": lambda x, idx, w: jax_ep.grouped_gemm(x, _int8(128, 128), jnp.ones(4, jnp.int32)),
    "grouped_gemm fp8": lambda x, idx, w: _in_fp8(x),
    "masked_grouped_gemm": lambda x, idx, w: jax_ep.masked_grouped_gemm(
        jnp.broadcast_to(x, (4, *x.shape)), jnp.ones((4, 128, 128)), jnp.ones(4, jnp.int32)
    ),
}


@pytest.mark.parametrize("name", OF_KNOWN_SIZE)
def test_export_of_a_symbolic_number_of_tokens_unsupported(name):
    (n,) = export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct((n, c), t) for c, t in ((128, "float32"), (2, "int32"), (2, "float32"))]
    with pytest.raises(NotImplementedError, match=f"^{name.split()[0]}: .* has n rows, a symbolic number, expected"):
        export.export(jax.jit(OF_KNOWN_SIZE[name]))(*types)


@pytest.mark.parametrize("layer", [jax_ep.moe, jax_ep.fused_moe])
def test_export_of_a_symbolic_number_of_experts_per_token(layer):
    (k,) = export.symbolic_shape("k")
    types = [jax.ShapeDtypeStruct((8, c), t) for c, t in ((128, "float32"), (k, "int32"), (k, "float32"))]
    options = {"num_experts": 4, "axis_name": ()} if layer is jax_ep.moe else {}
    with pytest.raises(NotImplementedError, match=r": topk_idx has shape \(8, k\), expected a known number"):
        export.export(jax.jit(lambda *tokens: layer(*tokens, *ONES_F32, **options)))(*types)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_export_of_a_symbolic_number_of_tokens_on_a_mesh(num_ranks):
    """JAX lowers no collective of a symbolic size."""
    mesh = make_mesh((num_ranks,), ("expert",))
    (n,) = export.symbolic_shape("n", constraints=["n <= 64"])
    types = [jax.ShapeDtypeStruct((num_ranks * n, c), t) for c, t in ((128, "float32"), (2, "int32"), (2, "float32"))]
    layer = jax.jit(lambda *tokens: sharded_moe(mesh, num_experts=4)(*tokens, *ONES_F32))
    with pytest.raises(NotImplementedError, match=r"^sharded_moe: x has n rows, a symbolic number, expected"):
        export.export(layer)(*types)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("function", [jax_ep.moe, jax_ep.low_latency_moe, jax_ep.dispatch], ids=lambda f: f.__name__)
def test_export_of_a_symbolic_number_of_tokens_over_nodes(function, sizes):
    mesh, over = make_mesh(sizes, ("node", "local")), jax.P(("node", "local"))
    (n,) = export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct((2 * n, c), t) for c, t in ((128, "float32"), (2, "int32"), (2, "float32"))]
    types += [] if function is jax_ep.dispatch else ONES_F32
    options = {"num_experts": 4, "axis_name": jax_ep.Topology("node", "local")}

    @jax.shard_map(mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
    def layer(*arrays):
        result = function(*arrays, **options)
        return result.tokens if function is jax_ep.dispatch else result

    with pytest.raises(NotImplementedError, match=f"^{function.__name__}: x has n rows, a symbolic number, expected"):
        export.export(jax.jit(layer))(*types)


def test_export_of_a_symbolic_number_of_experts():
    """JAX must know whether k experts can be chosen."""
    route = jax.jit(lambda logits: jax_ep.topk_router(logits, 2))
    with pytest.raises(
        NotImplementedError, match=r"^topk_router: Symbolic dimension comparison 'e' < '2' .*constraints="
    ):
        export.export(route)(jax.ShapeDtypeStruct((3, *export.symbolic_shape("e")), jnp.float32))
    (e,) = export.symbolic_shape("e", constraints=["e >= 2"])
    exported = export.export(route)(jax.ShapeDtypeStruct((3, e), jnp.float32))
    logits = jnp.linspace(-1, 1, 15).reshape(3, 5)
    jax.tree.map(np.testing.assert_array_equal, tuple(exported.call(logits)), tuple(route(logits)))


@pytest.mark.parametrize("shape", ["e, 8, 4", "4, h, 4", "4, 8, n", "e, h, 2, n"])
def test_export_of_adapters_of_symbolic_sizes(shape):
    init = jax.jit(lambda key, w: lora.init(key, w, 2))
    w = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    exported = export.export(init)(jax.random.key(0), w)
    w = jnp.ones([size if isinstance(size, int) else 8 for size in w.shape])
    got, expected = exported.call(jax.random.key(1), w), init(jax.random.key(1), w)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
