"""Low-latency operations for decode-sized batches on GPUs, compared with XLA's and with the layer of training.

    python benchmarks/low_latency.py --parts exchange --tokens 1 128 --ranks 2 4
    python benchmarks/low_latency.py --parts experts --only gate_up

Each part has a report in results/. Without GPUs `--quick` runs the kernels of the all-to-all in Triton's interpreter.

  exchange  low_latency.json and a plot: dispatch and combine on several GPUs
  experts   decode_experts.json: the GEMMs and the activation between them on one GPU, which read the weights
  layer     decode_layer.json: the whole layer on several GPUs, in one kernel less, and as in training

Times are differences of two chains of calls. The input of a call is the output of the previous one, so nothing else
runs: a dispatch takes the ids in the previous handle, a round trip the tokens. A combine is a round trip less its
dispatch, within each round. Chains of `xla` have additional small kernels, which keep XLA from hoisting work that is
equal in all calls.

Bytes are those that the busiest rank sends or receives. The floor is an all-to-all of one word, which this run measures
too, plus those bytes at the copy engine's rate. FP8 includes its scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

import jax_ep
from jax_ep.tools.benchmark import decode_experts, decode_layer, harness, links, plots
from jax_ep.tools.benchmark.exchange_chains import Case
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import DEFAULT, MODELS, QUICK, Model, expert_mesh
from jax_ep.tools.benchmark.low_latency_chains import Inputs, baselines, chain, check, make_inputs, variants, word
from jax_ep.tools.command import count_or_zero

TOKENS = {2: [1, 128, 512], 4: [1, 8, 32, 128, 256, 512]}  # of the exchange, by ranks
DECODE_TOKENS, DECODE_RANKS = [1, 8, 32, 128, 256], 4
WORD = "one word"
LENGTHS, SLOW_LENGTHS, QUICK_LENGTHS = (24, 72), (1, 4), (1, 2)  # the first launches wait for the slower host thread


# --- part: exchange -------------------------------------------------------------------------------------------------


def less(total: Timing, part: Timing) -> Timing:
    """Subtract a part from a time, within rounds."""
    return Timing(tuple(a - b for a, b in zip(total.samples, part.samples, strict=False)))


def measure(inputs: Inputs, args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[dict[str, Timing], Any]:
    """Measure all variants of one case; return times, and the bytes that each variant sends."""
    case = inputs.case
    check(inputs)
    fast = variants(inputs) | {WORD: word(mesh, case)}
    slow = baselines(inputs) if case.layout.num_tokens <= args.most_xla_tokens else {}
    times: dict[str, Timing] = {}
    title = f"{case.layout.num_tokens} tokens, {mesh.size} ranks"
    for todo, lengths in ((fast, LENGTHS), (slow, SLOW_LENGTHS)):
        factories = {name: partial(chain, case, variant) for name, variant in todo.items()}
        lengths = QUICK_LENGTHS if args.quick else lengths
        times |= harness.measure_chained(factories, args.rounds, lengths=lengths, title=title, workers=harness.WORKERS)
    num_bytes = {name: variant.wire_bytes for name, variant in (fast | slow).items()}
    for wire in ("fp8", "bf16"):
        name, trip, sent = f"combine, {wire}", f"round trip, {wire} back", "dispatch, fp8"
        times[name] = less(times[trip], times[sent])
        num_bytes[name] = num_bytes[trip] - num_bytes[sent]
    if slow:
        times["xla combine, bf16"] = less(times["xla round trip, bf16 back"], times["xla dispatch, fp8"])
        num_bytes["xla combine, bf16"] = 0.0
    return times, num_bytes


def show(
    report: Report, case: Case, times: dict[str, Timing], num_bytes: dict[str, float], peak: float, *, quick: bool
) -> None:
    """Add one case to the report, and print it."""
    shape = {"tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks}
    shape |= {"hidden": case.x.shape[1], "dtype": case.x.dtype.name}
    table = []
    floor_of_one, failures = times[WORD].median, dict[str, str]()
    if not quick:  # a combine is a difference, which can be negative
        failures = {name: "takes less than what these chains resolve" for name, t in times.items() if t.median <= 0}
    for name, reason in failures.items():
        report.failed(name, shape, reason)
    for name, timing in sorted((name, timing) for name, timing in times.items() if name not in failures):
        wire = num_bytes[name]
        launches = 2 if "round trip" in name else 1
        floor = launches * floor_of_one + wire / peak
        found = {"wire_bytes": wire, "floor_seconds": floor, "wire_bytes_per_s": wire / timing.median}
        report.add(name, shape, timing, **found)
        cells = [name, *timing.microseconds(1)]
        rate = found["wire_bytes_per_s"]
        rates = [f"{rate / 1e9:.0f}", f"{100 * rate / peak:.0f} %", f"{1e6 * floor:.1f}"] if wire else [""] * 3
        table.append(cells + rates)
    title = f"{case.layout.num_tokens} tokens/rank, {case.layout.num_ranks} ranks"
    harness.show_table(title, ["variant", "us", "quartiles", "wire GB/s", "of peak", "floor us"], table)


def measure_exchange(args: argparse.Namespace, model: Model) -> Report:
    """Measure dispatch and combine."""
    on_gpus = jax.default_backend() == "gpu"
    peak = links.peak(links.PEAK_BYTES if on_gpus else links.QUICK_BYTES)
    ranks = [n for n in args.ranks or (2, 4) if n <= jax.device_count()]
    tokens = {n: args.tokens or ([2] if args.quick else TOKENS.get(n, TOKENS[4])) for n in ranks}
    settings: dict[str, Any] = {"experts": model.experts, "top_k": model.top_k}
    settings |= {"tokens": {str(n): counts for n, counts in tokens.items()}, "lengths": [LENGTHS, SLOW_LENGTHS]}
    report = Report("low_latency", args, settings)
    report.summarise(copy_engine_bytes_per_s=peak)
    for num_ranks, counts in tokens.items():
        mesh = expert_mesh(num_ranks)
        jax_ep.finalize()
        jax_ep.init(mesh, transport=None if on_gpus else "shared_memory")
        for count in counts:
            inputs = make_inputs(mesh, count, model)
            times, num_bytes = measure(inputs, args, mesh)
            show(report, inputs.case, times, num_bytes, peak, quick=args.quick)
    jax_ep.finalize()
    return report


# --- parts: experts and layer ---------------------------------------------------------------------------------------


def decode_report(name: str, args: argparse.Namespace, model: Model) -> tuple[Report, list[int]]:
    """Make a report without rows; return it and the numbers of tokens."""
    tokens = args.tokens or ([2] if args.quick else DECODE_TOKENS)
    settings = {"tokens": tokens, "lengths": decode_experts.LENGTHS, **model._asdict()}
    return Report(name, args, settings), tokens


def measure_experts(args: argparse.Namespace, model: Model) -> Report:
    """Measure the experts of one of several ranks."""
    report, tokens = decode_report("decode_experts", args, model)
    for num_ranks in args.ranks or [DECODE_RANKS]:
        decode_experts.measure(report, args, model, num_ranks, tokens)
    return report


def measure_layer(args: argparse.Namespace, model: Model) -> Report:
    """Measure the whole layer."""
    report, tokens = decode_report("decode_layer", args, model)
    for num_ranks in args.ranks or [jax.device_count()]:
        mesh = expert_mesh(num_ranks)
        if jax.default_backend() == "gpu":
            jax_ep.init(mesh)
        decode_layer.measure(report, args, mesh, model, tokens)
        jax_ep.finalize()
    return report


# --- command line ---------------------------------------------------------------------------------------------------

PARTS = {"exchange": measure_exchange, "experts": measure_experts, "layer": measure_layer}


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(
        __doc__, "low_latency", prog=prog, rounds=8, tokens=f"{DECODE_TOKENS}; exchange, by ranks: {TOKENS}"
    )
    parser.add_argument("--model", choices=MODELS, help=f"default: {DEFAULT}; --quick: {QUICK}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    ranks = "number of GPUs (default: 2 4 for the exchange, all for the layer); experts: the ranks that would"
    parser.add_argument("--ranks", type=int, nargs="+", help=f"{ranks} share the experts (default: {DECODE_RANKS})")
    most = "exchange: the most tokens for which to time `xla`, which is slow"
    parser.add_argument("--most-xla-tokens", type=count_or_zero, default=128, help=most)
    parser.add_argument("--dtypes", nargs="+", choices=("fp8", "bf16"), default=["fp8", "bf16"], help="experts")
    parser.add_argument("--only", nargs="+", help="experts: only variants whose names contain one of these")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure all parts, each with its report."""
    args = harness.parse(options(prog), arguments)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    needed = {part: 1 if part == "experts" else 2 for part in args.parts}
    harness.require_devices("low_latency", args, num_devices=min(needed.values()))
    for part, num_devices in needed.items():
        if not harness.can_measure(args, num_devices):
            print(f"left out, {part}: needs two or more GPUs")
            continue
        report = PARTS[part](args, MODELS[args.model or (QUICK if args.quick else DEFAULT)])
        plots.draw(report.path)
        print(report.path)
