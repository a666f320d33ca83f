"""Low-latency operations for decode-sized batches on GPUs, compared with XLA's and with the layer of training.

    python benchmarks/low_latency.py --parts exchange --tokens 1 128 --ranks 2 4

Each part has a report in results/. Without GPUs `--quick` runs the kernels of the all-to-all in Triton's interpreter.

  exchange  low_latency.json: dispatch and combine on several GPUs
  layer     decode_layer.json: the whole layer on several GPUs, by format of the weights; in FP8 tokens are FP8, too:
              low latency             the default of `low_latency_moe`
              low latency, rows       dispatch of rows, GEMM, activation, and GEMM + combine in one kernel
              low latency, gathered   dispatch of all tokens, the experts of a rank in one kernel, and combine
              low latency, separate   as "rows", with GEMM and combine in two kernels
              moe                     the path of training, in bfloat16; where its time crosses the others', a program
                                      should switch between them (`jax_ep.serving.LOW_LATENCY_TOKENS`)

Times are differences of two chains of calls. The input of a call is the output of the previous one, so nothing else
runs: a dispatch takes the ids in the previous handle, a round trip the tokens. A combine is a round trip less its
dispatch, within each round.

Bytes are those that the busiest rank sends or receives. The floor is an all-to-all of one word, which this run measures
too, plus those bytes at the copy engine's rate. FP8 includes its scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_ep
from jax_ep.core.dtypes import FP8
from jax_ep.ops.masked import masked_gated_activation
from jax_ep.serving import serving_weights
from jax_ep.tools.benchmark import harness, rates
from jax_ep.tools.benchmark.chains import Program, on_each_rank, passed_on
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import (
    AXIS,
    DEFAULT,
    MODELS,
    Case,
    Model,
    busiest,
    expert_mesh,
    initialize,
    make_case,
    make_weights,
    place,
)
from jax_ep.tools.command import Default
from jax_ep.types import Schedule

TOKENS = Default([1, 8, 32, 128, 256, 512], [2])
WORD = "one word"
LENGTHS, QUICK_LENGTHS = (24, 72), (1, 2)  # the first launches wait for the slower host thread
LAYER_LENGTHS = (4, 24)
LAYER_FORMATS: dict[str, dict[str, str | None]] = {
    "fp8": {"format": "fp8", "activations": "fp8"},
    "bf16": {"format": None},
    "mxfp4": {"format": "mxfp4"},
    "int4": {"format": "int4"},
}
MOST_ERRORS = {"fp8": 0.1, "mxfp4": 0.25, "int4": 0.25}  # of the norm
MOST_ERROR = 0.02

Step = Callable[..., Any]


# --- part: exchange -------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A variant of the all-to-all."""

    step: Step  # `(first, *others) -> first`, of one rank; see `passed_on`
    arrays: tuple[Array, ...]  # of all ranks
    wire_bytes: float = 0.0  # that the busiest rank sends or receives

    def program(self, case: Case, length: int) -> Program:
        """Return a chain of calls."""
        return passed_on(case.mesh, self.step, self.arrays, length)


def dispatch(case: Case, name: str, x: Array, ids: Array, *, quantize: bool) -> jax_ep.types.LowLatencyDispatched:
    """Dispatch the tokens of a rank."""
    sizes = {"num_experts": case.layout.num_experts, "max_tokens_per_rank": case.layout.num_tokens}
    return jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=quantize, implementation=name)


def ids_step(case: Case, quantize: bool) -> Step:
    """Return a step that maps ids to the same ids, through the handle of a dispatch."""
    return lambda ids, x: dispatch(case, "triton", x, ids, quantize=quantize).handle.own_topk_idx


def round_trip(case: Case, name: str, quantize: bool, wire_dtype: Any, *, own_rows: bool = False) -> Step:
    """Return a step that maps tokens to sums of the given rows, or with `own_rows` of the dispatched tokens."""

    def step(x: Array, ids: Array, weights: Array, rows: Array) -> Array:
        d = dispatch(case, name, x, ids, quantize=quantize)
        y, schedule = d.tokens if own_rows else rows, Schedule(wire_dtype=wire_dtype)
        return jax_ep.low_latency_combine(y, ids, weights, d.handle, schedule=schedule, implementation=name)

    return step


