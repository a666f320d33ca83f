"""The launches of a dispatch with router weights: those for tokens, and none for weights alone."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from cases import BF16
from jax_ep import tracing
from jax_ep.types import Schedule

pytest.importorskip("triton")

W, T, K, E, H, INNER = 2, 6, 2, 4, 128, 128
OPTIONS: dict[str, Any] = {"num_experts": E, "implementation": "triton"}


def round_trip(x, ids, weights, *_):
    sent = jax_ep.dispatch(x, ids, weights, **OPTIONS)
    return jax_ep.combine(sent.tokens * sent.weights[:, None].astype(x.dtype), sent.handle, implementation="triton")


def layer(**options):
    schedule = {
        name: options.pop(name) for name in ("dispatch_mode", "combine_mode", "fuse_weight_gradients", "wire_dtype")
    }
    return lambda *args: jax_ep.moe(*args, **OPTIONS, **options, schedule=Schedule(**schedule))


MODES = {"dispatch_mode": "fused", "combine_mode": "scatter", "fuse_weight_gradients": None, "wire_dtype": None}
SERIAL = {"dispatch_mode": "serial", "combine_mode": "serial", "fuse_weight_gradients": None, "wire_dtype": None}
FP8 = {"wire_dtype": jnp.float8_e4m3fn}
# Forward, and both passes: tokens are sent again for the gradient of the first weights.
PROGRAMS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "dispatch, combine": (round_trip, {"dispatch": 1, "combine": 1}, {"dispatch": 2, "combine": 2}),
    "one launch": (
        layer(**MODES),
        {"dispatch_gemm": 1, "gemm_combine": 1},
        {"dispatch_gemm": 2, "gemm_combine": 2, "dispatch": 1},
    ),
    "two launches": (layer(**SERIAL), {"dispatch": 1, "combine": 1}, {"dispatch": 3, "combine": 2}),
    "fp8 wire": (layer(**SERIAL | FP8), {"dispatch": 1, "combine": 1}, {"dispatch": 3, "combine": 2}),
    "combine with the weight gradient": (
        layer(**SERIAL | {"fuse_weight_gradients": True}),
        {"dispatch": 1, "combine": 1},
        {"dispatch": 3, "combine": 1, "combine_with_weight_gradient": 1},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(unless={"name": ["dispatch, combine"]})
def test_launch_counts_router_weights(name, two_ranks, rng):
    fn, forward, both = PROGRAMS[name]
    ids = np.argsort(rng.random((W, T, E)), axis=2)[:, :, :K].astype(np.int32)
    weights = rng.random((W, T, K)).astype(np.float32)
    shapes = ((W, T, H), (W, E // W, H, 2 * INNER), (W, E // W, INNER, H))
    x, gate_up, down = (rng.normal(size=shape).astype(BF16) for shape in shapes)

    def both_passes(x, ids, *others):
        y, pull = jax.vjp(lambda x, *others: fn(x, ids, *others), x, *others)
        return y, pull(jnp.ones_like(y))

    for program, wanted in ((fn, forward), (both_passes, both)):
        with tracing.record() as recording:
            harness.run(program, two_ranks, x, ids, weights, gate_up, down)
        launches = Counter(launch.kernel for launch in recording.trace.launches.values())
        assert launches == {kernel: W * count for kernel, count in ({"plan": 1} | wanted).items()}
