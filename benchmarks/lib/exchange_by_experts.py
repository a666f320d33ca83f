"""Part `exchange` of grouped_gemm.py: dispatch + combine against the number of experts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import jax_ep
from lib import harness
from lib.harness import Report
from lib.inputs import expert_mesh

NUM_DEVICES = 8


def dispatch_combine(num_experts: int, mesh: jax.sharding.Mesh) -> Callable[[Array, Array, Array], Array]:
    """Tokens to their experts, times their weights, and back."""

    def layer(x: Array, idx: Array, weights: Array) -> Array:
        d = jax_ep.dispatch(x, idx, weights, num_experts=num_experts)
        return jax_ep.combine(d.tokens * d.weights[:, None], d.handle)

    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))


def measure_exchange(report: Report, args: argparse.Namespace) -> None:
    """Dispatch + combine against the number of experts at the same tokens."""
    counts = (8, 64) if args.quick else (8, 16, 32, 64, 128, 256, 512)
    tokens, hidden, top_k = (8, 16, 2) if args.quick else (128, 256, 8)
    mesh = expert_mesh(NUM_DEVICES)
    rng = np.random.default_rng(0)
    placed = jax.NamedSharding(mesh, P("expert"))
    num_tokens = NUM_DEVICES * tokens
    x = rng.standard_normal((num_tokens, hidden)).astype(np.float32)
    weights = np.full((num_tokens, top_k), 1 / top_k, np.float32)
    runs = {}
    for count in counts:
        idx = np.argsort(rng.random((num_tokens, count)), axis=1)[:, :top_k].astype(np.int32)
        inputs = jax.device_put((x, idx, weights), placed)
        runs[count] = partial(dispatch_combine(count, mesh), *inputs)
        # The experts are identities and the weights sum to 1.
        np.testing.assert_allclose(np.asarray(runs[count]()), x, rtol=1e-5, atol=1e-5)
    times = harness.measure_interleaved(runs, args.rounds, title="exchange")
    shape = {"ranks": NUM_DEVICES, "tokens_per_rank": tokens, "hidden": hidden, "top_k": top_k, "dtype": "float32"}
    for count, timing in times.items():
        report.add("jax_ep dispatch+combine", shape | {"experts": count}, timing, part="exchange", direction="forward")
    ratio = times[counts[-1]].ratio_to(times[counts[0]])
    report.summarise(**{f"exchange_ratio_{counts[-1]}_to_{counts[0]}_experts": ratio})
    title = f"dispatch + combine, {tokens} tokens/rank, top {top_k}, hidden {hidden}, {NUM_DEVICES} CPU devices"
    harness.show_table(f"{title}: ms", list(map(str, counts)), [[t.milliseconds() for t in times.values()]])
    print(f"{counts[-1]} experts to {counts[0]}: {ratio:.2f}")
