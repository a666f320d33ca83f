"""One of two processes that test_processes.py starts; prints, as JSON, what has happened in it.

python tests/helpers/differing_processes.py PROCESS COORDINATOR
"""

from __future__ import annotations

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax._src import distributed

import jax_ep
from meeting_processes import outcome

ME, ADDRESS = int(sys.argv[1]), sys.argv[2]
PATIENCE_S = 100.0  # ten times as long between processes: beyond the time limit of the test
SHORT_S = 0.2


def trace(mesh: jax.sharding.Mesh, tokens: int = 4, experts: int = 8, hidden: int = 4, *, low_latency: bool = False):
    """Lowers an exchange on the mesh, and runs nothing."""

    def fn(x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        if low_latency:
            options = {"max_tokens_per_rank": tokens, "quantize": False}
            return jax_ep.low_latency_dispatch(x, topk_idx, num_experts=experts, **options).tokens.sum()[None]
        sent = jax_ep.dispatch(x, topk_idx, num_experts=experts)
        return jax_ep.combine(sent.tokens, sent.handle)

    spread = jax.P("expert")
    rows, sharding = mesh.size * tokens, jax.NamedSharding(mesh, spread)
    x = jax.ShapeDtypeStruct((rows, hidden), jnp.float32, sharding=sharding)
    topk_idx = jax.ShapeDtypeStruct((rows, 2), jnp.int32, sharding=sharding)
    jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spread, out_specs=spread)).lower(x, topk_idx)


def main() -> None:
    """Everything in one life of the two processes, because starting JAX takes the longest."""
    asked_for = 2 + ME  # JAX takes process 1, which waits for a third, for one of two
    jax.distributed.initialize(ADDRESS, asked_for, ME, cluster_detection_method="deactivate")
    mesh = jax.make_mesh((jax.device_count(),), ("expert",))
    own = jax.make_mesh((2,), ("expert",), devices=jax.local_devices())
    other = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:: 1 - 2 * ME])
    found: dict[str, object] = {"devices": jax.device_count()}
    found["world"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    distributed.global_state.num_processes = 2
    found["argument"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S + ME))
    found["order"] = outcome(lambda: jax_ep.init(other, timeout_s=PATIENCE_S))
    found["before init"] = outcome(lambda: trace(mesh, tokens=4 + ME))
    found["agree"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    found["same"] = outcome(lambda: trace(mesh))
    found["tokens"] = outcome(lambda: trace(mesh, tokens=5 + ME))
    found["experts"] = outcome(lambda: trace(mesh, experts=16 * (1 + ME)))
    found["hidden"] = outcome(lambda: trace(mesh, hidden=6 + ME))
    found["low latency"] = outcome(lambda: trace(mesh, low_latency=ME == 1))
    if ME == 0:
        found["on its own devices"] = outcome(lambda: trace(own))
    found["same again"] = outcome(lambda: trace(mesh, tokens=7))
    jax_ep.finalize()
    found["new context"] = outcome(lambda: jax_ep.init(mesh, timeout_s=PATIENCE_S))
    found["same in it"] = outcome(lambda: trace(mesh, tokens=8))
    jax_ep.finalize()
    if ME == 0:
        found["missing"] = outcome(lambda: jax_ep.init(mesh, timeout_s=SHORT_S))
    print(json.dumps(found), flush=True)
    os._exit(0)  # jax.distributed would wait for the other


if __name__ == "__main__":
    main()