def traffic(case: Case) -> dict[str, float]:
    """Return the bytes that the busiest rank sends or receives: in a dispatch, and in a combine of sums and of rows."""
    counts = {"tokens": busiest(case.remote), "rows": busiest(case.remote_rows)}
    wires = ("bf16", "fp8")
    return {f"{what} {wire}": count * case.row_bytes(wire) for what, count in counts.items() for wire in wires}


def variants(case: Case, rows: Array) -> dict[str, Variant]:
    """Return the variants of the kernels and of NCCL."""
    num_bytes, num_ranks = traffic(case), case.layout.num_ranks
    arrays = (case.x, case.topk_idx, case.topk_weights, rows)
    back = "tokens" if _sends_sums(case) else "rows"
    found = {}
    for wire, quantize in (("fp8", True), ("bf16", False)):
        step, there = ids_step(case, quantize), num_bytes[f"tokens {wire}"]
        found[f"dispatch, {wire}"] = Variant(step, (case.topk_idx, case.x), there)
        trip = round_trip(case, "triton", True, FP8 if wire == "fp8" else None)
        total = num_bytes["tokens fp8"] + num_bytes[f"{back} {wire}"]
        found[f"round trip, {wire} back"] = Variant(trip, arrays, total)
    no_ids = place(case.mesh, np.full(case.ids.shape, -1, np.int32))
    found["dispatch of no tokens"] = Variant(ids_step(case, True), (no_ids, case.x))
    copies = jax.jit(lambda x: jnp.tile(x, (num_ranks, 1)), out_shardings=case.x.sharding)(case.x)
    shape = (num_ranks, case.layout.num_tokens, case.model.hidden)
    swap = lambda x: lax.all_to_all(x.reshape(shape), AXIS, 0, 0).reshape(x.shape)  # noqa: E731
    padded = (num_ranks - 1) * case.layout.num_tokens * case.row_bytes("bf16")
    found["all_to_all, padded, bf16"] = Variant(swap, (copies,), float(padded))
    return found


def _sends_sums(case: Case) -> bool:
    """Whether combine of `triton` sends sums of tokens rather than rows."""
    from jax_ep.megakernels import low_latency

    _, tile = low_latency.combine_tile(Schedule(), case.layout, case.layout.num_tokens, case.model.hidden, case.x.dtype)
    return bool(tile.sends_sums)


def word(case: Case) -> Variant:
    """Return the smallest all-to-all: a word from each rank to each."""
    from jax_ep.megakernels.exchange import all_gather_i32  # imports Triton
    from jax_ep.megakernels.launch import group_on

    step = lambda words: all_gather_i32(words[0], group_on(AXIS, frozenset()))  # noqa: E731
    return Variant(step, (place(case.mesh, np.zeros((case.layout.num_ranks**2, 1), np.int32)),))


def make_rows(case: Case) -> Array:
    """Make constant rows of the experts."""
    shape = (case.model.experts, case.layout.num_ranks * case.layout.num_tokens, case.model.hidden)
    return jax.jit(lambda: jnp.full(shape, 0.5, jnp.bfloat16), out_shardings=case.x.sharding)()


def check_round_trip(case: Case, name: str) -> None:
    """Check that a round trip with weights that sum to one returns the tokens."""
    step, ids, weights = round_trip(case, name, False, None, own_rows=True), case.topk_idx, case.topk_weights
    back = jax.jit(on_each_rank(case.mesh, step))(case.x, ids, weights, weights)
    error = harness.largest_difference([back], [case.x])
    if not error < 0.05:
        raise RuntimeError(f"the round trip of {case.layout} is wrong by {error}")


def less(total: Timing, part: Timing) -> Timing:
    """Subtract a part from a time, within rounds."""
    return Timing(tuple(a - b for a, b in zip(total.samples, part.samples, strict=False)))


