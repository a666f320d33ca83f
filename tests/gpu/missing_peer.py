"""A program in which a rank is missing; test_failures.py runs it, and it prints the events as JSON.

    python tests/gpu/missing_peer.py never|late OPERATION

"never": a dispatch expects one rank more than launch it. "late": a rank reaches an operation after another has given
up. In both cases the context is then finalized and created again, and the same devices must give the same results.
"""

import functools
import json
import os
import sys
import time

if "cpu" in os.environ.get("JAX_PLATFORMS", "").split(",")[:1]:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from lateness import after, when

import jax_ep
from harness import EXPERT, make_mesh, per_rank
from jax_ep import context, interpreter
from jax_ep.ops import registry

# On CPU devices, idle time; on GPUs much longer than any call here takes.
TIMEOUT_S = 2.0 if jax.default_backend() == "cpu" else 10.0
T, K, H = 20, 2, 256
AXIS = (EXPERT,)


def start(num_ranks):
    """Create a mesh of the first devices and a context for it, so that XLA needs no collective."""
    mesh = make_mesh((num_ranks,), AXIS)
    jax_ep.init(mesh, transport="shared_memory" if jax.default_backend() == "cpu" else None, timeout_s=TIMEOUT_S)
    return mesh


def somebody_has_given_up():
    """Return whether a wait has expired: in a kernel, or on CPU devices in a launch that waits for all devices."""
    pool, heap = interpreter.current_pool(), context._heap
    return (pool is not None and pool._failure is not None) or (heap is not None and heap.failure() is not None)


def late(x, is_late, *earlier):
    """Return `x`, on a late rank after another has given up, and after `earlier`."""
    return when(somebody_has_given_up, after(x, *earlier), is_late)


def throughput(operation, x, ids, is_late):
    """Dispatch and combine every token: each token times its number of experts."""
    handle = jax_ep.dispatch(x, ids, num_experts=8, implementation="triton").handle
    # Late after all have planned, so that the others wait for its tokens.
    x = late(x, is_late, handle.assignment_to_row)
    d = jax_ep.dispatch(x, None, num_experts=8, handle=handle, implementation="triton")
    return jax_ep.combine(d.tokens, d.handle, implementation="triton")


def low_latency(operation, x, ids, is_late):
    """Compute the same with the kernels for small batches, with a late rank in one of them."""
    weights = jnp.ones(ids.shape, jnp.float32)
    x = x.astype(jnp.bfloat16)
    if operation == "low_latency_dispatch":
        x = late(x, is_late)
    sizes = {"num_experts": 8, "max_tokens_per_rank": T, "quantize": False, "implementation": "triton"}
    d = jax_ep.low_latency_dispatch(x, ids, **sizes)
    tokens = d.tokens if operation == "low_latency_dispatch" else late(d.tokens, is_late)
    if operation == "low_latency_gemm_combine":
        same = jnp.broadcast_to(jnp.eye(H, dtype=jnp.bfloat16), (tokens.shape[0], H, H))
        y = jax_ep.ops.moe_low_latency.low_latency_gemm_combine(
            tokens, same, d.group_sizes, ids, weights, d.handle, implementation="triton"
        )
    else:
        y = jax_ep.low_latency_combine(tokens, ids, weights, d.handle, implementation="triton")
    return y.astype(jnp.float32)


class Round:
    """A round trip on a mesh, compiled for the current context."""

    def __init__(self, mesh, operation):
        rng, num_ranks = np.random.default_rng(0), mesh.size
        self.x = rng.integers(-9, 9, (num_ranks, T, H)).astype(np.float32)
        self.ids = rng.integers(0, 8, (num_ranks, T, K), np.int32)
        self.mesh = mesh
        trip = low_latency if operation.startswith("low_latency") else throughput
        self._run = jax.jit(per_rank(functools.partial(trip, operation), mesh))

    def __call__(self, late=-1):
        """Return whether the result is right if rank `late` is late. Otherwise it must be NaN."""
        is_late = np.arange(self.mesh.size) == late
        y = np.asarray(self._run(self.x, self.ids, is_late))
        wrong = np.isfinite(y) & (y != K * self.x)
        if wrong.any():
            raise AssertionError(f"{wrong.sum()} of {wrong.size} numbers are wrong, and look like any others")
        return np.array_equal(y, K * self.x)


def outcome(call):
    """Repeat a call, like the steps of a program, and return the error that ends it, and the time."""
    begun = time.monotonic()
    try:
        for _ in range(3):
            jax.block_until_ready(call())
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"kind": "no error", "text": "", "seconds": time.monotonic() - begun}


def without_last_rank(everyone, work):
    """Dispatch to all ranks, but launch it on all except the last one."""
    run, options = registry.EXCHANGE.by("triton"), registry.options("dispatch", AXIS)
    layout = jax_ep.types.Layout(everyone.size, 8, T, K, capacity=everyone.size * T * K)
    handles = jax.jit(per_rank(lambda ids: run.plan(options, ids, layout), everyone))(work.ids)
    others = make_mesh((everyone.size - 1,), AXIS)
    handles, x = jax.tree.map(lambda leaf: np.asarray(leaf)[:-1], (handles, work.x))
    send = jax.jit(per_rank(lambda x, handle: run.dispatch_tokens(options, x, None, handle)[0], others))
    return lambda: send(x, handles)


def main(scenario, operation):
    """Fail, check what still works, restart, and print everything."""
    num_ranks = min(4, jax.device_count())
    work = Round(start(num_ranks), operation)
    found = {"ranks": num_ranks, "timeout_s": TIMEOUT_S, "right before": work()}
    fail = without_last_rank(work.mesh, work) if scenario == "never" else lambda: work(late=num_ranks - 1)
    found["failure"] = outcome(fail)
    found["same program after it"] = outcome(work)
    found["new program after it"] = outcome(Round(work.mesh, operation))
    jax_ep.finalize()
    work = Round(start(num_ranks), operation)
    found["right again"] = [work() for _ in range(3)]
    jax_ep.finalize()
    print(json.dumps(found), flush=True)
    os._exit(0)  # JAX raises the last failure of a callback again at exit.


if __name__ == "__main__":
    main(*sys.argv[1:])
