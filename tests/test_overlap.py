"""A shared expert on a second stream, next to the expert layer: docs/design/overlap.md."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import sharding

ON_STREAM = {"compute_type": "gpu_stream:1", "out_memory_spaces": jax.memory.Space.Device}


def test_shared_expert_on_second_stream(mesh, rng):
    """Results and gradients are the same, and the calls of both passes have the annotation and no all-reduce."""
    layer = sharding.sharded_moe(mesh, num_experts=8, implementation="xla")

    def expert(x, w_up, w_down):
        return jnp.tanh(x @ w_up) @ w_down

    def shared(x, *weights, aside):
        weights = (jax.lax.pcast(w, "expert", to="varying") for w in weights)
        return (compute_on(expert, **ON_STREAM) if aside else expert)(x, *weights)

    def loss(weights, x, idx, scale, aside):
        specs = P("expert"), P(), P()
        local = jax.shard_map(partial(shared, aside=aside), mesh=mesh, in_specs=specs, out_specs=specs[0])
        return jnp.sum(jnp.sin(layer(x, idx, scale, *weights[:2]) + local(x, *weights[2:])))

    tokens = NamedSharding(mesh, P("expert"))
    shapes = (8, 16, 32), (8, 16, 16), (16, 24), (24, 16), (8 * mesh.size, 16)
    *weights, x = (jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in shapes)
    idx = jnp.asarray(rng.integers(0, 8, (len(x), 2)), jnp.int32)
    arguments = weights, *(jax.device_put(a, tokens) for a in (x, idx, jnp.full(idx.shape, 0.5)))
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=4)
    for one, other in zip(*(jax.tree.leaves(step(*arguments, aside)) for aside in (True, False)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    text = step.trace(*arguments, True).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r'call @compute_on.*_xla_stream_annotation = "1"', text)) == 2
    moved = re.findall(r"func.func private @compute_on.*?\n  }", text, re.DOTALL)
    assert "dot_general" in "".join(moved)
    assert "all_reduce" not in "".join(moved)
