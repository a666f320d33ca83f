"""Command-line options shared by training and generation."""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_ep.tools.command import Parser, count_or_zero

CPU_DEVICES = 8


def make_parser(description: str | None, *, out: str, expert_parallel: str) -> Parser:
    """Create a parser with `--out`, `--devices`, `--expert-parallel` and `--seed`; callers describe two of them."""
    devices = f"devices to use; default: all accelerators, or {CPU_DEVICES} virtual CPU devices"
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/moe_lm"), help=out)
    parser.add_argument("--devices", type=int, help=devices)
    parser.add_argument("--expert-parallel", type=int, help=f"devices on the expert axis; {expert_parallel}")
    parser.add_argument("--seed", type=count_or_zero, default=0)
    return parser
