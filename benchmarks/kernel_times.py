"""Where the time of a layer goes: kernels and idle gaps of the first GPU, as JAX's profiler sees them.

    python benchmarks/kernel_times.py [--what low-latency decode moe-forward moe-backward] [--tokens 1 128] [--ranks 2]

Writes results/kernel_times.json. Programs:

  low-latency   16 round trips of low_latency.py: dispatch in FP8, combine in bfloat16
  decode        4 layers of low_latency.py, part `layer`, its variant "low latency, fp8"
  moe-forward   one layer of layer.py, its variants `--layers`, 4096 tokens per rank, uniform routing
  moe-backward  the same with its gradients

A program runs several times in one trace, with a pause after each run that is far longer than any gap inside, and is
split into runs there; the first one is left out. A row has the times from first start to last end as its `seconds`, the
busy time, which is the union over streams, the idle rest, and a list of kernels by what they take of a run. A kernel
that waits for another GPU is busy meanwhile: its time has the lead of this GPU over the slowest one in it.

Profiling changes launches, and gaps with them. So a row also has what a run takes without the profiler, as the host
sees it; other scripts tell how long a layer takes. `--traces FOLDER` keeps the traces, which ui.perfetto.dev shows.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jax_ep
from jax_ep.serving import serving_weights
from lib import decode_layer, harness, layer_chains, layer_variants, low_latency_chains, trace_events
from lib.harness import Report, Timing
from lib.inputs import DEFAULT, MODELS, QUICK, expert_mesh, make_weights
from lib.trace_events import Event

ROUND_TRIPS, DECODE_LAYERS = 16, 4
TOKENS, MOE_TOKENS, QUICK_TOKENS = [1, 128], 4096, 8
PAUSE_S = 0.005
WARMUP = 2  # what is loaded, or recorded as a CUDA graph, on first use is not what the trace is about
_NAME_WIDTH = 72


class Program(NamedTuple):
    """What is profiled: a function, its arguments, and how many layers or round trips it makes of them."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    steps: int


