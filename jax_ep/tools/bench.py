"""`jax-ep bench` and `jax-ep scale`: the benchmarks of the source tree, which measure the package beside others."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "exchange": (
        "exchange.py",
        "dispatch and combine, beside XLA's collectives and the copy engines; two GPUs or more",
    ),
    "grouped-gemm": ("grouped_gemm.py", "products of groups and their gradients, beside cuBLAS"),
    "moe": ("layer.py", "the expert layer over several GPUs, forward and backward, beside what JAX offers"),
    "low-latency": ("low_latency.py", "exchange, experts and layer of decode-sized batches"),
    "fused-moe": (
        "fused_moe.py",
        "the expert layer of one GPU, by weight type, beside `ragged_dot`, cuBLAS and PyTorch",
    ),
}
_SCALING = "scaling.py"
_OUT = Path("runs/benchmarks")
_PACKAGE = Path(__file__).resolve().parents[1]


def add_command(commands: Any) -> None:
    """Adds `bench` and `scale` to the command line."""
    summary = "measure an operation, or a layer in the sizes of a model, beside its alternatives"
    listed = "\n".join(f"  {name:13} {what}" for name, (_, what) in BENCHMARKS.items())
    parser = commands.add_parser(
        "bench",
        help=summary,
        description=f"{summary}.\n\n{listed}\n\nOptions are those of the benchmark: jax-ep bench fused-moe --help.",
        epilog="A table is printed; JSON, and where matplotlib is installed a PNG, go to --out.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHMARKS, metavar="WHAT")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=f"such as --model, --tokens, --out (default: {_OUT})")
    parser.set_defaults(run=run)
    _add_scale(commands)


def _add_scale(commands: Any) -> None:
    summary = "measure how operations, kernels, the layer and a training scale over this machine's GPUs"
    # Every option is the script's, --help too, and no dash begins one of this parser.
    parser = commands.add_parser("scale", help=summary, add_help=False, prefix_chars="+")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_scale)


def run_scale(args: argparse.Namespace) -> None:
    """Run the benchmark of scaling in this process, as its script."""
    call(_SCALING, args.options, program="jax-ep scale")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark in this process, as its script."""
    call(BENCHMARKS[args.what][0], args.options, program=f"jax-ep bench {args.what}")


def folder() -> Path:
    """Of the scripts: those of the source tree where the package is imported from there, else those of the wheel."""
    in_tree = _PACKAGE.parent / "benchmarks"
    return in_tree if (in_tree / "lib" / "harness.py").is_file() else _PACKAGE / "tools" / "benchmarks"


def call(name: str, options: Sequence[str], *, program: str, out: str = str(_OUT)) -> None:
    """Run a script with these options, which write to `out` of the current folder unless they say where.

    The script finds `program`, what `usage:` shows, in its global PROGRAM (`program_name`).
    """
    script = folder() / name
    given = any(option == "--out" or option.startswith("--out=") for option in options)
    arguments = [str(script), *options, *([] if given else ["--out", out])]
    before = sys.argv, list(sys.path)
    sys.argv = arguments
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), {"PROGRAM": program}, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def program_name() -> str | None:
    """The command for which a script runs; None where it runs by itself."""
    return getattr(sys.modules["__main__"], "PROGRAM", None)


def library(name: str) -> Any:
    """A module of what the benchmarks share, such as `inputs`, which has the sizes of models."""
    before = list(sys.path)
    sys.path.insert(0, str(folder()))
    try:
        return importlib.import_module(f"lib.{name}")
    finally:
        sys.path[:] = before
