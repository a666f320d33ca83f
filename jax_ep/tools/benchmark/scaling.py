"""Scaling of operations, kernels, the layer and a training over this machine's GPUs: EP = 1, 2, 4, ...

    python benchmarks/scaling.py [--model qwen3-30b] [--tokens 4096] [--ranks 1 2 4]    # also: jax-ep scale

Writes results/scaling.json and a plot. Without GPUs `--quick` runs on CPU devices, whose times say nothing about GPUs,
and which have no kernels to profile.

Weak scaling: each rank has `--tokens` tokens. Strong scaling: all ranks together have `--total-tokens`, by default as
many as in weak scaling on the most ranks. Parts:

  exchange  plan, dispatch and combine, compared with a padded `all_to_all`, with percent of the links' rates
  layer     `jax_ep.moe`, forward and with its gradients
  kernels   the longest kernels of a layer with its gradients, by JAX's profiler on the first GPU
  training  steps of examples/train_moe_flax.py and their tokens per second, with a fixed batch per device

Percent of peak refers to three rates: the copy engine from one GPU to another in the same run, each GPU while all copy
to all others, and NVLink's specification, if the driver reports it. The report warns if a time grows faster between
numbers of ranks than the bytes of the most loaded rank (growth.py). A kernel that waits for another GPU counts as busy.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.tools.benchmark import (
    exchange_chains,
    growth,
    harness,
    inputs,
    layer,
    layer_chains,
    layer_variants,
    links,
    plots,
    profiler,
    training_rate,
)
from jax_ep.tools.benchmark.growth import Moved
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.layer_variants import layers

PARTS = ("exchange", "layer", "kernels", "training")
MODES = ("weak", "strong")
EXCHANGES = {
    "triton plan": ("ids",),
    "triton dispatch to rows": ("rows", "sent"),
    "triton combine": ("rows", "sent"),
    "triton dispatch to rows, FP8 wire": ("rows", "sent"),
    "triton combine, FP8 wire": ("rows", "sent"),
    "all_to_all, padded": None,  # its bytes grow with the ranks, whatever the routing
}
LAYER = {"jax_ep.moe, forward": False, "jax_ep.moe, forward + backward": True}
PROFILED = "moe-backward"
TOP = 8
TRAINING = "training step"


class Place(NamedTuple):
    """A number of ranks, the tokens on each, and the modes of scaling that have this case."""

    ranks: int
    tokens: int
    modes: tuple[str, ...]


class Run(NamedTuple):
    """The data that all parts share.

    Attributes:
      args: the command line, with its defaults filled in.
      report: the report.
      model: sizes of the layer.
      peaks: bytes per second by name; None if unknown.
      moved: bytes of the most loaded rank, by numbers of ranks and tokens.
    """

    args: argparse.Namespace
    report: Report
    model: inputs.Model
    peaks: dict[str, float | None]
    moved: dict[tuple[int, int], Moved]

    def shapes(self, place: Place) -> Iterator[dict[str, Any]]:
        """Yield what a row records of its case, for each mode of scaling."""
        for mode in place.modes:
            yield {
                "scaling": mode,
                "model": self.args.model,
                "tokens_per_rank": place.tokens,
                "ranks": place.ranks,
                "hidden": self.model.hidden,
                "dtype": "bfloat16",
            }


def places(ranks: Iterable[int], tokens: int, total: int) -> list[Place]:
    """Return all cases, by number of ranks; a case of both modes is there once."""
    found: dict[tuple[int, int], list[str]] = {}
    for num_ranks in ranks:
        found.setdefault((num_ranks, tokens), []).append("weak")
        found.setdefault((num_ranks, total // num_ranks), []).append("strong")
    return [Place(*case, tuple(modes)) for case, modes in found.items()]


# --- parts ------------------------------------------------------------------------------------------------------------


def measure_exchange(run: Run, mesh: jax.sharding.Mesh, place: Place) -> None:
    """Measure plan, dispatch and combine."""
    case = exchange_chains.make_case(mesh, "uniform", place.tokens, jnp.bfloat16, run.model)
    every = exchange_chains.variants(case, baselines=False)
    variants = {name: every[name] for name in EXCHANGES}
    failures: dict[str, str] = {}
    times = harness.measure_chained(
        {name: partial(exchange_chains.chain, case, variant) for name, variant in variants.items()},
        run.args.rounds,
        lengths=(1, 2) if run.args.quick else (4, 36) if place.tokens <= 8192 else (2, 10),
        title=f"exchange, {place.ranks} ranks, {place.tokens} tokens",
        workers=harness.WORKERS,
        failures=failures,
        resolve=not run.args.quick,
    )
    for shape in run.shapes(place):
        for name, timing in times.items():
            sent = exchange_chains.traffic(case, variants[name], run.peaks["copy_engine"] or 1.0)
            run.report.add(name, shape, timing, part="exchange", **shares(sent.get("wire_bytes", 0), timing, run.peaks))
        for name, error in failures.items():
            run.report.failed(name, shape, error, part="exchange")


def shares(sent: float, timing: Timing, peaks: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the bytes that a rank sends, its rate, and the rate's share of each peak."""
    if not sent or timing.median <= 0:
        return {"wire_bytes": sent}
    rate = sent / timing.median
    return {
        "wire_bytes": sent,
        "wire_bytes_per_s": rate,
        "peak_shares": {name: None if peak is None else rate / peak for name, peak in peaks.items()},
    }


