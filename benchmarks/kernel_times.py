"""Where the time of a layer goes: kernels and idle gaps of the first GPU, from JAX's profiler.

    python benchmarks/kernel_times.py [--what low-latency decode moe-forward moe-backward] [--tokens 1 128] [--ranks 2]

Writes results/kernel_times.json. Programs:

  low-latency   16 round trips of low_latency.py: dispatch in FP8, combine in bfloat16
  decode        4 layers of low_latency.py, part `layer`, variant "low latency, fp8"
  moe-forward   one layer of layer.py, variants `--layers`, 4096 tokens per rank, uniform routing
  moe-backward  the same with its gradients

A program runs several times in one trace, with a pause after each run that is far longer than any gap inside. The trace
is split into runs there; the first run is ignored. The `seconds` of a row are the times from first start to last end. A
row also has the busy time, which is the union over streams, the idle rest, and a list of kernels by their share. A
kernel that waits for another GPU counts as busy, so its time includes the lead of this GPU over the slowest one.

Profiling changes launches, and with them the gaps. So a row also has the time of a run without the profiler, as the
host sees it; other scripts measure how long a layer takes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

import jax_ep
from jax_ep.tools.benchmark import harness, low_latency, profiler
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import DEFAULT, MODELS, expert_mesh, make_case, make_weights
from jax_ep.tools.benchmark.layer import LAYERS, layers
from jax_ep.tools.command import Default

ROUND_TRIPS, DECODE_LAYERS = 16, 4
WARMUP = 2  # the first runs load code and record CUDA graphs
NAME_WIDTH = 72
TOKENS, MOE_TOKENS = Default([1, 128], [8]), Default(4096, 8)  # of low-latency and decode; of a layer of training


class Program(NamedTuple):
    """A function to profile, its arguments, and the number of layers or round trips that it computes."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    steps: int


def round_trips(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Return alternating low-latency dispatches and combines."""
    case = make_case(mesh, "uniform", tokens, MODELS[name])
    variant = low_latency.variants(case, low_latency.make_rows(case))["round trip, bf16 back"]
    return Program(*variant.program(case, ROUND_TRIPS), ROUND_TRIPS)


def decode(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Return whole layers of decode-sized batches, in FP8."""
    model = MODELS[name]
    case, weights = make_case(mesh, "uniform", tokens, model), low_latency.served(make_weights(mesh, model), "fp8")
    arrays = (case.x, case.topk_idx, case.topk_weights, *weights)
    run = partial(low_latency.low_latency, model, None, None)
    return Program(*low_latency.layer_chain(mesh, run, arrays, DECODE_LAYERS), DECODE_LAYERS)


def of_training(mesh: jax.sharding.Mesh, name: str, tokens: int, *, backward: bool, layer: str) -> Program:
    """Return one layer of training."""
    case = make_case(mesh, "uniform", tokens, MODELS[name])
    (variant,) = layers(case, make_weights(mesh, case.model), [layer], backward=backward).values()
    return Program(*variant.program(case, 1), 1)


BUILDERS: dict[str, Callable[..., Program]] = {
    "low-latency": round_trips,
    "decode": decode,
    "moe-forward": partial(of_training, backward=False),
    "moe-backward": partial(of_training, backward=True),
}


def record(program: Program, rounds: int) -> tuple[list[list[profiler.Event]], float]:
    """Return the kernels of the first GPU in each run, and microseconds of a run without the profiler."""
    run = partial(jax.jit(program.fn).lower(*program.arguments).compile(), *program.arguments)
    unprofiled = harness.measure_interleaved({"run": run}, rounds, warmup=WARMUP, title="without the profiler")["run"]
    return profiler.trace(run, rounds), 1e6 * unprofiled.median


def profile(report: Report, variant: str, shape: Mapping[str, Any], program: Program, rounds: int) -> None:
    """Profile a program, report the spans of its runs and print its kernels."""
    (_, *runs), unprofiled_us = record(program, rounds + 1)
    found = {"steps": program.steps, "unprofiled_us": unprofiled_us, **profiler.summarize(runs)}
    report.add(variant, shape, Timing(tuple(1e-6 * profiler.span(run) for run in runs)), **found)
    show(", ".join([variant, *map(str, shape.values())]), found)


def show(title: str, found: dict[str, Any]) -> None:
    """Print one program's row."""
    span, idle = found["span_us"], found["idle_us"]
    title += f": span {span:.1f} us, busy {found['busy_us']:.1f}, idle {idle:.1f} ({100 * idle / span:.0f} %)"
    title += f"; {found['unprofiled_us']:.1f} us without the profiler, seen from the host"
    title += "" if found["same_calls"] else "; RUNS DIFFER IN THEIR CALLS"
    cells = [
        [k["name"][:NAME_WIDTH], f"{k['calls']:g}", f"{k['us_per_call']:.2f}", f"{k['us']:.1f}", f"{k['share']:.1%}"]
        for k in found["kernels"]
    ]
    harness.show_table(title, ["kernel", "calls", "us per call", "us per run", "of busy"], cells)


def measure(
    report: Report, args: argparse.Namespace, mesh: jax.sharding.Mesh, cases: Iterable[tuple[str, int, dict[str, str]]]
) -> None:
    """Profile all programs, one at a time; continue after one that fails."""
    for what, tokens, options in cases:
        shape = {"model": args.model, "tokens_per_rank": tokens, "ranks": mesh.size, "dtype": "bfloat16", **options}
        try:
            program = BUILDERS[what](mesh, args.model, tokens, **options)
            profile(report, what, shape, program, args.rounds)
        except Exception as error:
            report.failed(what, shape, f"{type(error).__name__}: {error}")
            print(f"{what}, {tokens} tokens/rank: failed: {error}")
        gc.collect()  # the next program needs the memory


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "kernel_times", rounds=5, tokens=TOKENS)
    parser.add_argument("--what", nargs="+", choices=BUILDERS, default=list(BUILDERS), help="default: all")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["moe"], help="of moe-...")
    parser.add_argument("--model", choices=MODELS, default=DEFAULT, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, help="GPUs, the first of the machine (default: all)")
    return parser


def main() -> None:
    """Profile the programs of the command line, and write the report."""
    args = harness.parse(options())
    if jax.default_backend() != "gpu":
        sys.exit("kernel_times: needs GPUs; nothing measured")
    mesh = expert_mesh(args.ranks or jax.device_count())
    jax_ep.init(mesh)
    of_moe = MOE_TOKENS.quick if args.quick else MOE_TOKENS.full
    cases: list[tuple[str, int, dict[str, str]]] = []
    for what in args.what:
        if what.startswith("moe"):
            cases += [(what, of_moe, {"layer": layer}) for layer in args.layers]
        else:
            cases += [(what, tokens, {}) for tokens in args.tokens]
    report = Report("kernel_times", args, {"what": args.what, "tokens": args.tokens})
    measure(report, args, mesh, cases)


if __name__ == "__main__":
    harness.run(main)
