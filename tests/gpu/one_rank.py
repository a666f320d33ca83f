"""A small dispatch and combine on one device, for tools that check every memory access; see test_sanitizer.py."""

import json
import os

if "cpu" in os.environ.get("JAX_PLATFORMS", "").split(",")[:1]:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_ep
from harness import EXPERT, make_mesh, per_rank

# Odd sizes; some ids are not experts.
T, K, E = 21, 3, 5
CASES = [(np.float32, 65, None), (ml_dtypes.bfloat16, 200, None), (ml_dtypes.bfloat16, 384, jnp.float8_e4m3fn)]


def round_trip(x, ids, weights, wire_dtype):
    """Dispatch and combine every token, and send its weights, twice: the second call reuses the heap."""
    options = {"schedule": jax_ep.Schedule(wire_dtype=wire_dtype), "implementation": "triton"}
    for _ in range(2):
        d = jax_ep.dispatch(x, ids, weights, num_experts=E, capacity=T * K + 7, **options)
        x = jax_ep.combine(d.tokens, d.handle, **options)
    return x, d.weights, d.dropped


def main():
    """Run all cases in one process, because starting JAX under such a tool dominates."""
    jax_ep.init(transport="shared_memory" if jax.default_backend() == "cpu" else None)
    rng, mesh = np.random.default_rng(0), make_mesh((1,), (EXPERT,))
    ids = rng.integers(-1, E, (1, T, K), np.int32)
    weights = rng.random((1, T, K)).astype(np.float32)
    count = (ids >= 0).sum(-1, keepdims=True)
    right = []
    for dtype, hidden, wire_dtype in CASES:
        # One or minus one: exact in every wire dtype.
        x = (2 * rng.integers(0, 2, (1, T, hidden)) - 1).astype(dtype)
        run = jax.jit(per_rank(lambda *a, w=wire_dtype: round_trip(*a, w), mesh))
        sums, row_weights, dropped = (np.asarray(a) for a in run(x, ids, weights))
        wanted = (count**2 * x.astype(np.float32)).astype(np.float32)
        is_right = np.array_equal(sums.astype(np.float32), wanted) and not dropped.any()
        right.append(bool(is_right and np.isclose(row_weights.sum(), weights[ids >= 0].sum(), rtol=1e-5)))
    jax_ep.finalize()
    print(json.dumps({"right": right}), flush=True)


if __name__ == "__main__":
    main()
