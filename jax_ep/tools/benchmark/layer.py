"""The whole expert layer and its fused halves on GPUs, beside what plain JAX offers: device time inside jit.

    python benchmarks/layer.py --models deepseek-v3 --tokens 4096 --routing uniform     # one case
    python benchmarks/layer.py --models mixtral-8x7b --add                              # more, to the same file

Writes results/moe_layer.json, and draws layer_by_model.png of all such reports. `--quick` without GPUs runs the layers
in plain XLA, and parts, if asked for, in Triton's interpreter.

Parts: fused kernels are compared with the longer of exchange and product, and with both in sequence, dispatch + GEMM 1
with the product of `pallas`, too. GEMM 2 + combine runs as the package chooses, and in each mode by name; the sequence
has the product of `triton`. "gradients" is the backward pass of dispatch + GEMM 1: GEMM + combine, as the package
chooses, and the weight gradient, each alone, one after the other, and with the gradient in the launch of GEMM +
combine, or in that of combine alone. The batched einsum has as many rows in equal groups.
Layers: forward, and with the gradients of tokens, router weights and both matrices; the baselines are those of
baselines.py. The capacity of `jax_ep.moe` and of the ragged baseline is the most loaded rank's rows, rounded up to
128, which the host knows from the routing, so that nothing is dropped; `--layers dropless` is the layer with room for
any routing, and does the same work with W times the rows. `--layers scatter serial` is the layer in each mode of
GEMM + combine, "fused dispatch" and "serial dispatch" in those of dispatch + GEMM, and "fused gradients" and "gradients
apart" with `fuse_weight_gradients`, and "kept" with `keep_tokens`: beside "moe" it shows what it costs to send tokens
again, and how much each keeps for the backward pass, without matrices. `--layers moe wire fp8 "fp8 once" xla` compares
the layer in bfloat16 with those that send in FP8, and send and multiply in FP8; the quantisation of the matrices is in
their time, but for "fp8 once", whose matrices were quantised before. The other baseline drops, and the report says how
much.
TFLOP/s are those of a GPU on average and count real rows only, with three times the forward's for both ways.

The parts of a case take turns with each other, and so do its layers. The ragged baseline comes last, by itself: it is
slow, and a run in which it hangs ends there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

import jax_ep
from jax_ep.core.facts import ExchangeFacts
from jax_ep.ops import registry
from jax_ep.tools.benchmark import harness, plots
from jax_ep.tools.benchmark.exchange_chains import OPTIONS
from jax_ep.tools.benchmark.inputs import MODELS, expert_mesh, make_weights
from jax_ep.tools.benchmark.layer_chains import Case, make_case
from jax_ep.tools.benchmark.layer_run import Run, label, ratio_to_longer, shape_of
from jax_ep.tools.benchmark.layer_variants import (
    DISPATCHED,
    GRADIENT_MODES,
    LAYERS,
    MODES,
    PALLAS,
    PARTS,
    layers,
    parts,
)
from jax_ep.tools.command import count_or_zero

RAGGED_TIMEOUT_S = 60.0
RAGGED_ROUNDS, RAGGED_LENGTHS = 3, (1, 2)
DEFAULT_MODELS = ["deepseek-v3", "qwen3-235b", "mixtral-8x7b"]
DEFAULT_LAYERS = ["moe", "xla", "capacity", "ragged"]
DIRECTIONS = {"forward": False, "forward + backward": True}


def chain_lengths(tokens: int, *, layer: bool, quick: bool) -> tuple[int, int]:
    """Calls of the short and the long chain: their difference must be far above what one launch may take longer."""
    if quick:
        return 1, 3
    if tokens <= 1024:
        return (2, 10) if layer else (4, 36)
    return (1, 4) if layer or tokens > 4096 else (2, 12)


def measure_parts(run: Run, case: Case, args: argparse.Namespace) -> None:
    """The halves of the layer."""
    lengths = chain_lengths(case.layout.num_tokens, layer=False, quick=args.quick)
    on_gpus = jax.default_backend() == "gpu"  # Mosaic's interpreter takes one device at a time
    variants = parts(case, args.parts, pallas=on_gpus)
    times = run.measure(case, "forward", variants, lengths)
    others = {
        "dispatch": [DISPATCHED[None]],
        "combine": [*MODES.values()],
        "gradients": [GRADIENT_MODES["serial"]],
    }
    for key in args.parts:
        part, ratios = PARTS[key], {}
        fused = [part.fused, *others[key]]
        for name in fused:
            overlaps = key != "gradients"  # there both parts multiply
            if overlaps and {name, part.exchange, part.product} <= set(times):
                both = times[part.exchange], times[part.product]
                ratios[f"{name} / longer of both"] = ratio_to_longer(times[name], *both)
            if {name, part.sequence} <= set(times):
                ratios[f"{name} / sequence"] = times[name].ratio_to(times[part.sequence])
        if key == "dispatch" and PALLAS.sequence in times:
            for name in DISPATCHED.values():
                ratios[f"{name} / sequence, pallas"] = times[name].ratio_to(times[PALLAS.sequence])
        if {part.product, part.einsum} <= set(times):
            ratios[f"{part.product} / einsum"] = times[part.product].ratio_to(times[part.einsum])
        run.summarise(case, **ratios)


def measure_layers(run: Run, case: Case, chosen: list[str], args: argparse.Namespace) -> None:
    """The layer in both directions."""
    lengths = chain_lengths(case.layout.num_tokens, layer=True, quick=args.quick)
    for direction in args.directions:
        variants = layers(case, chosen, backward=DIRECTIONS[direction])
        notes = layer_notes(case)
        times = run.measure(case, direction, variants, lengths, notes=notes)
        ours = times.pop(LAYERS["moe"], None)
        if ours is not None:
            run.summarise(case, **{f"{direction}, moe / {name}": ours.ratio_to(t) for name, t in times.items()})


def layer_notes(case: Case) -> dict[str, dict[str, Any]]:
    """What rows of the report say about variants: which implementation serves the users' call, and what is dropped."""
    facts = ExchangeFacts(case.inputs[0].dtype, case.model.hidden, case.layout)
    return {
        LAYERS["moe"]: {"implementation": registry.choose(OPTIONS, facts).implementation},
        LAYERS["capacity"]: {"dropped": case.dropped},
    }


