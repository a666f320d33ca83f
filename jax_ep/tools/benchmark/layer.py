"""The expert layer and its fused parts on GPUs, compared with plain JAX: device time inside jit.

    python benchmarks/layer.py --models deepseek-v3 --tokens 4096 --routing uniform     # one case
    python benchmarks/layer.py --models mixtral-8x7b --add                              # more, to the same file

Writes results/moe_layer.json, and draws layer_by_model.png of all such reports. Without GPUs `--quick` runs the layers
in plain XLA, and parts, if requested, in Triton's interpreter.

Parts compare a fused kernel with the longer of all-to-all and GEMM, and with both in sequence; the sequence of
dispatch + GEMM 1 also with the GEMM of `pallas`. GEMM 2 + combine runs with the default choice, and in each mode.
"gradients" is the backward pass of dispatch + GEMM 1: GEMM + combine and the weight gradient, alone, in sequence, and
with the weight gradient in the kernel of GEMM + combine or of combine. The batched einsum has as many rows in equal
groups.

Layers run forward, and with the gradients of tokens, router weights and expert weights. The baselines are in
baselines.py. The capacity of `jax_ep.moe` and of the ragged baseline is the number of rows of the most loaded rank,
rounded up to 128, so nothing is dropped. The other baseline drops; the report says how much. `--layers scatter serial`
runs the layer in each mode of GEMM + combine, "fused dispatch" and "serial dispatch" in those of dispatch + GEMM,
"fused gradients" and "gradients apart" with and without `fuse_weight_gradients`. "fp8" quantizes the weights in each
call, "fp8 once" before.

TFLOP/s are per GPU, count real rows only, and count three times the forward pass for forward + backward. The parts of a
case are interleaved, and so are its layers. The ragged baseline runs last: it is slow, and if it hangs, the run ends.
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
    """Return calls of the short and the long chain, whose difference must exceed the scatter of one launch."""
    if quick:
        return 1, 3
    if tokens <= 1024:
        return (2, 10) if layer else (4, 36)
    return (1, 4) if layer or tokens > 4096 else (2, 12)


def measure_parts(run: Run, case: Case, args: argparse.Namespace) -> None:
    """Measure the parts of the layer."""
    lengths = chain_lengths(case.layout.num_tokens, layer=False, quick=args.quick)
    on_gpus = jax.default_backend() == "gpu"  # Mosaic's interpreter supports one device at a time
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
            overlaps = key != "gradients"  # there both parts are GEMMs
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
    """Measure the layer in both directions."""
    lengths = chain_lengths(case.layout.num_tokens, layer=True, quick=args.quick)
    for direction in args.directions:
        variants = layers(case, chosen, backward=DIRECTIONS[direction])
        notes = layer_notes(case)
        times = run.measure(case, direction, variants, lengths, notes=notes)
        ours = times.pop(LAYERS["moe"], None)
        if ours is not None:
            run.summarise(case, **{f"{direction}, moe / {name}": ours.ratio_to(t) for name, t in times.items()})


def layer_notes(case: Case) -> dict[str, dict[str, Any]]:
    """Return notes on variants: the implementation of the default call, and the share of dropped assignments."""
    facts = ExchangeFacts(case.inputs[0].dtype, case.model.hidden, case.layout)
    return {
        LAYERS["moe"]: {"implementation": registry.choose(OPTIONS, facts).implementation},
        LAYERS["capacity"]: {"dropped": case.dropped},
    }


def measure_ragged(run: Run, case: Case, timeout_s: float = RAGGED_TIMEOUT_S) -> None:
    """Measure the ragged baseline, with a watchdog."""
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
    """Make the cases, one at a time, until the time of the run is over."""
    weights_of, weights, longest = "", None, 0.0
    for name, kind, tokens in wanted:
        began = time.perf_counter()
        if began - run.started + longest > 60 * minutes:
            print(f"left out, no time left: {name}, {tokens} tokens/rank, {kind}")
            continue
        if name != weights_of:
            weights = None  # free memory for the next ones
            weights_of, weights = name, make_weights(mesh, MODELS[name])
        yield make_case(mesh, name, kind, tokens, weights)
        gc.collect()
        longest = max(longest, time.perf_counter() - began)


def measure_all(run: Run, args: argparse.Namespace) -> None:
    """Measure all cases, then the ragged baseline."""
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
    """Return the command line."""
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
    parser.add_argument("--minutes", type=float, default=8.0, help="start no case that would end later")
    parser.add_argument("--add", action="store_true", help="keep the rows of other cases and variants in the file")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the cases of the command line, and write the report."""
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
