"""`python -m jax_ep COMMAND`, also installed as `jax-ep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_ep.tools import bench, doctor, trace, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jax-ep", description="Expert parallelism for JAX: tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    bench.add_command(commands)
    trace.add_command(commands)
    tune.add_command(commands)
    args = parser.parse_args(arguments)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