def measure_ragged(run: Run, case: Case, timeout_s: float = RAGGED_TIMEOUT_S) -> None:
    """The ragged baseline, with a watchdog."""
    name, unfinished = LAYERS["ragged"], list(DIRECTIONS)
    for direction in DIRECTIONS:
        run.forget(case, direction, [name])

    def give_up() -> None:
        for direction in unfinished:
            error = f"not finished {timeout_s:g} s after the baseline began"
            run.report.failed(name, shape_of(case), error, direction=direction)
        print(
            f"{label(case)}: the ragged baseline is not finished after {timeout_s:g} s; the run ends here", flush=True
        )

    with harness.ends_the_run(timeout_s, give_up):
        for direction, backward in DIRECTIONS.items():
            variants, expected = (layers(case, [key], backward=backward) for key in ("ragged", "xla"))
            run.measure(case, direction, variants, RAGGED_LENGTHS, rounds=RAGGED_ROUNDS, references=expected)
            unfinished.remove(direction)


def cases(run: Run, mesh: jax.sharding.Mesh, wanted: Iterable[tuple[str, str, int]], minutes: float) -> Iterator[Case]:
    """The cases, one at a time, until the time of the run is over."""
    weights_of, weights, longest = "", None, 0.0
    for name, kind, tokens in wanted:
        began = time.perf_counter()
        if began - run.started + longest > 60 * minutes:
            print(f"left out, for lack of time: {name}, {tokens} tokens/rank, {kind}")
            continue
        if name != weights_of:
            weights = None  # before the next ones take their place
            weights_of, weights = name, make_weights(mesh, MODELS[name])
        yield make_case(mesh, name, kind, tokens, weights)
        gc.collect()
        longest = max(longest, time.perf_counter() - began)


def measure_all(run: Run, args: argparse.Namespace) -> None:
    """All cases, and then the ragged baseline."""
    mesh = expert_mesh(jax.device_count())
    wanted = list(itertools.product(args.models, args.routing, args.tokens))
    chosen = [name for name in args.layers if name != "ragged"]
    if args.parts or chosen:
        for case in cases(run, mesh, wanted, args.minutes):
            if args.parts:
                measure_parts(run, case, args)
            if chosen:
                measure_layers(run, case, chosen, args)
        plots.draw_layers(args.out)
    if "ragged" in args.layers:
        slow = [case for case in wanted if case[1] == "uniform" and case[2] in args.ragged_tokens]
        for case in cases(run, mesh, slow, args.minutes):
            measure_ragged(run, case)
        plots.draw_layers(args.out)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__, "layer", prog=prog, rounds=8, tokens="4096 1024 16384")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help=f"default: {' '.join(DEFAULT_MODELS)}; --quick: tiny"
    )
    parser.add_argument("--routing", nargs="+", choices=["uniform", "zipf"], help="default: both; --quick: uniform")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all on GPUs; none: layers only")
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=DEFAULT_LAYERS, help="none: parts only")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="of layers")
    parser.add_argument(
        "--ragged-tokens",
        type=count_or_zero,
        nargs="*",
        default=[4096],
        help="of the ragged baseline, if uniform",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case that would end later")
    parser.add_argument("--add", action="store_true", help="keep what the file holds of other cases and variants")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measures what the command line asks for and writes the report."""
    args = harness.parse(options(prog), arguments)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    harness.require_devices("layer", args)
    on_gpus = jax.default_backend() == "gpu"
    args.models = args.models or (["tiny"] if args.quick else DEFAULT_MODELS)
    args.tokens = args.tokens or ([16, 48] if args.quick else [4096, 1024, 16384])
    args.routing = args.routing or (["uniform"] if args.quick else ["uniform", "zipf"])
    args.parts = (list(PARTS) if on_gpus else []) if args.parts is None else args.parts
    if args.parts and not on_gpus:
        jax_ep.init(transport="shared_memory")
    run = Run(args)
    measure_all(run, args)
    print(run.report.path)
