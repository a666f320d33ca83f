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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import jax

import jax_ep
from jax_ep.serving import serving_weights
from jax_ep.tools.benchmark import decode_layer, harness, layer_variants, low_latency_chains
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.benchmark.inputs import DEFAULT, MODELS, QUICK, expert_mesh, make_weights
from jax_ep.tools.benchmark.profiler import Program, profile, show

ROUND_TRIPS, DECODE_LAYERS = 16, 4
TOKENS, MOE_TOKENS, QUICK_TOKENS = [1, 128], 4096, 8


def round_trips(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Low-latency dispatch and combine in turns."""
    inputs = low_latency_chains.make_inputs(mesh, tokens, MODELS[name])
    variant = low_latency_chains.variants(inputs)["round trip, bf16 back"]
    return Program(*low_latency_chains.chain(inputs.case, variant, ROUND_TRIPS), ROUND_TRIPS)


def decode(mesh: jax.sharding.Mesh, name: str, tokens: int) -> Program:
    """Whole layers of decode-sized batches, in FP8."""
    model = MODELS[name]
    weights = jax.jit(partial(serving_weights, format="fp8", activations="fp8"))(*make_weights(mesh, model))
    inputs = decode_layer.make_tokens(mesh, model, tokens)
    layer = partial(decode_layer.low_latency, model, None)
    return Program(*decode_layer.chain(mesh, layer, (*inputs, weights), DECODE_LAYERS), DECODE_LAYERS)


BUILDERS: dict[str, Callable[..., Program]] = {
    "low-latency": round_trips,
    "decode": decode,
    "moe-forward": partial(layer_variants.program, backward=False),
    "moe-backward": partial(layer_variants.program, backward=True),
}


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
    parser = harness.parser(__doc__, "kernel_times", rounds=5, tokens=f"{TOKENS}; of low-latency and decode")
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
    settings = {"what": args.what, "tokens": args.tokens}
    report = Report("kernel_times", args, settings)
    measure(report, args, mesh, cases)
    print(report.path)


if __name__ == "__main__":
    harness.run(main)
