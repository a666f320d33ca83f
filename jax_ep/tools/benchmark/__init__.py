"""Benchmarks: `jax-ep bench`, and the modules that `jax-ep trace` and `jax-ep tune` share with them.

Each benchmark is a module with a `main(arguments=None, prog=None)`, which `benchmarks/NAME.py` of a source checkout
runs, too. Public face for other benchmarks: `harness` (timing, reports, tables, command lines), `inputs` (models,
meshes, random arrays), `chains` (chains of dependent calls), `profiler`, `plots` and `rates` (of the machine).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_ep.tools import command

BENCHMARKS = {
    "exchange": "dispatch and combine, compared with XLA's collectives and the copy engines; two GPUs or more",
    "grouped-gemm": "grouped GEMMs and their gradients, compared with cuBLAS",
    "moe": "the expert layer on several GPUs, forward and backward, compared with what JAX offers",
    "low-latency": "all-to-all and layer for decode-sized batches",
    "train": "a whole training step with the widths of a model, compared with other expert layers",
    "serve": "prefill and decode steps of a whole model on one GPU, compared with transformers",
    "fused-moe": "the expert layer on one GPU, by weight type, compared with `ragged_dot`, cuBLAS and PyTorch",
}
_OUT = Path("runs/benchmarks")


def add_command(commands: Any) -> None:
    """Add `bench` to the command line."""
    summary = "measure an operation, or a layer with the sizes of a model, and its alternatives"
    more = "\n\nEach benchmark has its own options: jax-ep bench fused-moe --help."
    epilog, options = "Prints tables and writes JSON to --out.", f"such as --model, --tokens, --out (default: {_OUT})"
    parser = command.add_choice(commands, "bench", summary, BENCHMARKS, more=more, epilog=epilog, options=options)
    parser.set_defaults(run=lambda args: run(args.what, args.options, f"jax-ep bench {args.what}"))


def run(name: str, options: Sequence[str], prog: str) -> None:
    """Run a benchmark in this process; without `--out` it writes to `runs/benchmarks` in the current folder."""
    from jax_ep.tools.benchmark import harness

    harness.measured(lambda: _main(name)(["--out", str(_OUT), *options], prog))


def _main(name: str) -> Callable[[Sequence[str], str], None]:
    """Return the `main` of a benchmark; their imports take a second, so they are not at the top."""
    module = "layer" if name == "moe" else name.replace("-", "_")
    return importlib.import_module(f"{__name__}.{module}").main
