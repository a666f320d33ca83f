"""Scaling of operations and of the layer over this machine's GPUs: EP = 1, 2, 4, ...

    python benchmarks/scaling.py [--model qwen3-30b] [--tokens 4096] [--ranks 1 2 4]    # also: jax-ep scale

Writes results/scaling.json. Without GPUs `--quick` runs on CPU devices, whose times say nothing about GPUs.

Weak scaling: each rank has `--tokens` tokens. Strong scaling: all ranks together have `--total-tokens`, by default as
many as in weak scaling on the most ranks. Parts:

  exchange  plan, dispatch and combine, compared with a padded `all_to_all`, with percent of the links' rates
  layer     `jax_ep.moe`, forward and with its gradients

Percent of peak refers to two rates of the same run: the copy engine from one GPU to another, and each GPU while all
copy to all others. kernel_times.py shows which kernels take the time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

import jax_ep
from jax_ep.tools.benchmark import exchange, harness, inputs, layer, rates
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import Case, make_case
from jax_ep.tools.command import Default

PARTS = ("exchange", "layer")
EXCHANGES = (
    "triton plan",
    "triton dispatch to rows",
    "triton combine",
    "triton dispatch to rows, FP8 wire",
    "triton combine, FP8 wire",
    "all_to_all, padded",
)


class Place(NamedTuple):
    """A number of ranks, the tokens on each, and the modes of scaling that have this case."""

    ranks: int
    tokens: int
    modes: tuple[str, ...]


def places(ranks: Iterable[int], tokens: int, total: int) -> list[Place]:
    """Return all cases, by number of ranks; a case of both modes is there once."""
    found: dict[tuple[int, int], list[str]] = {}
    for num_ranks in ranks:
        found.setdefault((num_ranks, tokens), []).append("weak")
        found.setdefault((num_ranks, total // num_ranks), []).append("strong")
    return [Place(*case, tuple(modes)) for case, modes in found.items()]


class Run(NamedTuple):
    """The command line, the report, and bytes per second of the links by name; None if unknown."""

    args: argparse.Namespace
    report: Report
    peaks: Mapping[str, float | None]

    def measure(
        self,
        place: Place,
        part: str,
        factories: Mapping[str, harness.Factory],
        lengths: tuple[int, int],
        details: Callable[[str, Timing], Mapping[str, Any]],
    ) -> None:
        """Measure variants of a case, and report them once for each mode of scaling."""
        failures, title = dict[str, str](), f"{part}, EP {place.ranks}, {place.tokens} tokens/rank"
        options: dict[str, Any] = {"lengths": lengths, "title": title, "resolve": not self.args.quick}
        times = harness.measure_chained(factories, self.args.rounds, failures=failures, **options)
        model = inputs.MODELS[self.args.model]
        sizes = {"tokens_per_rank": place.tokens, "ranks": place.ranks, "hidden": model.hidden, "dtype": "bfloat16"}
        for mode in place.modes:
            shape = {"scaling": mode, "model": self.args.model, **sizes}
            self.report.record(f"{mode} scaling, {title}", shape, times, failures, details, part=part)


def measure_exchange(run: Run, place: Place, case: Case) -> None:
    """Measure plan, dispatch and combine."""
    every = exchange.variants(case, baselines=False)

    def details(name: str, timing: Timing) -> dict[str, Any]:
        return shares(exchange.traffic(case, every[name].wire, 1.0).get("wire_bytes", 0.0), timing, run.peaks)

    factories = {name: partial(every[name].program, case) for name in EXCHANGES}
    run.measure(place, "exchange", factories, exchange.chain_lengths(place.tokens, run.args.quick), details)


def shares(sent: float, timing: Timing, peaks: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the bytes that a rank sends, its rate, and the rate's share of each peak."""
    if not sent or timing.median <= 0:
        return {"wire_bytes": sent}
    rate = sent / timing.median
    found = {name: None if peak is None else rate / peak for name, peak in peaks.items()}
    return {
        "wire_bytes": sent,
        "wire_bytes_per_s": rate,
        "peak_shares": found,
        "peak_share": found.get("copy_engines_together"),
    }