def round_trips(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Low-latency dispatch and combine in turns."""
    inputs = low_latency_chains.make_inputs(mesh, tokens, MODELS[name])
    variant = low_latency_chains.variants(inputs)["round trip, bf16 back"]
    return Program(*low_latency_chains.chain(inputs.case, variant, ROUND_TRIPS), ROUND_TRIPS)


def decode(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Whole layers of decode-sized batches, in FP8."""
    model = MODELS[name]
    weights = jax.jit(partial(serving_weights, fp8=True))(*make_weights(mesh, model))
    inputs = decode_layer.make_tokens(mesh, model, tokens)
    layer = partial(decode_layer.low_latency, model, None)
    return Program(*decode_layer.chain(mesh, layer, (*inputs, weights), DECODE_LAYERS), DECODE_LAYERS)


def moe(mesh: jax.sharding.Mesh, name: str, tokens: int, *, backward: bool, layer: str = "moe") -> Program:
    """The layer of training."""
    case = layer_chains.make_case(mesh, name, "uniform", tokens, make_weights(mesh, MODELS[name]))
    (variant,) = layer_variants.layers(case, [layer], backward=backward).values()
    return Program(*layer_chains.chain(case, variant)(1), 1)


BUILDERS: dict[str, Callable[..., Program]] = {
    "low-latency": round_trips,
    "decode": decode,
    "moe-forward": partial(moe, backward=False),
    "moe-backward": partial(moe, backward=True),
}


def record(program: Program, rounds: int, folder: Path) -> tuple[list[Event], float]:
    """Kernels of the first GPU in so many runs after those that warm up; and us of a run without the profiler."""
    run = partial(jax.jit(program.fn).lower(*program.arguments).compile(), *program.arguments)
    unprofiled = harness.measure_interleaved({"run": run}, rounds, warmup=WARMUP, title="without the profiler")["run"]
    options = jax.profiler.ProfileOptions()
    # A trace has room for a million events, which those of the host would fill.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(rounds):
            jax.block_until_ready(run())
            time.sleep(PAUSE_S)
    return trace_events.kernels(trace_events.load(folder)), 1e6 * unprofiled.median


def profile(program: Program, rounds: int, folder: Path | None = None) -> tuple[Timing, dict[str, Any]]:
    """Spans of the runs, and the rest of the program's row; the trace is kept in a folder, if there is one."""
    with tempfile.TemporaryDirectory() as scratch:
        events, unprofiled_us = record(program, rounds + 1, folder or Path(scratch))
    runs = trace_events.split_runs(events, rounds + 1)[1:]
    timing = Timing(tuple(1e-6 * trace_events.span(run) for run in runs))
    return timing, {"steps": program.steps, "unprofiled_us": unprofiled_us, **trace_events.summarise(runs)}


def show(title: str, found: dict[str, Any]) -> None:
    """Prints one program's row."""
    span, idle = found["span_us"], found["idle_us"]
    title += f": span {span:.1f} us, busy {found['busy_us']:.1f}, idle {idle:.1f} ({100 * idle / span:.0f} %)"
    title += f"; {found['unprofiled_us']:.1f} us without the profiler, seen from the host"
    title += "" if found["same_calls"] else "; RUNS DIFFER IN THEIR CALLS"
    cells = [
        [k["name"][:_NAME_WIDTH], f"{k['calls']:g}", f"{k['us_per_call']:.2f}", f"{k['us']:.1f}", f"{k['share']:.1%}"]
        for k in found["kernels"]
    ]
    harness.show_table(title, ["kernel", "calls", "us per call", "us per run", "of busy"], cells)


def measure(
    report: Report, args: argparse.Namespace, mesh: jax.sharding.Mesh, cases: Iterable[tuple[str, int, dict[str, str]]]
) -> None:
    """All programs, one at a time; one that fails does not keep the others from running."""
    for what, tokens, options in cases:
        shape = {"model": args.model, "tokens_per_rank": tokens, "ranks": mesh.size, "dtype": "bfloat16", **options}
        title = ", ".join([what, *options.values(), f"{tokens} tokens/rank", f"{mesh.size} ranks"])
        try:
            folder = args.traces and args.traces / "-".join([what, *options.values(), str(tokens)])
            timing, found = profile(BUILDERS[what](mesh, args.model, tokens, **options), args.rounds, folder)
        except Exception as error:
            report.failed(what, shape, f"{type(error).__name__}: {error}")
            print(f"{title}: failed: {error}")
        else:
            report.add(what, shape, timing, **found)
            show(title, found)
        gc.collect()  # the matrices of the next program need their place


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=5, tokens=f"{TOKENS}; of low-latency and decode")
    parser.add_argument("--what", nargs="+", choices=BUILDERS, default=list(BUILDERS), help="default: all")
    parser.add_argument("--layers", nargs="+", choices=layer_variants.LAYERS, default=["moe"], help="of moe-...")
    parser.add_argument("--model", choices=MODELS, help=f"default: {DEFAULT}; --quick: {QUICK}")
    parser.add_argument("--ranks", type=int, help="GPUs, the first of the machine (default: all)")
    parser.add_argument("--traces", type=Path, help="folder to keep the traces in (default: they are not kept)")
    return parser


def main() -> None:
    """Profiles what the command line asks for and writes the report."""
    args = harness.parse(options())
    if jax.default_backend() != "gpu":
        sys.exit("kernel_times: needs GPUs; nothing measured")
    mesh = expert_mesh(args.ranks or jax.device_count())
    jax_ep.init(mesh)
    args.model = args.model or (QUICK if args.quick else DEFAULT)
    args.tokens = args.tokens or ([QUICK_TOKENS] if args.quick else TOKENS)
    of_moe = [QUICK_TOKENS if args.quick else MOE_TOKENS]
    layers = [{"layer": layer} for layer in args.layers]
    cases = itertools.chain(
        *(itertools.product([w], *((of_moe, layers) if "moe" in w else (args.tokens, [{}]))) for w in args.what)
    )
    settings = {"rounds": args.rounds, "quick": args.quick, "what": args.what, "tokens": args.tokens}
    report = Report(f"kernel_times{args.suffix}", args.out, settings)
    measure(report, args, mesh, cases)
    print(report.path)


if __name__ == "__main__":
    harness.run(main)
