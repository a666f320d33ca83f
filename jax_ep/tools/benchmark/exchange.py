"""Dispatch and combine on GPUs: device time inside jit, compared with XLA's collectives in one run.

    python benchmarks/exchange.py [--tokens 4096 32768] [--routing uniform zipf] [--ranks 2 4] [--processes 4]

Writes results/dispatch_combine.json and a plot; with one process per GPU, dispatch_combine_processes.json. `--quick`
without GPUs runs the kernels in Triton's interpreter.

Times are differences of chains of calls, which are longer for fewer tokens. Each includes the few small kernels that
chain the calls; the variant "chain alone" measures them. They matter below about 1000 tokens per rank.
Logical bytes count each (token, other rank) pair once, in bfloat16. Wire bytes are what a variant sends: FP8 with its
scales, or padding as well. Both are averages over the sending ranks. The peak is the copy engine's rate from one GPU to
another in the same run. The floor is the time of the busiest rank at that peak. The report also has the rate of each
GPU while the copy engines of all GPUs copy to all others.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.tools.benchmark import harness, inputs, links, plots, processes
from jax_ep.tools.benchmark.exchange_chains import (
    RAGGED,
    RAGGED_AS_IT_IS,
    Case,
    Variant,
    chain,
    make_case,
    ragged_variants,
    traffic,
    variants,
)
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.command import count_or_zero

RAGGED_TIMEOUT_S = 120.0


def chain_lengths(tokens: int, quick: bool) -> tuple[int, int]:
    """Return calls of the short and the long chain, whose difference must exceed the scatter of one launch."""
    if quick:
        return 1, 2
    return (2, 10) if tokens > 8192 else (4, 36) if tokens > 2048 else (16, 272)


def measure(
    report: Report, kind: str, case: Case, todo: dict[str, Variant], args: argparse.Namespace, peak: float
) -> None:
    """Measure variants of one case, and add them to the report."""
    tokens, num_ranks = case.layout.num_tokens, case.layout.num_ranks
    failures: dict[str, str] = {}
    times = harness.measure_chained(
        {name: partial(chain, case, variant) for name, variant in todo.items()},
        args.rounds,
        lengths=chain_lengths(tokens, args.quick),
        title=f"{kind}, {tokens} tokens, {num_ranks} ranks",
        workers=harness.WORKERS,
        failures=failures,
        resolve=not args.quick,
        compiler_options=harness.GRAPHS_WITH_COLLECTIVES if args.graphs else None,
    )
    shape = shape_of(kind, case)
    for name, error in failures.items():
        report.failed(name, shape, error, processes=jax.process_count())
    for name, timing in times.items():
        found = traffic(case, todo[name], peak)
        if found:
            found["logical_bytes_per_s"] = found["logical_bytes"] / timing.median
            found["wire_bytes_per_s"] = found["wire_bytes"] / timing.median
            found["peak_share"] = found["wire_bytes_per_s"] / peak
        report.add(name, shape, timing, wire=todo[name].wire, **found, processes=jax.process_count())
    show(report, shape, failures)


def shape_of(kind: str, case: Case) -> dict[str, Any]:
    """Return what a row records of its case."""
    sizes = {"tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks, "hidden": case.x.shape[1]}
    return {"routing": kind, **sizes, "dtype": case.x.dtype.name}


def measure_ragged(
    report: Report, case: Case, args: argparse.Namespace, peak: float, timeout_s: float = RAGGED_TIMEOUT_S
) -> None:
    """Measure `ragged_all_to_all` last: if it hangs, the run ends here."""

    def give_up() -> None:  # the devices are blocked
        for name in (RAGGED, RAGGED_AS_IT_IS):
            error = f"not finished {timeout_s:g} s after it began"
            report.failed(name, shape_of("uniform", case), error, processes=jax.process_count())
        print(f"ragged_all_to_all is not finished after {timeout_s:g} s; the run ends here", flush=True)

    with harness.ends_the_run(timeout_s, give_up):
        measure(report, "uniform", case, ragged_variants(case), args, peak)


def show(report: Report, shape: dict[str, Any], failures: dict[str, str]) -> None:
    """Print the rows of one case."""
    table = []
    for row in report.rows:
        if row["shape"] != shape or "failed" in row:
            continue
        s = row["seconds"]
        cells = [row["variant"], f"{1e6 * s['median']:.0f}", f"{1e6 * s['q1']:.0f} to {1e6 * s['q3']:.0f}"]
        if row["wire"]:
            rates = [f"{row[f'{kind}_bytes_per_s'] / 1e9:.0f}" for kind in ("logical", "wire")]
            cells += [*rates, f"{100 * row['peak_share']:.0f} %", f"{1e6 * row['floor_seconds']:.0f}"]
        table.append(cells + [""] * (7 - len(cells)))
    table += [[name, "failed", error[:60], "", "", "", ""] for name, error in failures.items()]
    title = f"{shape['routing']}, {shape['tokens_per_rank']} tokens/rank, {shape['ranks']} ranks"
    columns = ["variant", "us", "quartiles", "logical GB/s", "wire GB/s", "of peak", "floor us"]
    harness.show_table(title, columns, table)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "exchange", prog=prog, rounds=8, tokens="128 1024 4096 32768")
    parser.add_argument("--model", choices=inputs.MODELS, help=f"default: {inputs.DEFAULT}; --quick: {inputs.QUICK}")
    parser.add_argument("--routing", nargs="+", default=["uniform", "zipf"], choices=["uniform", "zipf"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs, the first of the machine")
    parser.add_argument(
        "--ragged-tokens",
        type=count_or_zero,
        nargs="*",
        default=[4096],
        help=f"of {RAGGED}, which is slow",
    )
    parser.add_argument("--graphs", action="store_true", help="launch chains as CUDA graphs, collectives in them")
    processes.add_option(parser)
    return parser


def make_report(args: argparse.Namespace, model: inputs.Model, ranks: list[int], peak: float) -> Report:
    """Make the report, without rows."""
    lengths = {str(tokens): chain_lengths(tokens, args.quick) for tokens in args.tokens}
    settings: dict[str, Any] = {"experts": model.experts, "top_k": model.top_k}
    settings |= {
        "graphs": args.graphs,
        "ranks": ranks,
        "tokens": args.tokens,
        "routing": args.routing,
        "chain_lengths": lengths,
    }
    report = Report(f"dispatch_combine{'_processes' * (args.processes > 1)}", args, settings)
    report.summarise(copy_engine_bytes_per_s=peak)
    return report


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure all cases and write the report."""
    args = harness.parse(options(prog), arguments)
    args.tokens = args.tokens or ([8] if args.quick else [128, 1024, 4096, 32768])
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    together = args.processes > 1  # JAX must not initialize before it knows the other processes
    if not together:
        harness.require_devices("exchange", args)
    on_gpus = together or jax.default_backend() == "gpu"
    num_bytes = links.PEAK_BYTES if on_gpus else links.QUICK_BYTES
    figure = links.peak if on_gpus else partial(links.peak, num_bytes)
    if (peak := processes.enter(args.processes, figure)) is None:
        return
    ranks = [jax.device_count()] if together else [n for n in args.ranks if n <= jax.device_count()]
    if not ranks:
        raise ValueError(f"--ranks {args.ranks}: there are {jax.device_count()} devices")
    model = inputs.MODELS[args.model or (inputs.QUICK if args.quick else inputs.DEFAULT)]
    report, engines = make_report(args, model, ranks, peak), {}
    for num_ranks in ranks:
        mesh = inputs.expert_mesh(num_ranks)
        if not together:
            engines[str(num_ranks)] = links.peak_together(list(mesh.devices.flat), num_bytes)
            report.summarise(copy_engines_together_bytes_per_s=engines)
            jax_ep.finalize()
            jax_ep.init(mesh, transport=None if on_gpus else "shared_memory")
        for kind, tokens in itertools.product(args.routing, args.tokens):
            case = make_case(mesh, kind, tokens, jnp.bfloat16, model)
            measure(report, kind, case, variants(case, baselines=kind == "uniform"), args, peak)
        for tokens in [n for n in args.tokens if n in args.ragged_tokens and "uniform" in args.routing]:
            measure_ragged(report, make_case(mesh, "uniform", tokens, jnp.bfloat16, model), args, peak)
    plots.draw(report.path)
