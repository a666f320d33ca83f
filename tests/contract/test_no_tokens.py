"""No tokens on any rank: results have the documented shapes, and gradients are zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from cases import BF16, F32, FP8_WIRE
from harness import EXPERT, make_mesh
from jax_ep.sharding import sharded_moe

W, E, K, H, INNER = 2, 4, 2, 128, 128
FP8 = jnp.float8_e4m3fn
SPEC = P(EXPERT)


def dispatch(x, idx, weights, up, down, **options):
    sent = jax_ep.dispatch(x, idx, weights, **options)
    return sent.tokens * sent.weights[:, None].astype(x.dtype), sent.group_sizes, sent.dropped[None]


def exchange(x, idx, weights, up, down, *, implementation, **options):
    sent = jax_ep.dispatch(x, idx, weights, implementation=implementation, **options)
    again = jax_ep.dispatch(x, None, weights, handle=sent.handle, num_experts=E, implementation=implementation)
    rows = again.tokens * again.weights[:, None].astype(x.dtype)
    return jax_ep.combine(rows, sent.handle, implementation=implementation)


def halves(x, idx, weights, up, down, *, implementation, **options):
    sent = jax_ep.dispatch_grouped_gemm(x, idx, weights, up, implementation=implementation, **options)
    rows = sent.hidden[:, :INNER] * sent.weights[:, None].astype(x.dtype)
    return jax_ep.grouped_gemm_combine(rows, down, sent.handle, implementation=implementation)


LAYERS = {
    "dispatch": (dispatch, {}),
    "dispatch with a capacity": (dispatch, {"capacity": 8, "alignment": 4}),
    "dispatch and combine": (exchange, {}),
    "dispatch and combine with a capacity": (exchange, {"capacity": 8}),
    "fused halves": (halves, {}),
    "moe": (jax_ep.moe, {}),
    "moe with a capacity": (jax_ep.moe, {"capacity": 16}),
    "moe, FP8 on the wire": (jax_ep.moe, {"schedule": FP8_WIRE}),
    "moe, FP8 products": (jax_ep.moe, {"recipe": "fp8"}),
}


def arguments(mesh, dtype):
    tokens = jnp.ones((0, H), dtype), jnp.zeros((0, K), jnp.int32), jnp.ones((0, K))
    matrices = jnp.ones((E, H, 2 * INNER), dtype), jnp.ones((E, INNER, H), dtype)
    return [jax.device_put(value, NamedSharding(mesh, SPEC)) for value in (*tokens, *matrices)]


def check(layer, args):
    """Eagerly and compiled; gradients of each argument alone, and of all together."""
    x, idx, weights, *matrices = args

    def loss(x, weights, *matrices):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(layer(x, idx, weights, *matrices)))

    found = jax.jit(layer)(*args), jax.eval_shape(layer, *args)
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert not np.asarray(got, np.float32).any()
    differentiable = (x, weights, *matrices)
    for argnums in ((0,), (1,), (2, 3), (0, 1, 2, 3)):
        gradients = jax.jit(jax.grad(loss, argnums=argnums))(*differentiable)
        for number, gradient in zip(argnums, gradients, strict=True):
            assert gradient.shape == differentiable[number].shape
            assert not np.asarray(gradient, np.float32).any()


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens(implementation, name, dtype):
    layer, options = LAYERS[name]
    mesh = make_mesh((W,), (EXPERT,), AxisType.Explicit)
    per_shard = functools.partial(layer, implementation=implementation, num_experts=E, **options)
    with jax.set_mesh(mesh):
        check(jax.shard_map(per_shard, in_specs=SPEC, out_specs=SPEC), arguments(mesh, dtype))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_no_tokens_sharded_moe(implementation, axis_type):
    mesh = make_mesh((W,), (EXPERT,), axis_type)
    check(sharded_moe(mesh, num_experts=E, implementation=implementation), arguments(mesh, F32))
