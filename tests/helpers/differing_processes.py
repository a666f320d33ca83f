"""Run as one of two processes that test_processes.py starts; print the events as JSON."""

import dataclasses
import json
import os
import sys

import jax
import jax.numpy as jnp
from jax._src import distributed

import jax_ep
from meeting_processes import outcome

ME, ADDRESS = int(sys.argv[1]), sys.argv[2]
PATIENCE_S = 100.0  # Ten times as long between processes: beyond the time limit of the test.
SHORT_S = 0.2


TOPOLOGY = jax_ep.Topology(node="node", local="expert")
FLAT = {  # What each process traces over one axis.
    "tokens": ({"tokens": 5}, {"tokens": 6}),
    "experts": ({"experts": 16}, {"experts": 32}),
    "hidden": ({"hidden": 6}, {"hidden": 7}),
    "low latency": ({}, {"low_latency": True}),
    "wire": ({"wire_dtype": jnp.float8_e4m3fn, "hidden": 128}, {"hidden": 128}),
    "recipe": ({"layer": True, "hidden": 128, "recipe": "fp8"}, {"layer": True, "hidden": 128}),
    "weights": ({"weights": True}, {}),
    "combine": ({"combined": jnp.bfloat16}, {}),
}
OVER_NODES = {  # What each process traces over TOPOLOGY, or another axis_name.
    "node tokens": ({"tokens": 5}, {"tokens": 6}),
    "node experts": ({"experts": 16}, {"experts": 32}),
    "node K": ({"top_k": 1}, {"top_k": 2}),
    "node hidden": ({"hidden": 6}, {"hidden": 7}),
    "node capacity": ({"axis_name": dataclasses.replace(TOPOLOGY, node_capacity=3)}, {}),
    "node blocks": ({"layer": True, "axis_name": dataclasses.replace(TOPOLOGY, num_blocks=2)}, {"layer": True}),
    "node layer": ({"layer": True}, {}),
    "node wire": ({"wire_dtype": jnp.float8_e4m3fn, "hidden": 128}, {"hidden": 128}),
    "node or flat": ({}, {"axis_name": TOPOLOGY.axes}),
}


def trace(
    mesh,
    tokens=4,
    experts=8,
    hidden=4,
    top_k=2,
    *,
    low_latency=False,
    layer=False,
    axis_name="expert",
    wire_dtype=None,
    recipe=None,
    weights=False,
    combined=jnp.float32,
):
    """Lower an all-to-all on the mesh without running it."""
    options = {"num_experts": experts, "axis_name": axis_name}

    def fn(x, topk_idx):
        if low_latency:
            own = {"max_tokens_per_rank": tokens, "quantize": False}
            return jax_ep.low_latency_dispatch(x, topk_idx, **options, **own).tokens.sum()[None]
        if layer:
            num_local = experts // mesh.size
            matrices = jnp.ones((num_local, hidden, 256)), jnp.ones((num_local, 128, hidden))
            return jax_ep.moe(x, topk_idx, jnp.ones(topk_idx.shape), *matrices, recipe=recipe, **options)
        schedule, along = jax_ep.Schedule(wire_dtype=wire_dtype), jnp.ones(topk_idx.shape) if weights else None
        sent = jax_ep.dispatch(x, topk_idx, along, schedule=schedule, **options)
        return jax_ep.combine(sent.tokens.astype(combined), sent.handle, axis_name=axis_name)

    spread = jax.P(mesh.axis_names)
    rows, sharding = mesh.size * tokens, jax.NamedSharding(mesh, spread)
    x = jax.ShapeDtypeStruct((rows, hidden), jnp.float32, sharding=sharding)
    topk_idx = jax.ShapeDtypeStruct((rows, top_k), jnp.int32, sharding=sharding)
    jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spread, out_specs=spread)).lower(x, topk_idx)


def over(axis_name, mesh, different):
    """Return the outcome in a new context; the number of comparisons so far depends on which process notices first."""
    jax_ep.init(mesh, axis_name=axis_name, timeout_s=PATIENCE_S)
    trace(mesh, tokens=3, axis_name=axis_name)
    found = outcome(lambda: trace(mesh, **{"axis_name": axis_name} | different[ME]))
    jax_ep.finalize()
    return found


def main():
    """Run everything in one process pair, because starting JAX dominates."""
    asked_for = 2 + ME  # JAX treats process 1, which waits for a third, as one of two.
    jax.distributed.initialize(ADDRESS, asked_for, ME, cluster_detection_method="deactivate")
    mesh = jax.make_mesh((jax.device_count(),), ("expert",))
    own = jax.make_mesh((2,), ("expert",), devices=jax.local_devices())
    other = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:: 1 - 2 * ME])
    found = {"devices": jax.device_count()}
    found["world"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    distributed.global_state.num_processes = 2
    found["argument"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S + ME))
    found["order"] = outcome(lambda: jax_ep.init(other, timeout_s=PATIENCE_S))
    found["before init"] = outcome(lambda: trace(mesh, tokens=4 + ME))
    found["agree"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    found["same"] = outcome(lambda: trace(mesh))
    if ME == 0:
        found["on its own devices"] = outcome(lambda: trace(own))
    found["same again"] = outcome(lambda: trace(mesh, tokens=7))
    jax_ep.finalize()
    found["new context"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    found["same in it"] = outcome(lambda: trace(mesh, tokens=8))
    jax_ep.finalize()
    found |= {name: over("expert", mesh, different) for name, different in FLAT.items()}
    nodes = jax.make_mesh((2, 2), TOPOLOGY.axes)
    found |= {name: over(TOPOLOGY, nodes, different) for name, different in OVER_NODES.items()}
    if ME == 0:
        found["missing"] = outcome(lambda: jax_ep.init(mesh, timeout_s=SHORT_S))
    print(json.dumps(found), flush=True)
    os._exit(0)  # jax.distributed would wait for the other.


if __name__ == "__main__":
    main()
