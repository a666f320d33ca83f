"""Command lines: every error becomes one line on standard error and an exit status.

Exit status: 0, or the result of the command; 1: it cannot write or measure; 2: bad arguments or files. A closed pipe
ends the command silently. `python -X dev` also shows the traceback.

Ctrl-C ends the process at once (130 in a shell), because Python would handle it only after a compiler or a kernel has
ended, and lose it in a callback of XLA. Commands write each result when they have it, and replace files atomically.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import math
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple, NoReturn

from jax_ep.values import cut

_CLOSED_PIPE = 128 + signal.SIGPIPE
_LONGEST = 300
_MOST = 2**31 - 1
_MOST_LAYERS = 64  # no model here has more


class Parser(argparse.ArgumentParser):
    """Parser whose options of type int are from 1 to 2^31 - 1, and of type float finite and not negative."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", int, count)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        """End the process with one line; `--help` shows the usage."""
        message = f"{message}; --help describes them" if "arguments are required" in message else message
        self.exit(2, f"{self.prog}: {cut(message, _LONGEST)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise errors of standard output, which argparse ignores."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def add_choice(
    commands: Any, name: str, summary: str, choices: Mapping[str, str], *, more: str = "", epilog: str, options: str
) -> argparse.ArgumentParser:
    """Add a command whose first argument is one of `choices`, which the help lists, and whose other ones `run` parses.

    `more` follows the list, `options` is the help of the other arguments.
    """
    listed = "\n".join(f"  {choice:13} {what}" for choice, what in choices.items())
    texts = {"help": summary, "description": f"{summary}.\n\n{listed}{more}", "epilog": epilog}
    parser: argparse.ArgumentParser
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    parser.add_argument("what", choices=choices, metavar="WHAT")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=options).required = False
    return parser


class Default(NamedTuple):
    """Default of an option, and the one with `--quick`; help texts show both as `%(default)s`."""

    full: Any
    quick: Any

    def __str__(self) -> str:
        full, quick = (" ".join(map(str, one)) if isinstance(one, list | tuple) else one for one in self)
        return f"{full}; --quick: {quick}"


def fill_in(args: argparse.Namespace, *, quick: bool) -> None:
    """Replace every `Default` of a parsed command line."""
    for name, value in vars(args).items():
        if isinstance(value, Default):
            setattr(args, name, value.quick if quick else value.full)


def count(text: str, least: int = 1, most: int = _MOST) -> int:
    """Parse a positive number."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{cut(repr(text), 40)}, expected an integer from {least} to {most}")
    return int(text)


def layer_count(text: str) -> int:
    """Parse a number of layers. XLA compiles each of them, 100 in minutes."""
    return count(text, most=_MOST_LAYERS)


def count_or_zero(text: str) -> int:
    """Parse a number that may be zero."""
    return count(text, 0)


def number(text: str) -> float:
    """Parse a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{cut(repr(text), 40)}, expected a finite number of at least 0")
    return value


def run(name: str, command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process with its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # such as names of files
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # shells start background jobs without it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status_of(name, command))


def status_of(name: str, command: Callable[[], object]) -> int:
    """Run a command and return its exit status, which is 0 if it returns no int; a `SystemExit` passes."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the shell
            setattr(sys, stream, open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))  # noqa: SIM115
    status, message, end = 0, "", None
    try:
        result = command()
        status = result if isinstance(result, int) else 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends the process with status 1
            status = _CLOSED_PIPE
        else:
            end = error
    except BrokenPipeError:
        status = _CLOSED_PIPE
    except Exception as error:
        if sys.flags.dev_mode:
            traceback.print_exc()
        status, message = 2 if isinstance(error, ValueError) else 1, in_one_line(error)
    if (unwritten := _flush(sys.stdout)) is not None:
        if isinstance(unwritten, BrokenPipeError):
            status, message, end = _CLOSED_PIPE, "", None
        elif not status and not (end and end.code):
            status, message, end = 1, f"standard output: {unwritten.strerror}", None
    if message:
        with contextlib.suppress(OSError):
            print(f"{name}: {message}", file=sys.stderr)
    _flush(sys.stderr)
    if end is not None:
        raise end
    return status


def in_one_line(error: BaseException) -> str:
    """Return the message of an error, with its type if the text alone may be unclear."""
    plain = isinstance(error, OSError | ValueError | ImportError | NotImplementedError) and str(error)
    shown = str(error) or "no message; see jax-ep doctor, or `python -X dev` for the traceback"
    return cut(error if plain else f"{type(error).__name__}: {shown}", _LONGEST)


def _flush(stream: IO[str]) -> OSError | None:
    """Flush a stream. If that fails, drop its content: Python would fail again at its exit."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
