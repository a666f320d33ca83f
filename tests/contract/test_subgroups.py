"""Expert parallelism over some axes of a larger mesh, and over several axes at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
import oracle
import oracle_serving
from cases import Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import make_mesh, per_rank, run, to_numpy
from oracle_experts import MoE
from routings import ROUTINGS

SHAPE = Shape(num_tokens=4, top_k=2, num_experts=4, hidden=6, intermediate=4)


class Groups:
    """`num_groups` independent EP groups that share the experts' weights; tokens are [D, W, ...]."""

    def __init__(self, rng, num_groups, num_ranks):
        experts, hidden, size = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
        names = ("uniform", "duplicates", "zipf", "one_hot")
        self.topk_idx = np.stack([ROUTINGS[names[i]](rng, num_ranks, SHAPE) for i in range(num_groups)])
        self.x, self.d_out = (reals(rng, num_groups, num_ranks, SHAPE.num_tokens, hidden) for _ in range(2))
        self.topk_weights = probabilities(rng, *self.topk_idx.shape)
        self.w_gate_up, self.w_down = reals(rng, experts, hidden, 2, size), reals(rng, experts, size, hidden)

    def check(self, out, gradients):
        """Check that every group equals the oracle alone, with weight gradients summed over the groups."""
        dx, d_topk_weights, d_gate_up, d_down = gradients
        total_gate_up, total_down = np.zeros(self.w_gate_up.shape), np.zeros(self.w_down.shape)
        for i in range(len(self.x)):
            lay = oracle.layout(self.topk_idx[i], SHAPE.num_experts)
            flat = self.w_gate_up.reshape(*self.w_gate_up.shape[:2], -1)
            layer = MoE(self.x[i], self.topk_weights[i], flat, self.w_down, lay)
            assert_close(out[i], layer.forward(), f"group {i}")
            want = layer.gradients(self.d_out[i].astype(np.float64))
            assert_close(dx[i], want[0], f"dx of group {i}")
            assert_close(d_topk_weights[i], want[1], f"d_topk_weights of group {i}")
            total_gate_up += want[2].reshape(total_gate_up.shape)
            total_down += want[3]
        assert_close(d_gate_up, total_gate_up, "d_w_gate_up")
        assert_close(d_down, total_down, "d_w_down")


def value_and_vjp(layer, groups):
    @jax.jit
    def fn(x, topk_weights, w_gate_up, w_down, topk_idx, d_out):
        out, vjp = jax.vjp(lambda *a: layer(*a, topk_idx), x, topk_weights, w_gate_up, w_down)
        return out, vjp(d_out)

    return to_numpy(fn(groups.x, groups.topk_weights, groups.w_gate_up, groups.w_down, groups.topk_idx, groups.d_out))


def shard_layer(implementation, mesh, *, data="data", tensor=False, **options):
    """Return the layer on global arrays: tokens sharded over data and expert, weights over expert (and tensor)."""

    def body(x, topk_weights, w_gate_up, w_down, topk_idx):
        x, topk_weights, topk_idx = (a[0, 0] for a in (x, topk_weights, topk_idx))
        w_gate_up = w_gate_up.reshape(*w_gate_up.shape[:2], -1)
        out = jax_ep.moe(
            x, topk_idx, topk_weights, w_gate_up, w_down, num_experts=SHAPE.num_experts, implementation=implementation
        )
        return (jax.lax.psum(out, "tensor") if tensor else out)[None, None]

    tokens, split = P(data, "expert"), "tensor" if tensor else None
    weights = P("expert", None, None, split), P("expert", split)
    return jax.shard_map(body, mesh=mesh, in_specs=(tokens, tokens, *weights, tokens), out_specs=tokens, **options)


