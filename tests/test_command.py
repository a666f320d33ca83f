"""`jax-ep` commands end with one line on standard error, or none, and an exit status."""

import errno
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import harness
from jax_ep import __main__, __version__
from jax_ep.core.files import check_writable, write_atomically
from jax_ep.tools import command, processes

PROGRAM = [*harness.STRICT_PYTHON, "-m", "jax_ep"]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("num_experts=3,\nexpected 4"), 2, "tool: num_experts=3, expected 4"),
        (TypeError("no array"), 1, "tool: TypeError: no array"),
        (KeyError("name"), 1, "tool: KeyError: 'name'"),
        (OSError(errno.ENOSPC, "No space left", "/there"), 1, "tool: [Errno 28] No space left: '/there'"),
        (ImportError("pip install rich"), 1, "tool: pip install rich"),
        (MemoryError(), 1, "tool: MemoryError: no message; see jax-ep doctor, or `python -X dev` for the traceback"),
        (RecursionError("deep"), 1, "tool: RecursionError: deep"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_command_error_is_one_line(error, status, line, capsys):
    assert command.status_of("tool", Mock(side_effect=error)) == status
    assert capsys.readouterr() == ("", f"{line}\n" if line else "")


def test_command_long_error_is_cut(capsys):
    assert command.status_of("tool", Mock(side_effect=ValueError("x" * 10**6))) == 2
    assert len(capsys.readouterr().err) < 320


@pytest.mark.parametrize(("arguments", "missing"), [([], "jax-ep: .*: COMMAND"), (["bench"], "jax-ep bench: .*: WHAT")])
def test_command_without_arguments(arguments, missing, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(arguments)
    assert re.fullmatch(f"{missing}; --help describes them\n", capsys.readouterr().err)


def test_command_exit_status():
    assert [command.status_of("tool", lambda value=value: value) for value in (None, 0, 3, {"loss": 1})] == [0, 0, 3, 0]
    with pytest.raises(SystemExit, match="4"):
        command.status_of("tool", Mock(side_effect=SystemExit(4)))


def test_command_closed_pipe_in_rich():
    """Rich ends the process with status 1."""

    def show():
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904

    assert command.status_of("tool", show) == 141


NO_SIZES = "-1", "0", "1.5", "", "x", str(2**31), "9" * 10_000, "\u0663", "1_0", "nan"
NO_NUMBERS = [(int, text, "an integer from 1 to 2147483647") for text in NO_SIZES]
NO_NUMBERS += [(float, text, "a finite number of at least 0") for text in ("-1", "nan", "inf", "1e999", "x")]


@pytest.mark.parametrize(("kind", "text", "expected"), NO_NUMBERS)
def test_command_invalid_numbers(kind, text, expected, capsys):
    parser = command.Parser(prog="tool")
    parser.add_argument("--size", type=kind)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--size={text}"])
    assert f"expected {expected}" in capsys.readouterr().err


def test_command_version(capsys):
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
def test_command_unwritable_output(redirection, status, error):
    line = f"set -o pipefail; {shlex.join(PROGRAM)} doctor --help {redirection}"
    for unbuffered in ("", "1"):
        done = harness.run_command("bash", "-c", line, PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stderr.count("\n")) == (status, bool(error))
        assert done.stderr.endswith(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_command_processes_end_with_the_first(number):
    program = """
import os, signal, time
from jax_ep.tools import processes
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
if processes._PROCESS in os.environ:
    print(os.getpid(), flush=True)
    time.sleep(1000)
processes._run_copies(1)
"""
    command = [*harness.STRICT_PYTHON, "-c", program]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(harness.ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
        copy = int(first.stdout.readline())
        first.send_signal(number)
        assert first.wait() == 128 + number
    assert not Path(f"/proc/{copy}/exe").exists()


def test_command_more_processes_than_cores(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(processes, "_run_copies", None)
    with pytest.raises(ValueError, match=r"--processes 1000000: there are \d+ cores, one per process"):
        processes.enter(10**6)


ENCODING = """
import sys
from jax_ep.tools import command
command.run("tool", lambda: print("\\u20ac.json", "\\udcff"))
"""
IGNORED = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = ["jax-ep"]
import jax_ep
signal.raise_signal(signal.SIGINT)
from jax_ep.tools import command
command.run("tool", lambda: print(signal.raise_signal(signal.SIGINT)))
"""
DURING_IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["jax-ep"]
class Interrupt:
    def find_spec(self, name, *_):
        if name == FIRST:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import jax_ep
"""
PROGRAMS = {  # By what happens: a program, its exit status, and its output.
    "characters that the encoding lacks": (ENCODING, 0, "\\u20ac.json \\udcff\n"),
    "a Ctrl-C that a shell ignores for background jobs": (IGNORED, 0, "None\n"),
    # The handler is installed before the first import of a module of the package.
    "a Ctrl-C at the first import": (DURING_IMPORT.replace("FIRST", "'jax_ep.placement'"), -signal.SIGINT, ""),
    "a Ctrl-C at the import of jax": (DURING_IMPORT.replace("FIRST", "'jax'"), -signal.SIGINT, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_command_program(name):
    program, status, output = PROGRAMS[name]
    done = harness.run_command(*harness.STRICT_PYTHON, "-c", program, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (status, output, "")


def interrupted(body):
    """Run a command that raises its own SIGINT."""
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jax_ep.tools import command
def interrupt():
    signal.raise_signal(signal.SIGINT)
{body}
command.run("tool", main)
"""
    return harness.run_command(*harness.STRICT_PYTHON, "-c", program)


def test_command_ctrl_c_in_callback():
    """XLA would turn a KeyboardInterrupt into another error, which code may continue after."""
    body = """
import jax
def main():
    try:
        jax.pure_callback(interrupt, jax.ShapeDtypeStruct((), "int32")).block_until_ready()
    except Exception:
        print("went on")
"""
    done = interrupted(body)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


TUNE = """
from jax_ep.interpreter.pool import Pool
sys.argv = ["jax-ep", "tune", "exchange", "--out", "tuned.json"]
from jax_ep import __main__
launch, calls = Pool.launch, []
def launched(pool, *args, **options):
    calls.append(None)
    if len(calls) == 40:
        print(*(worker.process.pid for worker in pool._workers), flush=True)
        interrupt()
    return launch(pool, *args, **options)
Pool.launch = launched
def main():
    return __main__._run(None)
"""


def test_command_ctrl_c_in_tune_kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = interrupted(TUNE)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    workers = done.stdout.splitlines()[-1].split()
    assert workers
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):  # the test's time limit ends it otherwise
        time.sleep(0.01)


def test_command_wrong_arguments(capsys):
    for arguments in (["what\never"], ["doctor", "x" * 10_000], ["tune", "--tokens"]):
        with pytest.raises(SystemExit, match="2"):
            __main__.main(arguments)
        output, error = capsys.readouterr()
        assert (output, error.count("\n")) == ("", 1)
        assert error.startswith("jax-ep") and len(error) < 400


def test_command_invalid_jax_environment():
    done = harness.run_command(*PROGRAM, "--version", JAX_ENABLE_X64="maybe")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("jax-ep: ") and "JAX_ENABLE_X64" in done.stderr


def test_command_output_is_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    check_writable(tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]
    for content in (b"1", b"2"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == content
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("device", "x" * 240, "a\0b", "no folder/x"):
        with pytest.raises((OSError, ValueError)):
            check_writable(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["device", "link", "target"]


def test_command_output_keeps_its_mode(tmp_path):
    path = tmp_path / "settings.json"
    for mode in (0o600, 0o664, 0o444):
        path.touch()
        path.chmod(mode)
        write_atomically(path, b"1")
        assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (mode, b"1")
        path.unlink()


def test_command_output_is_a_mount_point(tmp_path, monkeypatch):
    """A file mounted into a container can be written, but not replaced: known before hours of tuning."""
    path = tmp_path / "settings.json"
    check_writable(path)
    path.write_bytes(b"old")
    check_writable(path)
    assert os.listdir(tmp_path) == [path.name]
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, os.strerror(errno.EXDEV))))
    with pytest.raises(OSError, match=rf"a mount point, which cannot be replaced; .*: '{path}'$"):
        check_writable(path)
    monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "no hard links here"))
    check_writable(path)
    assert (os.listdir(tmp_path), path.read_bytes()) == ([path.name], b"old")


@pytest.mark.parametrize(
    "function", [check_writable, lambda path: write_atomically(path, b"1")], ids=["check", "write"]
)
def test_command_output_errors_name_the_file(function, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "no" / "target")
    for name, text in {"x" * 240: "File name too long", "link": "No such file or directory"}.items():
        with pytest.raises(OSError, match=f"{text}: '{os.path.realpath(tmp_path / name)}'$"):
            function(tmp_path / name)
    assert os.listdir(tmp_path) == ["link"]
