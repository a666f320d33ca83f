"""`dispatch(balance=...)`, own GEMMs with the weights of copies, and `combine`: against the oracle for any routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BASE, F32, Shape, integers, reals
from harness import compiled, make_mesh, run
from jax_ep.placement import with_copies
from layers import Layer, check_gradients, check_routings, first_tokens, with_gradients
from routings import ROUTINGS, routings


def dispatched(implementation, shape, x, topk_idx, weights=None, **options):
    options = {"balance": jax_ep.Balance(1.0), "implementation": implementation} | options
    return jax_ep.dispatch(x, topk_idx, weights, num_experts=shape.num_experts, **options)


def layer_of(implementation, shape, **options):
    """The expert layer made of the parts."""

    def call(x, topk_idx, topk_weights, *weights):
        d = dispatched(implementation, shape, x, topk_idx, topk_weights, **options)
        w_gate_up, w_down = with_copies(weights, d.handle)
        hidden = jax_ep.grouped_gemm(d.tokens, w_gate_up, d.group_sizes, implementation=implementation)
        gate, up = jnp.split(hidden, 2, axis=1)
        rows = jax_ep.grouped_gemm(jax.nn.silu(gate) * up, w_down, d.group_sizes, implementation=implementation)
        return jax_ep.combine(rows * d.weights[:, None], d.handle, implementation=implementation)

    return call


@pytest.mark.parametrize("balance", [jax_ep.Balance(1.0), jax_ep.Balance(1.5)], ids=lambda b: str(b.rows))
@pytest.mark.slow(unless={"balance": [jax_ep.Balance(1.0)]})
def test_balanced_dispatch_gradients(implementation, balance, mesh, rng, subtests):
    call = compiled(with_gradients(layer_of(implementation, BASE, balance=balance)), mesh)
    check_routings(call, routings(implementation, mesh.size), mesh, rng, subtests, BASE)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.slow(unless={"alignment": [8]})
def test_balanced_dispatch_rows(implementation, alignment, expert_mesh, rng, subtests):
    """Every rank has R rows, each assignment has one of them, and sums of integers come back exactly."""
    shape = Shape(num_tokens=7, top_k=2, num_experts=12)

    def fn(x, topk_idx, w):
        d = dispatched(implementation, shape, x, topk_idx, alignment=alignment)
        again = jax_ep.dispatch(x, None, num_experts=12, handle=d.handle, implementation=implementation)
        whole, experts = with_copies(w, d.handle), jax_ep.row_experts(d.handle)
        found = jnp.where(experts < 0, -1, whole[experts, 0])
        y = jax_ep.combine(again.tokens * found[:, None], d.handle, implementation=implementation)
        return y, d.group_sizes, d.dropped, d.handle.num_invalid, d.tokens

    call = compiled(fn, expert_mesh(4))
    for name in ("uniform", "one_hot_every_slot", "idle_ranks", "out_of_range"):
        with subtests.test(name):
            x, ids = integers(rng, 4, 7, 10), ROUTINGS[name](rng, 4, shape)
            w = np.arange(1, 13, dtype=F32).reshape(4, 3, 1)
            y, sizes, dropped, invalid, tokens = call(x, ids, w)
            is_used = (ids >= 0) & (ids < 12)
            np.testing.assert_array_equal(y, x * np.where(is_used, ids + 1, 0).sum(-1, keepdims=True).astype(F32))
            assert sizes.shape == (4, 6) and tokens.shape[1] == (14 if alignment == 1 else 56)
            assert not dropped.any() and invalid.sum() == np.sum((ids < -1) | (ids >= 12))
            if alignment == 1:
                assert sizes.sum(1).max() <= 14 and sizes.sum() == is_used.sum()
            assert not (sizes % alignment).any()


def test_balanced_dispatch_counts_what_few_copies_cannot_place(implementation, expert_mesh, rng):
    """Rank 0 has all rows of its 4 experts; with one copy 9 of the 18 rows it has too many stay there."""
    ids = np.arange(36, dtype=np.int32).reshape(2, 6, 3) % 4

    def fn(x, topk_idx):
        d = dispatched(implementation, BASE, x, topk_idx, balance=jax_ep.Balance(1.0, 1))
        return d.dropped, d.group_sizes.sum()[None]

    dropped, rows = run(fn, expert_mesh(2), reals(rng, 2, 6, 10), ids)
    assert np.sum(dropped) == 9 and rows.ravel().tolist() == [18, 9]


def test_balanced_dispatch_quantized_weights(implementation, expert_mesh, rng):
    """Values and scales of copies are those of their home, and so are masks and one element of 4 bits per expert."""
    shape = Shape(num_tokens=4, top_k=1, num_experts=4, hidden=128)

    def fn(x, topk_idx, w):
        d = dispatched(implementation, shape, x, topk_idx)
        few_bits = jnp.clip(w[:, 0, 0] * 4, -7, 7).astype(jnp.int4)
        whole, *others = with_copies((jax_ep.quantize(w, "int8"), w > 0, few_bits), d.handle)
        home = jax_ep.dequantize(jax_ep.quantize(w, "int8"), F32)
        return jax_ep.dequantize(whole, F32), d.handle.copies, home, *others

    w = reals(rng, 2, 2, 128, 16)
    ids = np.zeros((2, 4, 1), np.int32)
    whole, copies, home, is_positive, few_bits = run(fn, expert_mesh(2), reals(rng, 2, 4, 128), ids, w)
    assert copies[1].tolist() == [[-1, -1], [0, -1]]
    np.testing.assert_array_equal(whole[:, :2], home)
    np.testing.assert_array_equal(whole[1, 2], home[0, 0])
    np.testing.assert_array_equal(is_positive[1, 2], w[0, 0] > 0)
    assert few_bits[1, 2] == few_bits[0, 0]


@pytest.mark.slow
def test_balanced_dispatch_num_tokens(implementation, expert_mesh, rng):
    """Tokens past the number have no rows, and gradients of the others are those of ids of -1."""
    layer = Layer(rng, "uniform", 2, BASE)
    layer.topk_idx = np.stack([first_tokens(ids, 4) for ids in layer.topk_idx])
    d_out = reals(rng, *layer.x.shape)
    call = run(with_gradients(layer_of(implementation, BASE, num_tokens=4)), expert_mesh(2), *layer.args, d_out)
    check_gradients(call, layer, d_out)


@pytest.mark.slow
def test_balanced_dispatch_batch_axis(implementation, rng):
    """Two groups of ranks balance by themselves; the weights vary over the experts alone."""
    layers = [Layer(rng, routing, 2, BASE) for routing in ("uniform", "one_hot")]
    arrays = [np.stack(pair) for pair in zip(*(layer.args for layer in layers), strict=True)]
    d_out = reals(rng, *arrays[0].shape)
    got = run(with_gradients(layer_of(implementation, BASE)), make_mesh((2, 2), ("data", "expert")), *arrays, d_out)
    for i, layer in enumerate(layers):
        check_gradients([g[i] for g in got], layer, d_out[i])


@pytest.mark.slow
def test_balanced_dispatch_vmap(implementation, expert_mesh, rng):
    layers = [Layer(rng, "uniform", 2, BASE) for _ in range(2)]
    arrays = [np.stack(pair, axis=1) for pair in zip(*(layer.args for layer in layers), strict=True)]
    d_out = reals(rng, *arrays[0].shape)
    got = run(jax.vmap(with_gradients(layer_of(implementation, BASE))), expert_mesh(2), *arrays, d_out)
    for i, layer in enumerate(layers):
        check_gradients([g[:, i] for g in got], layer, d_out[:, i])


def test_balanced_dispatch_mistakes(expert_mesh, rng, subtests):
    x, ids = reals(rng, 2, 6, 10), ROUTINGS["uniform"](rng, 2, BASE)

    def call(fn):
        run(fn, expert_mesh(2), x, ids)

    def again(x, ids):
        handle = dispatched(None, BASE, x, ids).handle
        return dispatched(None, BASE, x, ids, handle=handle).tokens

    with subtests.test("handle"), pytest.raises(ValueError, match=r"dispatch: balance with a handle, expected one"):
        call(again)
    with subtests.test("capacity"), pytest.raises(ValueError, match=r"dispatch: capacity=8 with balance"):
        call(lambda x, ids: dispatched(None, BASE, x, ids, capacity=8).tokens)
    with subtests.test("type"), pytest.raises(TypeError, match=r"dispatch: balance is a float"):
        call(lambda x, ids: dispatched(None, BASE, x, ids, balance=1.1).tokens)
    with subtests.test("experts"), pytest.raises(ValueError, match=r"with_copies: weights has shape \(3, 2\)"):
        call(lambda x, ids: with_copies(jnp.ones((3, 2)), dispatched(None, BASE, x, ids).handle))
    with subtests.test("keys"), pytest.raises(TypeError, match=r"with_copies: weights has dtype key<fry>, exp"):
        call(lambda x, ids: with_copies(jax.random.split(jax.random.key(0), 4), dispatched(None, BASE, x, ids).handle))
    with subtests.test("no handle"), pytest.raises(TypeError, match=r"with_copies: handle is a dict"):
        with_copies(jnp.ones((3, 2)), {})