MESHES = [
    (("data", "expert"), {}),
    (("expert", "data"), {}),  # The ranks of one group are not adjacent: device order differs from group order.
    (("tensor", "expert", "data"), {"tensor": True}),
    pytest.param(("data", "expert", "tensor"), {"tensor": True}, marks=pytest.mark.slow),
    pytest.param(("data", "expert"), {"check_vma": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("names", "options"), MESHES)
def test_subgroups_of_a_mesh(implementation, names, options, rng):
    """Tokens are replicated over tensor, the experts' hidden columns sharded over it, and partial outputs summed."""
    mesh, groups = make_mesh((2,) * len(names), names), Groups(rng, 2, 2)
    groups.check(*value_and_vjp(shard_layer(implementation, mesh, **options), groups))


def test_subgroups_automatic_axes(implementation, rng):
    """shard_map is over the expert axis only; XLA keeps the data axis."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    groups = Groups(rng, 1, 2)
    layer = shard_layer(implementation, mesh, data=None, axis_names={"expert"})
    groups.check(*value_and_vjp(layer, groups))


@pytest.mark.parametrize("axis_name", [("data", "expert"), ("expert", "data")], ids="-".join)
@pytest.mark.slow(unless={"axis_name": [("expert", "data")]})
def test_subgroups_group_over_two_axes(implementation, axis_name, rng):
    """Ranks are numbered in the order of the given names, as in `lax.axis_index`, not in the order of the mesh."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    options = {"num_experts": SHAPE.num_experts, "axis_name": axis_name, "implementation": implementation}

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, y, d_out):
        sent = jax_ep.dispatch(x, topk_idx, topk_weights, **options)
        back = jax_ep.combine(y, sent.handle, axis_name=axis_name, implementation=implementation)
        out, vjp = jax.vjp(lambda *a: jax_ep.moe(a[0], topk_idx, *a[1:], **options), x, topk_weights, w_gate_up, w_down)
        return sent.tokens, back, out, vjp(d_out)

    groups = Groups(rng, 1, 4)
    lay = oracle.layout(groups.topk_idx[0], SHAPE.num_experts)
    y = integers(rng, *lay.source.shape, SHAPE.hidden)
    flat = groups.w_gate_up.reshape(*groups.w_gate_up.shape[:2], -1)
    tokens, back, out, gradients = run(
        fn, mesh, groups.x[0], groups.topk_idx[0], groups.topk_weights[0], flat[:, None], groups.w_down[:, None], y,
        groups.d_out[0], axes=(axis_name,),
    )  # fmt: skip
    assert_same_bits(tokens, oracle.gather(groups.x[0], lay), "tokens")
    np.testing.assert_array_equal(back, oracle.combine(y, lay))
    dx, d_topk_weights, d_gate_up, d_down = gradients
    groups.check(out[None], (dx[None], d_topk_weights[None], d_gate_up.reshape(groups.w_gate_up.shape), d_down[:, 0]))


def test_subgroups_axes_of_size_one(implementation, rng):
    """A handle of a dispatch over one axis works in a combine over the same ranks, however many axes name them."""
    mesh = make_mesh((2, 1), ("expert", "single"))

    def fn(x, topk_idx, y):
        sent = jax_ep.dispatch(x, topk_idx, num_experts=SHAPE.num_experts, implementation=implementation)
        return jax_ep.combine(y, sent.handle, axis_name=("single", "expert"), implementation=implementation)

    groups = Groups(rng, 1, 2)
    lay = oracle.layout(groups.topk_idx[0], SHAPE.num_experts)
    y = integers(rng, *lay.source.shape, SHAPE.hidden)
    got = run(fn, mesh, groups.x[0], groups.topk_idx[0], y, axes=(("expert", "single"),))
    np.testing.assert_array_equal(got, oracle.combine(y, lay))


def test_subgroups_low_latency(implementation, rng):
    mesh = make_mesh((2, 2), ("data", "expert"))
    groups = Groups(rng, 2, 2)

    def fn(x, topk_idx, topk_weights):
        out = jax_ep.low_latency_dispatch(
            x, topk_idx, num_experts=4, max_tokens_per_rank=5, quantize=False, implementation=implementation
        )
        back = jax_ep.low_latency_combine(
            out.tokens * jnp.asarray(2, x.dtype), topk_idx, topk_weights, out.handle, implementation=implementation
        )
        return out.tokens, back

    tokens, back = to_numpy(jax.jit(per_rank(fn, mesh))(groups.x, groups.topk_idx, groups.topk_weights))
    for i in range(2):
        lay = oracle_serving.low_latency_layout(groups.topk_idx[i], 4, 5)
        rows = oracle.gather(groups.x[i], lay)
        assert_same_bits(tokens[i], rows, f"tokens of group {i}")
        want = oracle_serving.low_latency_combine(2 * rows, groups.topk_idx[i], groups.topk_weights[i], lay)
        assert_close(back[i], want, f"output of group {i}")
