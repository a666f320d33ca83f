"""What ends a command of `jax-ep` is one line on standard error, or nothing, and an exit status."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import harness
from jax_ep import __main__, __version__
from jax_ep.tools import command

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
PROGRAM = [*harness.STRICT_PYTHON, "-m", "jax_ep"]


def fails(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("num_experts=3,\nexpected 4"), 2, "tool: num_experts=3, expected 4"),
        (TypeError("no array"), 1, "tool: TypeError: no array"),
        (KeyError("name"), 1, "tool: KeyError: 'name'"),
        (OSError(errno.ENOSPC, "No space left", "/there"), 1, "tool: [Errno 28] No space left: '/there'"),
        (ImportError("pip install rich"), 1, "tool: pip install rich"),
        (MemoryError(), 1, "tool: MemoryError:"),
        (RecursionError("deep"), 1, "tool: RecursionError: deep"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_error_is_one_line(error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.status_of("tool", fails(error)) == status
    assert capsys.readouterr() == ("", f"{line}\n" if line else "")


def test_a_long_error_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.status_of("tool", fails(ValueError("x" * 10**6))) == 2
    assert len(capsys.readouterr().err) < 320


def test_the_status_of_a_command() -> None:
    assert [command.status_of("tool", lambda value=value: value) for value in (None, 0, 3, {"loss": 1})] == [0, 0, 3, 0]
    with pytest.raises(SystemExit, match="4"):
        command.status_of("tool", fails(SystemExit(4)))


@pytest.mark.parametrize("text", ["-1", "0", "1.5", "", "x", str(2**31), "9" * 10_000, "\u0663", "1_0", "nan"])
def test_numbers_that_options_do_not_take(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command.Parser(prog="tool")
    parser.add_argument("--size", type=int)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--size={text}"])
    assert "expected an integer from 1 to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e999", "x"])
def test_floats_that_options_do_not_take(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command.Parser(prog="tool")
    parser.add_argument("--seconds", type=float)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--seconds={text}"])
    assert "expected a finite number of at least 0" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--version"])
    assert capsys.readouterr().out == f"jax-ep {__version__}\n"


@pytest.mark.parametrize(
    ("redirection", "status", "error"),
    [
        ("> /dev/full", 1, "No space left on device\n"),
        ("2> /dev/full > /dev/full", 1, ""),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written(redirection: str, status: int, error: str) -> None:
    line = f"set -o pipefail; {shlex.join(PROGRAM)} doctor --help {redirection}"
    for unbuffered in ("", "1"):
        environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (status, bool(error))
        assert done.stderr.endswith(error)


# While Python imports, while JAX does, and later.
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.2, pytest.param(4.0, marks=pytest.mark.slow)])
def test_ctrl_c_is_silent(seconds: float, tmp_path: Path) -> None:
    process = subprocess.Popen([*PROGRAM, "tune", "exchange"], env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert (process.communicate()[1], process.returncode) == (b"", 130)
