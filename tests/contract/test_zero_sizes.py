"""Sizes of zero: an empty result, zeros, or an error that names the size, in every operation and layout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import compiled, make_mesh
from jax_ep import quantization, sharding

BF16 = jnp.dtype(jnp.bfloat16)
FORMATS = ("fp8", "int8", "int4", "mxfp4")
PRODUCTS = [(0, 0, 128, 128), (2, 0, 128, 128), (2, 16, 0, 128), (2, 16, 128, 0)]  # G, M, K, N


def ones(*shape):
    return jnp.ones(shape, BF16)


def check_zero(result, *shapes):
    leaves = jax.tree.leaves(result)
    assert [leaf.shape for leaf in leaves] == list(shapes)
    for leaf in leaves:
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), 0)


def matrices(layout, shape):
    if layout in FORMATS:
        return quantization.quantize(ones(*shape), format=layout)
    if layout.startswith("prepacked "):
        return quantization.with_layout(matrices(layout.removeprefix("prepacked "), shape), "prepacked")
    return ones(*shape)


LAYOUTS = ("plain", *FORMATS, "prepacked int4", "prepacked mxfp4")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
@pytest.mark.slow(unless={"layout": ["plain", "fp8", "prepacked mxfp4"]})
def test_zero_sizes_grouped_gemm(layout, sizes, implementation):
    G, M, K, N = sizes
    if K == 0 and layout != "plain":
        with pytest.raises(ValueError, match=r"^quantize: axis -2 of w, K, is 0, expected at least 1"):
            matrices(layout, (G, K, N))
        return
    w, group_sizes = matrices(layout, (G, K, N)), jnp.full((G,), M // max(G, 1), jnp.int32)
    result = jax_ep.grouped_gemm(ones(M, K), w, group_sizes, implementation=implementation)
    check_zero(result, (M, N))
    result = jax_ep.masked_grouped_gemm(ones(G, M, K), w, group_sizes, implementation=implementation)
    check_zero(result, (G, M, N))


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_zero_sizes_grouped_gemm_gradients(sizes, implementation):
    G, M, K, N = sizes
    group_sizes = jnp.full((G,), M // max(G, 1), jnp.int32)

    def loss(lhs, rhs):
        return jax_ep.grouped_gemm(lhs, rhs, group_sizes, implementation=implementation).sum()

    check_zero(jax.grad(loss, (0, 1))(ones(M, K), ones(G, K, N)), (M, K), (G, K, N))


def layer_of(T, K, E, H, inner):
    ids, weights = jnp.zeros((T, K), jnp.int32), jnp.ones((T, K))
    return ones(T, H), ids, weights, ones(E, H, 2 * inner), ones(E, inner, H)


@pytest.mark.parametrize("recipe", [None, "fp8"])
@pytest.mark.parametrize("sizes", [(0, 2, 4, 128, 128), (4, 2, 4, 128, 0)], ids=str)
def test_zero_sizes_layers(sizes, recipe, implementation):
    """No tokens, or experts without hidden columns: forward and gradient."""
    x, ids, weights, w_gate_up, w_down = layer_of(*sizes)
    options = {"recipe": recipe, "implementation": implementation}

    def layer(x, *w):
        return jax_ep.fused_moe(x, ids, weights, *w, **options)

    check_zero(jax.jit(layer)(x, w_gate_up, w_down), x.shape)
    gradients = jax.jit(jax.grad(lambda *args: layer(*args).sum(), (0, 1, 2)))(x, w_gate_up, w_down)
    check_zero(gradients, x.shape, w_gate_up.shape, w_down.shape)


def test_zero_sizes_balanced(implementation, expert_mesh):
    """Copies of experts without hidden columns."""
    x, ids, weights, *w = layer_of(4, 2, 2, 128, 0)
    options = {"num_experts": 4, "balance": jax_ep.Balance(), "implementation": implementation}
    layer = compiled(partial(jax_ep.moe, **options), expert_mesh(2))
    check_zero(layer(*(jnp.stack([a, a]) for a in (x, ids, weights, *w))), (2, *x.shape))


def low_latency(x, ids, weights, w_gate_up, w_down, **options):
    options |= {"num_experts": w_down.shape[0], "axis_name": ()}
    return jax_ep.low_latency_moe(x, ids, weights, w_gate_up, w_down, **options)


def sorted_tokens(x, ids, weights, w_gate_up, w_down, **options):
    return jax_ep.moe_sort(ids, weights, num_experts=w_down.shape[0], block_size=16, **options)


def dispatched(x, ids, weights, w_gate_up, w_down, **options):
    return jax_ep.dispatch(x, ids, num_experts=w_down.shape[0], axis_name=(), **options).tokens


def over_a_mesh(*arrays, **options):
    return sharding.sharded_moe(make_mesh((1,), ("expert",)), num_experts=arrays[4].shape[0], **options)(*arrays)


LAYERS = {
    "fused_moe": jax_ep.fused_moe,
    "low_latency_moe": low_latency,
    "moe_sort": sorted_tokens,
    "dispatch": dispatched,
    "sharded_moe": over_a_mesh,
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 0, 4, 128, 128), "topk_idx has shape (4, 0), expected K >= 1"),
        ((4, 2, 0, 128, 128), "num_experts=0, expected at least 1"),
        ((4, 2, 4, 0, 128), "x has shape (4, 0), expected H >= 1"),
    ],
    ids=["K", "E", "H"],
)
def test_zero_sizes_invalid(name, sizes, words, implementation):
    if name == "moe_sort" and sizes[3] == 0:
        pytest.skip("it takes no tokens")
    with pytest.raises(ValueError) as caught:
        LAYERS[name](*layer_of(*sizes), implementation=implementation)
    assert str(caught.value).startswith(f"{name}: {words}")


def test_zero_sizes_quantized_tokens(implementation):
    x = jnp.zeros((4, 0), jnp.float8_e4m3fn), ones(4, 1)
    with pytest.raises(ValueError, match=r"dispatch: values has shape \(4, 0\), expected H >= 1"):
        jax_ep.dispatch(x, jnp.zeros((4, 2), jnp.int32), num_experts=4, axis_name=(), implementation=implementation)


COMBINES = {
    "combine": lambda d, ids, weights, **on: jax_ep.combine(d.tokens[:, :0], d.handle, **on),
    "grouped_gemm_combine": lambda d, ids, weights, **on: jax_ep.grouped_gemm_combine(
        d.tokens, ones(2, 8, 0), d.handle, **on
    ),
    "low_latency_combine": lambda d, ids, weights, **on: jax_ep.low_latency_combine(
        d.tokens[..., :0], ids, weights, d.handle, **on
    ),
}


@pytest.mark.parametrize("name", COMBINES)
def test_zero_sizes_combine(name):
    """Sums without columns."""
    x, ids, weights = ones(4, 8), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2))
    options = {"num_experts": 2, "axis_name": (), "implementation": "xla"}
    if name == "low_latency_combine":
        d = jax_ep.low_latency_dispatch(x, ids, max_tokens_per_rank=4, quantize=False, **options)
    else:
        d = jax_ep.dispatch(x, ids, **options)
    with pytest.raises(ValueError, match=rf"^{name}: [yw] has shape \(.*, 0\), expected H >= 1; "):
        COMBINES[name](d, ids, weights, axis_name=(), implementation="xla")


@pytest.mark.parametrize("name", ["router_z_loss", "load_balancing_loss"])
def test_zero_sizes_losses(name):
    ids = [] if name == "router_z_loss" else [jnp.zeros((4, 1), jnp.int32)]
    with pytest.raises(ValueError, match=rf"^{name}: .* has shape \(4, 0\), expected E >= 1"):
        getattr(jax_ep, name)(jnp.ones((4, 0)), *ids)