def measure_layer(run: Run, case: layer_chains.Case, place: Place) -> None:
    """Measure the layer with the default choices."""
    for name, backward in LAYER.items():
        (variant,) = layers(case, ["moe"], backward=backward).values()
        lengths = layer.chain_lengths(place.tokens, layer=True, quick=run.args.quick)
        failures: dict[str, str] = {}
        title = f"{name}, {place.ranks} ranks, {place.tokens} tokens"
        chains = {name: layer_chains.chain(case, variant)}
        times = harness.measure_chained(
            chains, run.args.rounds, lengths=lengths, title=title, failures=failures, resolve=not run.args.quick
        )
        for shape in run.shapes(place):
            for timing in times.values():
                rate = {"tflops": 1e-12 * variant.flops / timing.median} if timing.median > 0 else {}
                run.report.add(name, shape, timing, part="layer", **rate)
            for error in failures.values():
                run.report.failed(name, shape, error, part="layer")


def measure_kernels(run: Run, mesh: jax.sharding.Mesh, place: Place) -> None:
    """Profile the kernels of the layer and its gradients."""
    try:
        program = layer_variants.program(mesh, run.args.model, place.tokens, backward=True)
        timing, found = profiler.profile(program, run.args.rounds)
    except Exception as error:
        for shape in run.shapes(place):
            run.report.failed(PROFILED, shape, f"{type(error).__name__}: {error}", part="kernels")
        return
    for shape in run.shapes(place):
        run.report.add(PROFILED, shape, timing, part="kernels", **found)


def measure_training(run: Run, num_ranks: int) -> None:
    """Measure the steps of the example."""
    sizes = training_rate.QUICK if run.args.quick else training_rate.Sizes()
    shape = {"scaling": "weak", "ranks": num_ranks, "dtype": "bfloat16", **sizes._asdict()}
    try:
        timing = training_rate.measure(num_ranks, sizes, run.args.rounds)
    except Exception as error:
        run.report.failed(TRAINING, shape, f"{type(error).__name__}: {error}", part="training")
        return
    tokens = num_ranks * sizes.windows * sizes.length
    run.report.add(TRAINING, shape, timing, part="training", tokens_per_s=tokens / timing.median)


def measure_place(run: Run, place: Place, on_gpus: bool) -> None:
    """Measure all parts of one case."""
    mesh = inputs.expert_mesh(place.ranks)
    weights = inputs.make_weights(mesh, run.model)
    case = layer_chains.make_case(mesh, run.args.model, "uniform", place.tokens, weights)
    row_bytes = 2 * run.model.hidden
    run.moved[place.ranks, place.tokens] = growth.moved(case.ids, place.ranks, run.model.experts, row_bytes)
    jax_ep.finalize()
    if on_gpus:
        jax_ep.init(mesh)
    if "exchange" in run.args.parts:
        if not on_gpus:
            jax_ep.init(mesh, transport="shared_memory")  # kernels run in the interpreter
        measure_exchange(run, mesh, place)
        if not on_gpus:
            jax_ep.finalize()  # the layer would be slow in the interpreter; use `xla`
    if "layer" in run.args.parts:
        measure_layer(run, case, place)
    del case, weights  # `program` makes its own
    gc.collect()
    if "kernels" in run.args.parts and on_gpus:
        measure_kernels(run, mesh, place)
    gc.collect()


