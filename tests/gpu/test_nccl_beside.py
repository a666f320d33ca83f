"""All-to-alls next to XLA's collectives, which NCCL runs on other streams, without a deadlock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lateness import ON_GPU, in_order

import harness
import jax_ep
from cases import BF16, Shape, assert_close, integers, reals
from routings import ROUTINGS

SHAPE = Shape(num_tokens=256 if ON_GPU else 12, top_k=2, num_experts=8, hidden=2048 if ON_GPU else 32)
ITERATIONS, WORDS = (400, 1 << 21) if ON_GPU else (4, 64)
AXIS = harness.EXPERT
SCHEDULERS = {"default": {}, "latency-hiding": {"xla_gpu_enable_latency_hiding_scheduler": True}}


def collectives(z):
    """Run three independent collectives on `[W, N]` int32: an all-to-all of blocks, a sum, and all first blocks."""
    return lax.all_to_all(z, AXIS, 0, 0), lax.psum(z, AXIS), lax.all_gather(z[0], AXIS)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nccl_independent_collectives(scheduler, mesh):
    """In one loop, dispatch and combine tokens, and send other arrays through psum, all_gather and all_to_all."""
    num_ranks, rng = mesh.size, np.random.default_rng(0)
    ids = ROUTINGS["uniform"](rng, num_ranks, SHAPE)
    x = integers(rng, num_ranks, SHAPE.num_tokens, SHAPE.hidden, dtype=BF16)
    z = rng.integers(-1000, 1000, (num_ranks, num_ranks, WORDS // num_ranks), np.int32)
    half = np.asarray(0.5, BF16)  # top-2: the combined result is twice the input.

    def fn(x, ids, z):
        def step(carry, _):
            x, z, total, different = carry
            d = jax_ep.dispatch(x, ids, num_experts=SHAPE.num_experts, implementation="triton")
            back = half * jax_ep.combine(d.tokens, d.handle, implementation="triton")
            different = different + jnp.sum(back != x, dtype=jnp.int32)
            z, summed, gathered = collectives(in_order(z, d.tokens, back))
            total = total + summed[0] + gathered.sum(axis=0)
            return (in_order(back, total), z, total, different), None

        return lax.scan(step, (x, z, 0 * z[0], 0 * ids[0, 0]), None, length=ITERATIONS)[0]

    run = jax.jit(harness.per_rank(fn, mesh), compiler_options=SCHEDULERS[scheduler] if ON_GPU else {})
    arguments = [harness.place(a, mesh, jax.sharding.PartitionSpec(AXIS)) for a in (x, ids, z)]
    got_x, got_z, total, different = harness.to_numpy(run(*arguments))
    np.testing.assert_array_equal(different, np.zeros(num_ranks, np.int32))
    np.testing.assert_array_equal(got_x.astype(np.float32), x.astype(np.float32))
    # The all-to-all of blocks is its own inverse.
    turns = [z, z.transpose(1, 0, 2)]
    np.testing.assert_array_equal(got_z, turns[ITERATIONS % 2])
    each = [turn.sum(axis=0)[0] + turn[:, 0].sum(axis=0) for turn in turns]
    wanted = ((ITERATIONS + 1) // 2 * each[0].astype(np.int64) + ITERATIONS // 2 * each[1]).astype(np.int32)
    np.testing.assert_array_equal(total, np.broadcast_to(wanted, total.shape))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nccl_remat_gradients(scheduler, mesh):
    """`lax.scan` over `jax.checkpoint`: the backward pass repeats every all-to-all, next to sums over all ranks."""
    num_ranks, num_layers = mesh.size, 8 if ON_GPU else 2
    rng = np.random.default_rng(1)
    shape = Shape(SHAPE.num_tokens // 2, SHAPE.top_k, SHAPE.num_experts, SHAPE.hidden // 4)
    ids = np.stack([ROUTINGS["zipf"](rng, num_ranks, shape) for _ in range(num_layers)], axis=1)
    x, z = (reals(rng, num_ranks, shape.num_tokens, shape.hidden) / 4 for _ in range(2))
    scales = reals(rng, num_ranks, num_layers, shape.hidden)

    def loss(x, z, scales, ids, implementation):
        @jax.checkpoint
        def layer(carry, layer):
            (x, z), (scale, ids) = carry, layer
            d = jax_ep.dispatch(x, ids, num_experts=shape.num_experts, implementation=implementation)
            y = jnp.tanh(d.tokens * scale[None])
            x = x + jax_ep.combine(y, d.handle, implementation=implementation)
            z = jnp.tanh(z + lax.pmean(in_order(z, x) * scale[None], AXIS))
            return (in_order(x, z), z), None

        (x, z), _ = lax.scan(layer, (x, z), (scales, ids))
        return jnp.sum(x * z)

    found = {}
    for implementation in ("triton", "xla"):
        gradients = jax.value_and_grad(lambda *a, name=implementation: loss(*a, name), argnums=(0, 1, 2))
        run = jax.jit(harness.per_rank(gradients, mesh), compiler_options=SCHEDULERS[scheduler] if ON_GPU else {})
        arguments = [harness.place(a, mesh, jax.sharding.PartitionSpec(AXIS)) for a in (x, z, scales, ids)]
        found[implementation] = harness.to_numpy(run(*arguments))
    for got, want in zip(*(jax.tree.leaves(found[name]) for name in ("triton", "xla")), strict=True):
        assert np.abs(want).max() > 0
        assert_close(got, want, tolerance=1e-4)
