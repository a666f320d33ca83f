"""The expert layer for decode-sized batches on several GPUs: low-latency paths compared with that of training.

Part of low_latency.py. Variants, in FP8 and in bfloat16:

  low latency             dispatch, GEMM, activation, and GEMM + combine in one kernel (`low_latency_moe`)
  low latency, separate   the same with GEMM and combine in two kernels
  moe                     the path of training, in bfloat16; where its time crosses the others', a program should
                          switch between them (`jax_ep.serving.LOW_LATENCY_TOKENS`)

Times are differences of two chains of layers; each layer takes the result of the previous one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep.core.expert_matrices import ExpertWeights
from jax_ep.serving import serving_weights
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.decode_experts import LENGTHS, QUICK_LENGTHS
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.benchmark.inputs import AXIS, Model, make_weights, routing

SPEC = jax.P(*AXIS)
Layer = Callable[..., Array]  # x, ids, weights, matrices -> x


def low_latency(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: ExpertWeights) -> Array:
    """Run the layer with GEMM and combine in one kernel."""
    options: dict[str, Any] = {"num_experts": model.experts, "implementation": name}
    return jax_ep.low_latency_moe(x, ids, weights, w.w_gate_up, w.w_down, **options)


def separate(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: ExpertWeights) -> Array:
    """Run `low_latency_moe` with GEMM and combine in two kernels."""
    fp8 = w.w_gate_up.activations == "fp8"
    sizes = {"num_experts": model.experts, "max_tokens_per_rank": x.shape[0], "quantize": fp8}
    d = jax_ep.low_latency_dispatch(x, ids, **sizes, implementation=name)
    expected = max(1, -(-d.handle.layout.num_ranks * ids.size // model.experts))
    multiply = partial(
        jax_ep.masked_grouped_gemm,
        group_sizes=d.group_sizes,
        preferred_element_type=x.dtype,
        expected_rows=expected,
        implementation=name,
    )
    hidden = multiply(d.tokens, w.w_gate_up, lhs_scales=d.scales)
    rows, scales = jax_ep.ops.masked.masked_gated_activation(hidden, d.group_sizes, quantize=fp8, implementation=name)
    y = multiply(rows, w.w_down, lhs_scales=scales)
    return jax_ep.low_latency_combine(y, ids, weights, d.handle, implementation=name)


def training(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: tuple[Array, Array]) -> Array:
    """Run the layer of training."""
    return jax_ep.moe(x, ids, weights, *w, num_experts=model.experts, implementation=name)


def chain(mesh: jax.sharding.Mesh, layer: Layer, arrays: tuple[Any, ...], n: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a function of n layers, and its arguments."""

    def body(x: Array, ids: Array, weights: Array, w: Any) -> Array:
        for _ in range(n):
            # The factor keeps the sums bounded.
            x = x + 1e-3 * layer(x, ids, weights, w)
        return x

    return jax.shard_map(body, mesh=mesh, in_specs=SPEC, out_specs=SPEC), arrays


def make_tokens(mesh: jax.sharding.Mesh, model: Model, tokens: int) -> tuple[Array, Array, Array]:
    """Make uniformly routed tokens with equal weights."""
    rng = np.random.default_rng(tokens)
    count = mesh.size * tokens
    ids = routing("uniform", count, model, rng)
    x = rng.standard_normal((count, model.hidden), np.float32).astype(jnp.bfloat16)
    arrays = x, ids, np.full(ids.shape, 1 / model.top_k, np.float32)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, SPEC))
    return placed[0], placed[1], placed[2]


def check(found: dict[str, Array]) -> dict[str, float]:
    """Return the differences from the results of `moe` in the norm; raise if one is wrong."""
    want = np.asarray(found["moe"], np.float32)
    errors = {}
    for name, out in found.items():
        errors[name] = float(np.linalg.norm(np.asarray(out, np.float32) - want) / np.linalg.norm(want))
        if not errors[name] < (0.1 if "fp8" in name else 0.02):
            raise RuntimeError(f"{name} differs from moe by {errors[name]} of the norm")
    return errors


def measure(report: Report, args: argparse.Namespace, mesh: jax.sharding.Mesh, model: Model, tokens: list[int]) -> None:
    """Measure all variants for all numbers of tokens."""
    name = None if jax.default_backend() == "gpu" else "xla"
    matrices = make_weights(mesh, model)
    prepare = jax.jit(serving_weights, static_argnames=("format", "activations"))
    serving = {"fp8": prepare(*matrices, format="fp8", activations="fp8"), "bf16": prepare(*matrices, format=None)}
    for count in tokens:
        inputs = make_tokens(mesh, model, count)
        variants: dict[str, tuple[Layer, Any]] = {"moe": (partial(training, model, name), matrices)}
        for dtype, w in serving.items():
            variants[f"low latency, {dtype}"] = partial(low_latency, model, name), w
            variants[f"low latency, separate, {dtype}"] = partial(separate, model, name), w
        once = {}
        for label, (layer, w) in variants.items():
            run = jax.shard_map(layer, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
            once[label] = jax.jit(run)(*inputs, w)
        errors = check(once)
        factories = {label: partial(chain, mesh, layer, (*inputs, w)) for label, (layer, w) in variants.items()}
        lengths = QUICK_LENGTHS if args.quick else LENGTHS
        times = harness.measure_chained(factories, args.rounds, lengths=lengths, title=f"{count} tokens")
        shape = {"tokens_per_rank": count, "ranks": mesh.size, **model._asdict()}
        table = []
        for label, timing in sorted(times.items(), key=lambda item: item[1].median):
            speed = count * mesh.size / timing.median
            dtype = "fp8" if "fp8" in label else "bf16"
            report.add(label, shape | {"dtype": dtype}, timing, error=errors[label], tokens_per_s=speed)
            table.append([label, *timing.microseconds(1), f"{speed:,.0f}"])
        title = f"{count} tokens/rank, {mesh.size} ranks"
        harness.show_table(title, ["variant", "us per layer", "quartiles", "tokens/s per layer"], table)
