"""The expert layer on one GPU, from one token to thousands, by weight type, compared with alternatives and bounds.

    python benchmarks/fused_moe.py --models qwen3-30b mixtral-8x7b --tokens 1 16 4096
    python benchmarks/fused_moe.py --formats mxfp4 --routing zipf --shard 2

Variants, each forward, without gradients:

  fused_moe, FORMAT        the default choice, with bfloat16 or quantized weights; "FORMAT_tokens" quantizes tokens
                           too, to int8 with "int8" and to FP8 with all others
  one launch, FORMAT       one kernel, by the schedule
  several launches, FORMAT several kernels, by the schedule
  one launch in ...        one kernel for prepacked weights, in Triton or in Gluon
  several launches in ...  several kernels, with GEMMs in Triton, or of prepacked weights in Gluon
  several launches dequantized first  the same with GEMMs of 16 bits; of weights in 8 bits
  FORMAT, first GEMM, ...  the first GEMM alone, of sorted rows and prepacked weights, in Triton and in Gluon
  routed_moe, FORMAT       from logits on, the router in the launch; up to 64 tokens
  topk_router + fused_moe, FORMAT  the same in the two functions
  hidden rows, bfloat16    several kernels; the first GEMM stores the FFN hidden state, and another kernel activates it
  moe_sort                 the sort alone, of all experts
  a step of the chain      the part of each measurement that is not its variant
  ragged_dot               sort, two `lax.ragged_dot` and the sums: JAX's operations
  PyTorch, _grouped_mm     the layer of PyTorch's grouped GEMMs, as a CUDA graph, if installed
  batched einsum           the GEMMs alone, with as many rows in equal groups of all experts, by cuBLAS

With few tokens, most of the time is reading the weights of the experts that have rows. So each row has the bytes of
these weights, as stored, and their rate as a share of the rate at which XLA reads memory here. With many tokens the
figure is operations per second.
Writes results/fused_moe.json. `--shard N` takes the experts of one of N ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep import formats, tuning
from jax_ep.quantization import quantize, with_layout
from jax_ep.serving import routed_moe
from jax_ep.tools.benchmark import baselines, harness, pytorch, rates
from jax_ep.tools.benchmark.chains import calls
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Model, expert_mesh, make_weights, on_ranks, routing
from jax_ep.tools.command import Default

TOKENS = Default([1, 4, 16, 64, 256, 1024, 4096, 16384], [1, 16])
DEFAULT_MODELS = Default(["qwen3-30b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"], ["tiny"])
LENGTHS = {64: (8, 104), 512: (4, 24)}  # by the most tokens; for more:
LENGTHS_OF_MANY, QUICK_LENGTHS = (2, 10), (1, 3)
UNROLL = 8  # calls per step of a chain's loop; a step takes some microseconds in a CUDA graph
TORCH = "PyTorch, _grouped_mm"
FORMATS: dict[str, dict[str, str]] = {name: {"format": name} for name in formats.FORMATS}
FORMATS |= {f"{name}_tokens": {"format": name, "activations": formats.FORMATS[name].activations} for name in FORMATS}
FORMATS |= {name: {"format": name.removesuffix("_prepacked")} for name in formats.STORED}
LANGUAGES = {"Triton": False, "Gluon": True}
GEMMS_OF_8_BITS = {"in Triton": False, "dequantized first": True}
SEVERAL = jax_ep.Schedule(single_launch=False)
WAYS: dict[str, Callable[..., Array]] = {
    "fused_moe": jax_ep.fused_moe,
    "one launch": partial(jax_ep.fused_moe, schedule=jax_ep.Schedule(single_launch=True)),
    "several launches": partial(jax_ep.fused_moe, schedule=SEVERAL),
}


def _routed(k: int, x: Array, logits: Array, *weights: Any) -> Array:
    return routed_moe(x, logits, k, *weights)[0]


def _apart(k: int, x: Array, logits: Array, *weights: Any) -> Array:
    return jax_ep.fused_moe(x, *jax_ep.topk_router(logits, k)[:2], *weights)


ROUTED: dict[str, Callable[..., Array]] = {"routed_moe": _routed, "topk_router + fused_moe": _apart}


class Variant(NamedTuple):
    """A function of arrays, and the bytes of weights that it reads; 0: not a layer."""

    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    read: int = 0


def with_hidden_rows(layer: Callable[..., Array], x: Array, *others: Array) -> Array:
    """Compute the layer as a gradient needs it: the first GEMM stores the FFN hidden state."""
    return jax.vjp(lambda x: layer(x, *others), x)[0]


def variants(
    args: argparse.Namespace, model: Model, tokens: int, weights: tuple[Array, Array], stored: Mapping[str, Any]
) -> tuple[dict[str, Variant], float]:
    """Return the variants, and the operations of the GEMMs."""
    num_experts = weights[1].shape[0]
    all_ids = routing(args.routing, tokens, model, np.random.default_rng(0))
    ids = np.where(all_ids < num_experts, all_ids, -1)  # -1 for experts of other shards
    slots, active = int((ids >= 0).sum()), len(np.unique(ids[ids >= 0]))
    x = on_ranks(expert_mesh(1), (tokens, model.hidden), 2)
    layer = (x, jnp.asarray(ids), jnp.full(ids.shape, 1 / model.top_k, jnp.float32))

    def bytes_of(held: Any, experts: int = active) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(held)) // num_experts * experts

    rows = on_ranks(expert_mesh(1), (max(slots, 1), model.hidden), 3)  # a shard may have no rows
    sizes = jnp.asarray(np.bincount(ids[ids >= 0], minlength=num_experts), jnp.int32)
    found = {"ragged_dot": Variant(baselines.ragged_dot_layer, (*layer, *weights), bytes_of(weights))}
    logits = np.random.default_rng(1).standard_normal((tokens, model.experts), np.float32)
    np.put_along_axis(logits, all_ids, 9, 1)
    routed = (x, jnp.asarray(logits))
    for expert_format, held in {"bfloat16": weights, **stored}.items():
        if tokens <= 64 and num_experts == model.experts and expert_format != "int8_tokens":
            for way, function in ROUTED.items():
                of_logits = partial(function, model.top_k)
                found[f"{way}, {expert_format}"] = Variant(of_logits, (*routed, *held), bytes_of(held))
        for way, function in WAYS.items():
            if way == "fused_moe" or expert_format != "int8_tokens":  # which no kernel fuses
                found[f"{way}, {expert_format}"] = Variant(function, (*layer, *held), bytes_of(held))
        for language, gluon in LANGUAGES.items() if expert_format.endswith("_prepacked") else ():
            for way, operation in {"several launches": "quantized_gemm", "one launch": "fused_moe"}.items():
                in_one = partial(with_setting, operation, {"gluon": gluon}, WAYS[way])
                found[f"{way} in {language}, {expert_format}"] = Variant(in_one, (*layer, *held), bytes_of(held))
            gemm = partial(with_setting, "quantized_gemm", {"gluon": gluon}, jax_ep.grouped_gemm)
            found[f"{expert_format}, first GEMM, {language}"] = Variant(gemm, (rows, held[0], sizes), bytes_of(held[0]))
        for way, first in GEMMS_OF_8_BITS.items() if _is_decoded_from_8_bits(held[0]) else ():
            layer_so = partial(with_setting, "quantized_gemm", {"dequantize": first}, WAYS["several launches"])
            found[f"several launches {way}, {expert_format}"] = Variant(layer_so, (*layer, *held), bytes_of(held))
    hidden_rows = partial(with_hidden_rows, partial(jax_ep.fused_moe, schedule=SEVERAL))
    found["hidden rows, bfloat16"] = Variant(hidden_rows, (*layer, *weights), bytes_of(weights))
    found["a step of the chain"] = Variant(lambda x: x[:1], (x,))
    sort = partial(jax_ep.moe_sort, num_experts=model.experts, block_size=64)
    found["moe_sort"] = Variant(sort, (jnp.asarray(all_ids), layer[2]))
    if slots >= num_experts:
        rows = on_ranks(expert_mesh(1), (num_experts, slots // num_experts, model.hidden), 3)
        found["batched einsum"] = Variant(baselines.batched, (rows, *weights), bytes_of(weights, num_experts))
    return found, 6.0 * slots * model.hidden * model.intermediate


def _is_decoded_from_8_bits(w: Any) -> bool:
    return isinstance(w, jax_ep.QuantizedWeights) and w.activations is None and formats.format_of(w).bits == 8


def with_setting(operation: str, settings: Mapping[str, Any], function: Callable[..., Array], *arrays: Any) -> Array:
    """Call a function with settings of one of its operations."""
    with tuning.override(operation, **settings):
        return function(*arrays)


def check(found: Mapping[str, Variant], stored: Collection[str], chosen: Collection[str]) -> None:
    """Raise if a variant differs from JAX's operations by more than its format explains."""
    layers = [name for name in chosen if name.rpartition(", ")[2] in ("bfloat16", *stored)]
    if not layers:
        return

    def result_of(name: str) -> Array | None:
        try:
            return jax.jit(found[name].function)(*found[name].arrays)
        except (NotImplementedError, ValueError):
            return None  # reported later as a failure

    with ThreadPoolExecutor(harness.WORKERS) as pool:
        want, *results = pool.map(result_of, ["ragged_dot", *layers])
    for name, got in zip(layers, results, strict=True):
        error = 0.0 if got is None else harness.norm_of_difference(got, want)
        if not error < (0.02 if name.endswith("bfloat16") else 0.3):
            raise RuntimeError(f"{name} is wrong: error {error:.2g} in the norm.")