# --- what the rows say ------------------------------------------------------------------------------------------------


def find_warnings(run: Run) -> list[str]:
    """Return warnings for operations and kernels whose time grows faster than their bytes."""
    found = []
    for mode in MODES:
        rows = [row for row in run.report.rows if row["shape"]["scaling"] == mode and "seconds" in row]
        seconds: dict[tuple[str, tuple[str, ...]], dict[int, float]] = {}
        for row in rows:
            for name, kinds, time in timed(row):
                seconds.setdefault((name, kinds), {})[row["shape"]["ranks"]] = time
        tokens = {row["shape"]["ranks"]: row["shape"]["tokens_per_rank"] for row in rows if row["part"] != "training"}
        moved = {ranks: run.moved[ranks, count] for ranks, count in tokens.items()}
        for (name, kinds), by_ranks in seconds.items():
            found += growth.warnings(f"{mode} scaling, {name}", kinds, by_ranks, moved)
    return found


def timed(row: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the timed parts of a row: name, the kinds of bytes that its time should follow, and seconds."""
    if row["part"] == "exchange":
        kinds = EXCHANGES[row["variant"]]
        if kinds is not None:
            yield row["variant"], kinds, row["seconds"]["median"]
    elif row["part"] == "layer":
        yield row["variant"], ("rows", "sent"), row["seconds"]["median"]
    elif row["part"] == "kernels":
        for kernel in row["kernels"]:
            if kernel["share"] >= growth.LEAST_SHARE:
                kinds = growth.KERNELS.get(kernel["name"], ("rows",))
                yield f"kernel {kernel['name']}", kinds, 1e-6 * kernel["us_per_call"]


def show(report: Report) -> None:
    """Print the tables of a report: operations and layer by mode, kernels by number of ranks, the training."""
    for mode in MODES:
        rows = [r for r in report.rows if r["shape"]["scaling"] == mode and r["part"] in ("exchange", "layer")]
        columns = ["", "ranks", "tokens/rank", "us", "times EP least", "MB sent", "copy engine", "all at once", "link"]
        if rows:
            harness.show_table(f"{mode} scaling", columns, [operation_cells(row, rows) for row in rows])
        profiled = [r for r in report.rows if r["shape"]["scaling"] == mode and r["part"] == "kernels"]
        for row in profiled:
            shape, kernels = row["shape"], row.get("kernels", [])[:TOP]
            title = f"{mode} scaling, kernels of {PROFILED}, EP {shape['ranks']}, {shape['tokens_per_rank']} tokens"
            cells = [[k["name"][:72], f"{k['calls']:g}", f"{k['us']:.0f}", f"{k['share']:.1%}"] for k in kernels]
            harness.show_table(title, ["kernel", "calls", "us", "of busy"], cells or [[row["failed"][:72], "", "", ""]])
    trained = [row for row in report.rows if row["part"] == "training"]
    if trained:
        cells = [training_cells(row) for row in trained]
        harness.show_table("training, batch grows with EP", ["EP", "ms per step", "tokens/s", "per GPU"], cells)


def operation_cells(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Format a row of an operation: its time, and the shares of the peaks if it sends tokens."""
    shape = row["shape"]
    cells = [row["variant"], str(shape["ranks"]), str(shape["tokens_per_rank"])]
    if "failed" in row:
        return [*cells, "failed", row["failed"].splitlines()[0][:40], "", "", "", ""]
    same = [r for r in rows if r["variant"] == row["variant"] and "seconds" in r]
    first = min(same, key=lambda r: r["shape"]["ranks"])["seconds"]["median"]
    time = row["seconds"]["median"]
    cells += [f"{1e6 * time:.0f}", f"{time / first:.2f}" if first > 0 else ""]
    cells.append(f"{row['wire_bytes'] / 1e6:.1f}" if row.get("wire_bytes") else "")
    peaks = row.get("peak_shares", {})
    return cells + [percent(peaks, name) for name in ("copy_engine", "copy_engines_together", "link")]


def percent(peaks: Mapping[str, float | None], name: str) -> str:
    """Format the share of a peak; "" if nothing is sent, "unknown" if the peak is."""
    if name not in peaks:
        return ""
    share = peaks[name]
    return "unknown" if share is None else f"{share:.0%}"


def training_cells(row: Mapping[str, Any]) -> list[str]:
    """Format a row of the training."""
    ranks = row["shape"]["ranks"]
    if "failed" in row:
        return [str(ranks), "failed", row["failed"].splitlines()[0][:60], ""]
    rate = row["tokens_per_s"]
    return [str(ranks), f"{1e3 * row['seconds']['median']:.1f}", f"{rate:.0f}", f"{rate / ranks:.0f}"]


# --- command line -----------------------------------------------------------------------------------------------------


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "scaling", prog=prog, rounds=5)
    add = parser.add_argument
    add("--model", choices=inputs.MODELS, help=f"default: {inputs.DEFAULT}; --quick: {inputs.QUICK}")
    add("--tokens", type=int, help="tokens per rank in weak scaling (default: 4096)")
    add(
        "--total-tokens",
        type=int,
        help="of all ranks in strong scaling (default: that of weak scaling on most ranks)",
    )
    add("--ranks", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4, ... of the machine)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    return parser


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in defaults that depend on the machine, and check that the options fit it."""
    devices = jax.device_count()
    args.model = args.model or (inputs.QUICK if args.quick else inputs.DEFAULT)
    experts = inputs.MODELS[args.model].experts
    powers = itertools.takewhile(lambda n: n <= devices, (2**i for i in itertools.count()))
    args.ranks = sorted(set(args.ranks or (n for n in powers if experts % n == 0)))
    for num_ranks in args.ranks:
        if not 1 <= num_ranks <= devices:
            parser.error(f"--ranks {num_ranks}: this machine has {devices} devices; name 1 to {devices} of them")
        if experts % num_ranks:
            parser.error(f"--ranks {num_ranks}: it must divide the {experts} experts of {args.model}")
    args.tokens = args.tokens or (8 if args.quick else 4096)
    args.total_tokens = args.total_tokens or args.tokens * max(args.ranks)
    if unfit := [n for n in args.ranks if args.total_tokens % n]:
        parser.error(f"--total-tokens {args.total_tokens}: must be a multiple of the {unfit[0]} ranks")


def measure_peaks(ranks: Iterable[int], on_gpus: bool) -> tuple[dict[str, float | None], str]:
    """Measure the rates of the links; return them, and the source of the theoretical one."""
    most, num_bytes = max(ranks), links.PEAK_BYTES if on_gpus else links.QUICK_BYTES
    link = links.nvlink() if on_gpus else links.Links(None, "unknown: CPU devices have no link")
    together = None if most < 2 else links.peak_together(jax.devices()[:most], num_bytes)
    alone = None if most < 2 else links.peak(num_bytes)
    return {"copy_engine": alone, "copy_engines_together": together, "link": link.bytes_per_s}, link.said


def measure(args: argparse.Namespace) -> Report:
    """Measure all parts on all numbers of ranks; return the report, with warnings in its summary."""
    on_gpus = jax.default_backend() == "gpu"
    settings = {"ranks": args.ranks, "parts": args.parts}
    settings |= {"tokens": args.tokens, "total_tokens": args.total_tokens, "top_kernels": TOP}
    peaks, said = measure_peaks(args.ranks, on_gpus)
    run = Run(args, Report("scaling", args, settings), inputs.MODELS[args.model], peaks, {})
    run.report.summarise(peak_bytes_per_s=peaks, link=said)
    for place in places(args.ranks, args.tokens, args.total_tokens):
        measure_place(run, place, on_gpus)
    jax_ep.finalize()
    left_out = {} if on_gpus or "kernels" not in args.parts else {"kernels": "CPU devices have no kernels to profile"}
    if "training" in args.parts:
        if reason := training_rate.reason_against():
            left_out["training"] = reason
        for num_ranks in [] if reason else args.ranks:
            measure_training(run, num_ranks)
    run.report.summarise(left_out=left_out, warnings=find_warnings(run))
    return run.report


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the parts of the command line."""
    parser = options(prog)
    args = harness.parse(parser, arguments)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    harness.require_devices("scaling", args, num_devices=1)
    complete(args, parser)
    report = measure(args)
    show(report)
    print(f"link's theoretical rate: {report.summary['link']}")
    for part, reason in report.summary["left_out"].items():
        print(f"left out, {part}: {reason}")
    if jax.default_backend() != "gpu":
        print("these times are of CPU devices and say nothing about GPUs")
    for warning in report.summary["warnings"]:
        print(f"WARNING: {warning}")
    plots.draw(report.path)
    print(report.path)