def measure_all_to_all(report: Report, case: Case, args: argparse.Namespace, peak: float) -> None:
    """Measure all variants of one case."""
    check_round_trip(case, "triton")
    rows = make_rows(case)
    todo = variants(case, rows) | {WORD: word(case)}
    factories = {name: partial(variant.program, case) for name, variant in todo.items()}
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    times = harness.measure_chained(factories, args.rounds, lengths=lengths, title=case.title)
    num_bytes = {name: variant.wire_bytes for name, variant in todo.items()}
    for wire in ("fp8", "bf16"):
        name, trip, sent = f"combine, {wire}", f"round trip, {wire} back", "dispatch, fp8"
        times[name], num_bytes[name] = less(times[trip], times[sent]), num_bytes[trip] - num_bytes[sent]
    failures = {}
    for name in [] if args.quick else [name for name in times if not times[name].is_resolved]:
        failures[name] = harness.UNRESOLVED  # a combine is a difference
    floor_of_one = times[WORD].median

    def details(name: str, timing: Timing) -> dict[str, float]:
        launches = 2 if "round trip" in name else 1
        rate = num_bytes[name] / timing.median
        found = {"wire_bytes": num_bytes[name], "floor_seconds": launches * floor_of_one + num_bytes[name] / peak}
        return found | {"wire_bytes_per_s": rate, "peak_share": rate / peak}

    shape = {"tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks}
    shape |= {"hidden": case.model.hidden, "dtype": case.x.dtype.name}
    resolved = {name: times[name] for name in sorted(times.keys() - failures)}
    report.record(case.title, shape, resolved, failures, details)


def measure_exchange(args: argparse.Namespace, model: Model) -> None:
    """Measure dispatch and combine."""
    peak = rates.link(*jax.devices()[:2])
    ranks = [n for n in args.ranks or (2, 4) if n <= jax.device_count()]
    settings = {"experts": model.experts, "top_k": model.top_k, "tokens": args.tokens, "lengths": LENGTHS}
    report = Report("low_latency", args, settings)
    report.summarize(copy_engine_bytes_per_s=peak)
    for num_ranks in ranks:
        mesh = expert_mesh(num_ranks)
        initialize(mesh)
        for count in args.tokens:
            measure_all_to_all(report, make_case(mesh, "uniform", count, model), args, peak)
    jax_ep.finalize()


# --- part: layer ------------------------------------------------------------------------------------------------------

Layer = Callable[..., Array]  # x, ids, router weights, gate_up, down -> x


def low_latency(model: Model, name: str | None, single_launch: bool | None, *arrays: Any) -> Array:
    """Run the layer with tokens gathered, or not, or as it chooses."""
    options = {"num_experts": model.experts, "implementation": name}
    return jax_ep.low_latency_moe(*arrays, schedule=Schedule(single_launch=single_launch), **options)


def separate(model: Model, name: str | None, x: Array, ids: Array, weights: Array, gate_up: Any, down: Any) -> Array:
    """Run `low_latency_moe` with GEMM and combine in two kernels."""
    sizes, fp8 = {"num_experts": model.experts, "max_tokens_per_rank": x.shape[0]}, gate_up.activations == "fp8"
    d = jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=fp8, implementation=name)
    multiply = partial(
        jax_ep.masked_grouped_gemm,
        group_sizes=d.group_sizes,
        preferred_element_type=x.dtype,
        expected_rows=max(1, -(-d.handle.layout.num_ranks * ids.size // model.experts)),
        implementation=name,
    )
    hidden = multiply(d.tokens, gate_up, lhs_scales=d.scales)
    rows, scales = masked_gated_activation(hidden, d.group_sizes, quantize=fp8, implementation=name)
    y = multiply(rows, down, lhs_scales=scales)
    return jax_ep.low_latency_combine(y, ids, weights, d.handle, implementation=name)


def layer_chain(mesh: jax.sharding.Mesh, layer: Layer, arrays: tuple[Any, ...], length: int) -> Program:
    """Return a program of layers, in which each takes the result of the previous one."""
    # The factor keeps the sums bounded.
    return passed_on(mesh, lambda x, *others: x + 1e-3 * layer(x, *others), arrays, length)


def measure_layer(args: argparse.Namespace, model: Model) -> None:
    """Measure the whole layer."""
    report = Report("decode_layer", args, {"model": model._asdict(), "tokens": args.tokens})
    for num_ranks in args.ranks or [jax.device_count()]:
        mesh = expert_mesh(num_ranks)
        if jax.default_backend() == "gpu":
            jax_ep.init(mesh)
        weights = make_weights(mesh, model)
        serving = {dtype: served(weights, dtype) for dtype in args.formats}
        for count in args.tokens:
            measure_decode(report, args, make_case(mesh, "uniform", count, model), weights, serving)
        jax_ep.finalize()


def served(weights: tuple[Array, Array], dtype: str) -> tuple[Any, Any]:
    """Return expert weights for serving."""
    found = jax.jit(partial(serving_weights, **LAYER_FORMATS[dtype]))(*weights)
    return found.w_gate_up, found.w_down


def measure_decode(
    report: Report, args: argparse.Namespace, case: Case, weights: tuple[Array, Array], serving: Mapping[str, Any]
) -> None:
    """Measure all variants of the layer for one number of tokens."""
    name, model = None if jax.default_backend() == "gpu" else "xla", case.model
    tokens = case.x, case.topk_idx, case.topk_weights
    training = partial(jax_ep.moe, num_experts=model.experts, implementation=name)
    variants: dict[str, tuple[Layer, Any]] = {"moe": (training, (*tokens, *weights))}
    for dtype, held in serving.items():
        arrays = *tokens, *held
        variants[f"low latency, {dtype}"] = partial(low_latency, model, name, None), arrays
        if dtype in ("fp8", "bf16"):
            variants[f"low latency, separate, {dtype}"] = partial(separate, model, name), arrays
        else:
            variants[f"low latency, rows, {dtype}"] = partial(low_latency, model, name, False), arrays
        if name is None and dtype != "bf16":
            variants[f"low latency, gathered, {dtype}"] = partial(low_latency, model, name, True), arrays
    results = {label: jax.jit(on_each_rank(case.mesh, layer))(*arrays) for label, (layer, arrays) in variants.items()}
    errors = {label: harness.norm_of_difference(out, results["moe"]) for label, out in results.items()}
    for label, error in errors.items():
        if not error < MOST_ERRORS.get(label.rpartition(", ")[2], MOST_ERROR):
            raise RuntimeError(f"{label} differs from moe by {error} of the norm")
    count, ranks = case.layout.num_tokens, case.layout.num_ranks
    factories = {label: partial(layer_chain, case.mesh, *one) for label, one in variants.items()}
    lengths = QUICK_LENGTHS if args.quick else LAYER_LENGTHS
    times = harness.measure_chained(factories, args.rounds, lengths=lengths, title=case.title)

    def details(label: str, timing: Timing) -> dict[str, float]:
        return {"error": errors[label], "tokens_per_s": count * ranks / timing.median}

    for dtype in serving:
        shape = {"tokens_per_rank": count, "ranks": ranks, **model._asdict(), "dtype": dtype}
        own = {label: timing for label, timing in times.items() if label.endswith(f", {dtype}") or label == "moe"}
        report.record(f"{case.title}, {dtype}", shape, own, {}, details)


# --- command line ---------------------------------------------------------------------------------------------------

PARTS = {"exchange": measure_exchange, "layer": measure_layer}


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "low_latency", prog=prog, rounds=8, tokens=TOKENS)
    add = parser.add_argument
    add("--model", choices=MODELS, default=DEFAULT, help="default: %(default)s")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    formats = "formats of the weights of the layer (default: fp8 bf16)"
    add("--formats", nargs="+", choices=LAYER_FORMATS, default=["fp8", "bf16"], help=formats)
    ranks = "numbers of GPUs (default: 2 4 for the exchange, all for the layer)"
    add("--ranks", type=int, nargs="+", help=ranks)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure all parts, each with its report."""
    args = harness.start(options(prog), arguments)
    for part in args.parts:
        PARTS[part](args, MODELS[args.model])