@partial(jax.jit, static_argnums=0)
def stored_as(expert_format: str, w: Array) -> jax_ep.QuantizedWeights:
    """Quantize weights to one of `FORMATS`."""
    found = quantize(w, **FORMATS[expert_format])
    return with_layout(found, "prepacked") if expert_format.endswith("_prepacked") else found


def measure(report: Report, args: argparse.Namespace, name: str, rate: float) -> None:
    """Measure all numbers of tokens of one model."""
    model = MODELS[name]
    weights = make_weights(expert_mesh(1), model._replace(experts=model.experts // args.shard))
    stored = {}
    for expert_format in args.formats:
        try:
            stored[expert_format] = tuple(stored_as(expert_format, w) for w in weights)
        except ValueError as error:
            report.failed(f"fused_moe, {expert_format}", {"model": name, "dtype": "bfloat16"}, str(error))
    for tokens in args.tokens:
        measure_case(report, args, name, tokens, weights, stored, rate)


def measure_case(
    report: Report,
    args: argparse.Namespace,
    name: str,
    tokens: int,
    weights: tuple[Array, Array],
    stored: Mapping[str, Any],
    rate: float,
) -> None:
    """Measure the variants of one case, and PyTorch's layer."""
    found, flops = variants(args, MODELS[name], tokens, weights, stored)
    chosen = harness.chosen(found, args.only)
    check(found, stored, chosen)
    title, failures = f"{name}, {tokens} tokens", dict[str, str]()
    by_tokens = next((both for most, both in LENGTHS.items() if tokens <= most), LENGTHS_OF_MANY)
    unroll = UNROLL if args.graphs else 1
    times = harness.measure_chained(
        {name: partial(calls, expert_mesh(1), *one[:2], unroll=unroll) for name, one in chosen.items()},
        args.rounds,
        lengths=args.lengths or (QUICK_LENGTHS if args.quick else by_tokens),
        title=title,
        failures=failures,
        compiler_options=harness.GRAPHS if args.graphs else None,
    )
    if pytorch.is_here() and args.shard == 1:
        try:
            times[TORCH] = pytorch.measure_layer(found["ragged_dot"].arrays, args.rounds)
        except RuntimeError as error:
            failures[TORCH] = str(error)

    def details(name: str, timing: Timing) -> dict[str, float]:
        read, seconds = found["ragged_dot" if name == TORCH else name].read, timing.median
        if not read:
            return {}
        of_read_rate = read / seconds / rate
        return {"matrix_bytes": read, "of_read_rate": of_read_rate, "tflops": 1e-12 * flops / seconds}

    report.record(title, {"model": name, "tokens": tokens, "dtype": "bfloat16"}, times, failures, details)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "fused_moe", prog=prog, rounds=8, tokens=TOKENS)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS, help="default: %(default)s")
    add("--formats", nargs="*", choices=FORMATS, default=["fp8", "fp8_tokens", "int8", "mxfp4"])
    add("--routing", choices=["uniform", "zipf"], default="uniform")
    add("--shard", type=int, default=1, metavar="N", help="the experts of one of N ranks")
    add("--graphs", action="store_true", help="launch chains as CUDA graphs, which short calls need")
    add("--only", nargs="+", help="only variants whose names contain one of these")
    add("--lengths", type=int, nargs=2, help="lengths of chains; short calls need longer ones")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the models of the command line."""
    parser = options(prog)
    args = harness.start(parser, arguments, num_devices=1, cpu_devices=1)
    if args.lengths and args.lengths[0] >= args.lengths[1]:
        parser.error(f"--lengths {args.lengths}: expected the shorter one first")
    for model in (MODELS[name] for name in args.models):
        if model.experts % args.shard:
            parser.error(f"--shard {args.shard}: it must divide the {model.experts} experts of the model")
    kept = ("routing", "shard", "formats", "graphs", "lengths")
    report = Report("fused_moe", args, {name: getattr(args, name) for name in kept})
    rate = rates.memory()
    report.summarize(read_bytes_per_s=rate)
    for name in args.models:
        measure(report, args, name, rate)
