"""Command lines: every error becomes one line on standard error and an exit status.

Exit status: 0, or the result of the command; 1: it cannot write or measure; 2: bad arguments or files; 130: Ctrl-C. A
closed pipe ends the command silently. `python -X dev` also shows the traceback.

Ctrl-C raises KeyboardInterrupt in the main thread. XLA turns it into a RuntimeError in a callback, Python drops it in a
destructor, and it is not handled while a compiler runs. So code that continues after errors calls
`raise_if_interrupted`, `run` checks again when the command has ended, and a thread ends the process after some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO, Any, NoReturn

from jax_ep.core.json_files import cut

_CLOSED_PIPE, _CTRL_C = 128 + signal.SIGPIPE, 128 + signal.SIGINT
_LONGEST = 300
_GRACE_S = 5.0  # from Ctrl-C to the forced end of the process
_MOST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """Parser whose options of type int are from 1 to 2^31 - 1, and of type float finite and not negative."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", int, count)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        """End the process with one line; `--help` shows the usage."""
        self.exit(2, f"{self.prog}: {cut(message, _LONGEST)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise errors of standard output, which argparse ignores."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


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
    parser.add_argument("options", nargs=argparse.REMAINDER, help=options)
    return parser


def count(text: str, least: int = 1) -> int:
    """Parse a positive number."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"{cut(repr(text), 40)}, expected an integer from {least} to {_MOST}")
    return int(text)


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
    sys.unraisablehook = _report_unraisable
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # such as names of files
    _end_soon_after_ctrl_c()
    sys.exit(status_of(name, lambda: _interruptible(command)))


def _interruptible(command: Callable[[], object]) -> object:
    """Run a command; after Ctrl-C raise a KeyboardInterrupt, even if the one of the handler was lost."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start background jobs
        return command()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return command()
    finally:
        if signal.signal(signal.SIGINT, _exit) is _exit:
            raise KeyboardInterrupt


def _interrupt(_: int, frame: FrameType | None) -> NoReturn:
    """Handle the first Ctrl-C. The second one ends the process at once, and so does one during an import.

    C++ modules that import Python modules call `std::terminate` when such an import raises.
    """
    signal.signal(signal.SIGINT, _exit)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _exit()
        frame = frame.f_back
    raise KeyboardInterrupt


def _exit(*_: object) -> NoReturn:
    os._exit(_CTRL_C)


def _end_soon_after_ctrl_c() -> None:
    """Start the thread that ends the process `_GRACE_S` after Ctrl-C, which Python signals through a pipe."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_GRACE_S)
        _exit()

    threading.Thread(target=watch, daemon=True).start()


def _report_unraisable(unraisable: Any) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def raise_if_interrupted(error: Exception | str) -> None:
    """Raise KeyboardInterrupt if Ctrl-C caused an error; call it first in code that continues after errors."""
    if signal.getsignal(signal.SIGINT) is _exit or "KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt


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
    except KeyboardInterrupt:
        status = _CTRL_C
    except BrokenPipeError:
        status = _CLOSED_PIPE
    except Exception as error:
        if sys.flags.dev_mode:
            traceback.print_exc()
        if "KeyboardInterrupt" in str(error):
            status = _CTRL_C
        else:
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
