"""The whole expert layer of decode-sized batches on several GPUs: low-latency paths beside that of training.

    python benchmarks/decode_layer.py [--tokens 1 8 32 128 256] [--ranks 4]

Writes results/decode_layer.json. Variants, in FP8 and in bfloat16:

  low latency             dispatch, product, activation, and product + combine in one launch (`low_latency_moe`)
  low latency, separate   the same with product and combine one after the other
  moe                     the path of training, in bfloat16, whose crossing with the others is where a program should
                          change between them (`jax_ep.serving.LOW_LATENCY_TOKENS`)

Times are differences of two chains of layers in one program, each of which takes the result of the one before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from decode_experts import LENGTHS, QUICK_LENGTHS, TOKENS, Model
from harness import Report
from jax import Array

import jax_ep
from jax_ep.serving import ServingWeights, serving_weights

AXIS = "expert"
QUICK_DEVICES = 4
P = jax.P
Layer = Callable[..., Array]  # x, ids, weights, matrices -> x


def low_latency(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: ServingWeights) -> Array:
    return jax_ep.low_latency_moe(
        x, ids, weights, w.w_gate_up, w.w_down, num_experts=model.experts, implementation=name
    )


def separate(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: ServingWeights) -> Array:
    """`low_latency_moe` without the fused last step."""
    fp8 = isinstance(w.w_gate_up, tuple)
    (up, up_scales), (down, down_scales) = (m if isinstance(m, tuple) else (m, None) for m in (w.w_gate_up, w.w_down))
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
    hidden = multiply(d.tokens, up, lhs_scales=d.scales, rhs_scales=up_scales)
    rows, scales = jax_ep.masked_gated_activation(hidden, d.group_sizes, quantize=fp8, implementation=name)
    y = multiply(rows, down, lhs_scales=scales, rhs_scales=down_scales)
    return jax_ep.low_latency_combine(y, ids, weights, d.handle, implementation=name)


def training(model: Model, name: str | None, x: Array, ids: Array, weights: Array, w: tuple[Array, Array]) -> Array:
    return jax_ep.moe(x, ids, weights, *w, num_experts=model.experts, implementation=name)


def chain(mesh: jax.sharding.Mesh, layer: Layer, arrays: tuple[Any, ...], n: int) -> tuple[Any, tuple[Any, ...]]:
    """A function of n layers, and its arguments."""

    def body(x: Array, ids: Array, weights: Array, w: Any) -> Array:
        for _ in range(n):
            # Sums that stay of one size, whatever the matrices make of them.
            x = x + 1e-3 * layer(x, ids, weights, w)
        return x

    return jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), arrays


def make_matrices(mesh: jax.sharding.Mesh, model: Model) -> tuple[Array, Array]:
    """Random bfloat16 matrices, made where they are used."""

    def make(rank: Array) -> tuple[Array, Array]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), rank[0]))
        local = model.experts // mesh.size
        shapes = (local, model.hidden, 2 * model.inner), (local, model.inner, model.hidden)
        parts = zip(keys, shapes, strict=True)
        up, down = (jax.random.normal(key, s, jnp.bfloat16) * s[1] ** -0.5 for key, s in parts)
        return up, down

    place = jax.shard_map(make, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(place)(jnp.arange(mesh.size))


def make_tokens(mesh: jax.sharding.Mesh, model: Model, tokens: int) -> tuple[Array, Array, Array]:
    """Uniformly routed tokens of equal weights."""
    rng = np.random.default_rng(tokens)
    count = mesh.size * tokens
    ids = np.argsort(rng.random((count, model.experts)), axis=1)[:, : model.top_k].astype(np.int32)
    x = rng.standard_normal((count, model.hidden), np.float32).astype(jnp.bfloat16)
    arrays = x, ids, np.full(ids.shape, 1 / model.top_k, np.float32)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, P(AXIS)))
    return placed[0], placed[1], placed[2]


def check(found: dict[str, Array]) -> dict[str, float]:
    """Differences of the results to those of `moe`, in the norm; refuses to time wrong ones."""
    want = np.asarray(found["moe"], np.float32)
    errors = {}
    for name, out in found.items():
        errors[name] = float(np.linalg.norm(np.asarray(out, np.float32) - want) / np.linalg.norm(want))
        if not errors[name] < (0.1 if "fp8" in name else 0.02):
            raise RuntimeError(f"{name} differs from moe by {errors[name]} of the norm")
    return errors


def measure(report: Report, args: argparse.Namespace, mesh: jax.sharding.Mesh, model: Model, tokens: list[int]) -> None:
    """All variants for all numbers of tokens."""
    name = None if jax.default_backend() == "gpu" else "xla"
    matrices = make_matrices(mesh, model)
    prepare = jax.jit(serving_weights, static_argnames="fp8")
    serving = {"fp8": prepare(*matrices, fp8=True), "bf16": prepare(*matrices, fp8=False)}
    for count in tokens:
        inputs = make_tokens(mesh, model, count)
        variants: dict[str, tuple[Layer, Any]] = {"moe": (partial(training, model, name), matrices)}
        for dtype, w in serving.items():
            variants[f"low latency, {dtype}"] = partial(low_latency, model, name), w
            variants[f"low latency, separate, {dtype}"] = partial(separate, model, name), w
        once = {}
        for label, (layer, w) in variants.items():
            run = jax.shard_map(layer, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
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
            s = timing.summary()
            table.append(
                [label, f"{1e6 * s['median']:.1f}", f"{1e6 * s['q1']:.1f} to {1e6 * s['q3']:.1f}", f"{speed:,.0f}"]
            )
        title = f"{count} tokens/rank, {mesh.size} ranks"
        harness.show_table(title, ["variant", "us per layer", "quartiles", "tokens/s per layer"], table)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=8)
    parser.add_argument("--tokens", type=int, nargs="+", help=f"tokens per rank (default: {TOKENS})")
    parser.add_argument("--ranks", type=int, help="GPUs, the first of the machine (default: all)")
    parser.add_argument("--suffix", default="", help="of the report's name, as _4_gpus")
    return parser


def main() -> None:
    """Measures all cases and writes the report."""
    args = harness.parse(options())
    jax.config.update("jax_num_cpu_devices", QUICK_DEVICES)
    on_gpus = jax.default_backend() == "gpu"
    if not (on_gpus or args.quick) or jax.device_count() < 2:
        print("decode_layer: needs two or more GPUs; nothing measured")
        return
    ranks = args.ranks or jax.device_count()
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    if on_gpus:
        jax_ep.init(mesh)
    model = Model(8, 2, 256, 128) if args.quick else Model()
    tokens = args.tokens or ([2] if args.quick else TOKENS)
    settings = {"rounds": args.rounds, "quick": args.quick, "tokens": tokens, "lengths": LENGTHS, **model._asdict()}
    report = Report(f"decode_layer{args.suffix}", args.out, settings)
    measure(report, args, mesh, model, tokens)
    print(report.path)


if __name__ == "__main__":
    main()
