"""Run as one of several processes with one GPU each; one kills itself between two calls. See test_failures.py.

    python tests/gpu/killed_peer.py COUNT COORDINATOR VICTIM PATH PROCESS

PATH is "throughput" or "low_latency". Prints the events as JSON. With victim -1, no process dies.
"""

import json
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import EXPERT, make_mesh, per_rank, place

COUNT, ADDRESS, VICTIM, PATH, ME = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
TIMEOUT_S = 10.0  # Much longer than any call here takes.
STEPS_BEFORE, STEPS_AFTER = 5, 20
T, K, H = 64, 2, 512


def plan(x, ids):
    """Return the handle; XLA's collectives, which have no timeout, run only here."""
    return jax_ep.dispatch(x, ids, num_experts=8, implementation="triton").handle


def round_trip(x, ids, handle):
    """Dispatch and combine every token: each token times its number of experts."""
    if PATH == "low_latency":
        sizes = {"num_experts": 8, "max_tokens_per_rank": T, "quantize": False, "implementation": "triton"}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes)
        weights = jnp.ones(ids.shape, jnp.float32)
        return jax_ep.low_latency_combine(d.tokens, ids, weights, d.handle, implementation="triton")
    d = jax_ep.dispatch(x, None, num_experts=8, handle=handle, implementation="triton")
    return jax_ep.combine(d.tokens, d.handle, implementation="triton")


def main():
    """Run some steps, then one process dies, then run steps until an error, or to the end."""
    own = {"local_device_ids": [ME], "cluster_detection_method": "deactivate"}
    jax.distributed.initialize(ADDRESS, COUNT, ME, **own)
    mesh = make_mesh((COUNT,), (EXPERT,))
    jax_ep.init(mesh, timeout_s=TIMEOUT_S, heap_bytes=64 << 20)
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (COUNT, T, H)).astype(np.float32)
    ids = rng.integers(0, 8, (COUNT, T, K), np.int32)
    arguments = place((x, ids), mesh, P(EXPERT))
    handle = jax.block_until_ready(jax.jit(per_rank(plan, mesh))(*arguments))
    step = jax.jit(per_rank(round_trip, mesh))

    def right():
        return np.array_equal(np.asarray(step(*arguments, handle).addressable_shards[0].data)[0], K * x[ME])

    before = [right() for _ in range(STEPS_BEFORE)]
    found = {"right": all(before), "timeout_s": TIMEOUT_S}
    if ME == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    begun, kind, text = time.monotonic(), "no error", ""
    try:
        for _ in range(STEPS_AFTER):
            found["right"] &= right() or VICTIM >= 0
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    found["failure"] = {"kind": kind, "text": text, "seconds": time.monotonic() - begun}
    print(json.dumps(found), flush=True)
    if VICTIM >= 0:
        time.sleep(2 * TIMEOUT_S if ME == 0 else 0)  # The coordinator exits last.
        os._exit(0)  # finalize() and jax.distributed would wait for the dead process.
    jax_ep.finalize()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
