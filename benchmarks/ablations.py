"""What the decisions behind dispatch and combine are worth: each kernel as it is, and without one of them, in one run.

    python benchmarks/ablations.py [--models deepseek-v3] [--tokens 4096] [--routing uniform zipf]

Writes results/ablations.json. `--quick` without GPUs runs the kernels in Triton's interpreter. Decisions:

  token saving   a token travels once to each rank that has one of its experts. Without: once for each expert, as T * K
                 tokens of one expert each, which are there before; combine adds the K rows of a token afterwards
  token sorting  dispatch + GEMM sends tokens in the order of their first expert on the destination. Without: in their
                 own order, and each expert waits for as much of it as it needs
  block order    dispatch + GEMM sends a block to each peer in turn. Without: all blocks to one peer after another,
                 which on two ranks is the same

A row has the bytes that a rank sends, on average, and what all its pairs of a token and an expert on another rank have.
Results are compared with those of the kernel as it is.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

import jax_ep
from layer import cases, chain_lengths
from lib import ablation_variants, growth, harness
from lib.ablation_variants import EVERYTHING, NO_SAVING
from lib.inputs import DEFAULT, MODELS, QUICK, expert_mesh
from lib.layer_chains import Case
from lib.layer_run import Run


def sent(case: Case, name: str) -> dict[str, float]:
    """Bytes that a rank sends, and those of its pairs that leave it, on average."""
    layout = case.layout
    travel = growth.travelling(case.ids, layout.num_ranks, layout.num_experts)
    row_bytes = 2 * case.model.hidden
    tokens, pairs = (float(part.sum() / layout.num_ranks * row_bytes) for part in travel)
    return {"sent_bytes": pairs if name.endswith(NO_SAVING) else tokens, "pairs_bytes": pairs}


def measure(run: Run, case: Case, args: argparse.Namespace) -> None:
    """All operations on one case."""
    for what in args.operations:
        variants = ablation_variants.variants(case, (what,))
        lengths = chain_lengths(case.layout.num_tokens, layer=False, quick=args.quick)
        times = run.measure(case, "forward", variants, lengths, notes={name: sent(case, name) for name in variants})
        whole = times.pop(what, None)
        if whole is not None:
            run.summarise(case, **{f"{name} / with it": timing.ratio_to(whole) for name, timing in times.items()})


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=8, tokens="4096")
    parser.add_argument("--models", nargs="+", choices=MODELS, help=f"default: {DEFAULT}; --quick: {QUICK}")
    parser.add_argument("--routing", nargs="+", choices=["uniform", "zipf"], default=["uniform"])
    parser.add_argument("--operations", nargs="+", choices=EVERYTHING, default=list(EVERYTHING), help="default: all")
    parser.add_argument("--ranks", type=int, help="GPUs, the first of the machine (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case that would end later")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for and writes the report."""
    args = harness.parse(options(), arguments)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    if not harness.can_measure("ablations", args):
        return
    mesh = expert_mesh(args.ranks or jax.device_count())
    jax_ep.init(mesh, transport=None if jax.default_backend() == "gpu" else "shared_memory")
    models, tokens = args.models or [QUICK if args.quick else DEFAULT], args.tokens or ([8] if args.quick else [4096])
    wanted: list[tuple[str, str, int]] = [(m, kind, n) for m in models for kind in args.routing for n in tokens]
    settings: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick, "ranks": mesh.size}
    run = Run(args.out, settings, add=False, name=f"ablations{args.suffix}")
    for case in cases(run, mesh, wanted, args.minutes):
        measure(run, case, args)
    jax_ep.finalize()
    print(run.report.path)


if __name__ == "__main__":
    main()
