"""`python -m jax_ep COMMAND`, also installed as `jax-ep`."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ep import __version__
from jax_ep.tools import benchmark, command, doctor, trace, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; without arguments, run that of this process and exit."""
    run = command.run if arguments is None else command.status_of
    return run("jax-ep", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> object:
    parser = command.Parser(prog="jax-ep", description="Tools of jax_ep, expert parallelism for JAX.")
    parser.add_argument("--version", action="version", version=f"jax-ep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for tool in (doctor, benchmark, trace, tune):
        tool.add_command(commands)
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    main()
