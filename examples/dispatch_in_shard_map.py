"""Quickstart: dispatch, expert computation and combine inside `jax.shard_map`, checked against a dense layer.

python examples/dispatch_in_shard_map.py            # 8 virtual CPU devices, or all GPUs if there are any
"""

from __future__ import annotations

from lm.devices import prepare_cpu_devices

prepare_cpu_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402
from jax_ep.tools.command import run  # noqa: E402

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 2, 64, 256


def expert_layer(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array, w: jax.Array) -> jax.Array:
    """Run one rank's part: dispatch tokens to their experts, multiply by the expert weights, and combine."""
    d = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=EXPERTS)
    hidden = jax.nn.silu(jax_ep.grouped_gemm(d.tokens, w, d.group_sizes))
    return jax_ep.combine(hidden * d.weights[:, None], d.handle)


def main() -> float:
    """Run the layer over all devices; return its largest difference from the dense computation."""
    # Explicit axes are the default; shard_map works with either kind.
    mesh = jax.make_mesh((jax.device_count(),), ("expert",))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, HIDDEN))
    w = jax.random.normal(keys[1], (EXPERTS, HIDDEN, HIDDEN)) * HIDDEN**-0.5
    routing = jax_ep.topk_router(jax.random.normal(keys[2], (TOKENS, EXPERTS)), TOP_K)

    sharding = jax.sharding.NamedSharding(mesh, P("expert"))
    arguments = jax.device_put((x, routing.topk_idx, routing.topk_weights, w), sharding)
    layer = jax.jit(jax.shard_map(expert_layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    y = jax.device_get(layer(*arguments))

    every = jax.nn.silu(jnp.einsum("th,ehn->ten", x, w, precision="highest"))
    chosen = jnp.take_along_axis(every, routing.topk_idx[:, :, None], axis=1)
    error = float(jnp.abs(y - jnp.einsum("tkn,tk->tn", chosen, routing.topk_weights, precision="highest")).max())
    print(f"{TOKENS} tokens to {EXPERTS} experts on {mesh.size} devices: largest difference from dense {error:.1e}")
    return error


if __name__ == "__main__":
    run("dispatch_in_shard_map.py", main)