def measure_layer(run: Run, place: Place, case: Case) -> None:
    """Measure the layer with the default choices."""
    weights = inputs.make_weights(case.mesh, case.model)
    lengths = layer.chain_lengths(place.tokens, layer=True, quick=run.args.quick)
    for direction, backward in layer.DIRECTIONS.items():
        (variant,) = layer.layers(case, weights, ["moe"], backward=backward).values()
        tflop, factories = 1e-12 * variant.flops, {f"jax_ep.moe, {direction}": partial(variant.program, case)}
        run.measure(
            place, "layer", factories, lengths, lambda _, timing, tflop=tflop: {"tflops": tflop / timing.median}
        )


def measure_place(run: Run, place: Place) -> None:
    """Measure all parts of one case."""
    mesh, on_gpus = inputs.expert_mesh(place.ranks), jax.default_backend() == "gpu"
    case = make_case(mesh, "uniform", place.tokens, inputs.MODELS[run.args.model])
    if "exchange" in run.args.parts:
        inputs.initialize(mesh)
        measure_exchange(run, place, case)
        if not on_gpus:
            jax_ep.finalize()  # the layer would be slow in the interpreter; use `xla`
    elif on_gpus:
        inputs.initialize(mesh)
    if "layer" in run.args.parts:
        measure_layer(run, place, case)


def show(report: Report) -> None:
    """Print the times of each operation by number of ranks, relative to the fewest ranks."""
    for mode in ("weak", "strong"):
        rows = [row for row in report.rows if row["shape"]["scaling"] == mode and "seconds" in row]
        ranks = sorted({row["shape"]["ranks"] for row in rows})
        table = []
        for name in dict.fromkeys(row["variant"] for row in rows):
            times = {r["shape"]["ranks"]: r["seconds"]["median"] for r in rows if r["variant"] == name}
            first = times[min(times)]
            table.append(
                [name, *(f"{1e6 * times[n]:.0f} ({times[n] / first:.2f})" if n in times else "" for n in ranks)]
            )
        harness.show_table(f"{mode} scaling, us", ["", *(f"EP {n}" for n in ranks)], table)


# --- command line -----------------------------------------------------------------------------------------------------


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "scaling", prog=prog, rounds=5)
    add = parser.add_argument
    add("--model", choices=inputs.MODELS, default=inputs.DEFAULT, help="default: %(default)s")
    tokens = "tokens per rank in weak scaling (default: %(default)s)"
    add("--tokens", type=int, default=Default(4096, 8), help=tokens)
    total = "of all ranks in strong scaling (default: that of weak scaling on most ranks)"
    add("--total-tokens", type=int, help=total)
    add("--ranks", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4, ... of the machine)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    return parser


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in defaults that depend on the machine, and check that the options fit it."""
    devices = jax.device_count()
    experts = inputs.MODELS[args.model].experts
    powers: Iterator[int] = itertools.takewhile(lambda n: n <= devices, (2**i for i in itertools.count()))
    args.ranks = sorted(set(args.ranks or (n for n in powers if experts % n == 0)))
    for num_ranks in args.ranks:
        if not 1 <= num_ranks <= devices:
            parser.error(f"--ranks {num_ranks}: this machine has {devices} devices; name 1 to {devices} of them")
        if experts % num_ranks:
            parser.error(f"--ranks {num_ranks}: it must divide the {experts} experts of {args.model}")
    args.total_tokens = args.total_tokens or args.tokens * max(args.ranks)
    if unfit := [n for n in args.ranks if args.total_tokens % n]:
        parser.error(f"--total-tokens {args.total_tokens}: must be a multiple of the {unfit[0]} ranks")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the parts of the command line."""
    parser = options(prog)
    args = harness.start(parser, arguments, num_devices=1)
    complete(args, parser)
    devices = jax.devices()[: max(args.ranks)]
    peaks = {
        "copy_engine": None if len(devices) < 2 else rates.link(),
        "copy_engines_together": None if len(devices) < 2 else rates.links_together(devices),
    }
    settings = {name: getattr(args, name) for name in ("ranks", "parts", "tokens", "total_tokens")}
    run = Run(args, Report("scaling", args, settings), peaks)
    run.report.summarize(peak_bytes_per_s=peaks)
    for place in places(args.ranks, args.tokens, args.total_tokens):
        measure_place(run, place)
    jax_ep.finalize()
    show(run.report)
    if jax.default_backend() != "gpu":
        print("these times are of CPU devices and say nothing about GPUs")
    print(run.report.path)
