"""Packaging: the search for a Python, the tasks of the Makefile, and the content of a wheel."""

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIND_PYTHON = ROOT / "tools" / "find_python.sh"

if not FIND_PYTHON.exists():
    pytest.skip("not a source checkout", allow_module_level=True)


def fake(path, version, modules=True):
    """Create a launcher that answers as Python `version` would, or with None does not start, like a shim of pyenv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    status = 127
    if version is not None:
        minor = int(re.match(r"3\.(\d+)", version).group(1))
        status = 0 if modules and minor >= 12 else 1
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(command, environment):
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)


def find_python(root, on_path, in_pyenv, **environment):
    """Run the script on a machine with only the tools that it uses, and these Pythons: name or version, and modules."""
    tools, home = root / "tools", root / "home"
    tools.mkdir()
    for tool in ("sh", "sort", "head", "cut", "cat"):
        (tools / tool).symlink_to(shutil.which(tool))
    for name, *options in on_path:
        fake(root / "bin" / name, *options)
    for version, *options in in_pyenv:
        fake(home / ".pyenv" / "versions" / version / "bin" / "python3", version, *options)
    environment = {name: str(root / value) for name, value in environment.items()}
    return run([str(FIND_PYTHON)], {"PATH": f"{root / 'bin'}:{tools}", "HOME": str(home)} | environment)


OLD_AND_PREVIEWS = ("3.15.0",), ("3.14-dev",), ("3.14.0a1",), ("3.13.0t",), ("3.12.1",), ("3.14.2", False)
PYENV = "home/.pyenv/versions/{}/bin/python3".format


@pytest.mark.parametrize(
    ("on_path", "in_pyenv", "found"),
    [
        ([("python3", "3.11.7"), ("python3.12", None)], [("3.9.18",), ("3.11.7",), ("3.12.1",)], PYENV("3.12.1")),
        ([], [*OLD_AND_PREVIEWS, ("3.13.5",)], PYENV("3.13.5")),
        ([("python3.14", "3.14.0", False), ("python3.12", "3.12.0")], [], "bin/python3.12"),
    ],
    ids=["shims that do not start", "previews and other builds", "no module for environments"],
)
def test_find_python(on_path, in_pyenv, found, tmp_path):
    done = find_python(tmp_path, on_path, in_pyenv)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tmp_path / found), "")


def test_find_python_errors(tmp_path):
    """The user's choice is not overruled."""
    pythons = [("python3.14", "3.14.0"), ("python3.11", "3.11.0")]
    (tmp_path / "chosen").mkdir()
    chosen = find_python(tmp_path / "chosen", pythons, [], PYTHON="bin/python3.11")
    none = find_python(tmp_path, [("python3", "3.11.7")], [("3.10.13",)])
    for done in (chosen, none):
        assert (done.returncode, done.stdout) == (1, "")
    assert f"PYTHON={tmp_path / 'chosen/bin/python3.11'} is not Python 3.12 or newer" in chosen.stderr
    for part in ("3.12 or newer", "none was found", "pyenv install 3.12", "make PYTHON="):
        assert part in none.stderr


SET_BY_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
OF_THE_MAKEFILE = {"PYTHON", "VENV", "EXTRAS", "CONSTRAINTS", "PIP_ARGS"}

# Without the variables of a `make test` that runs these tests.
CLEAN = {name: value for name, value in os.environ.items() if name not in SET_BY_MAKE | OF_THE_MAKEFILE}


@pytest.fixture(scope="module")
def make():
    command = shutil.which("make")
    if command is None:
        pytest.skip("needs make")
    return command


def test_environment_is_renewed_when_its_inputs_change(make, tmp_path):
    fake(tmp_path / "bin" / "python", "3.12.0")
    (tmp_path / ".installed").touch()
    for changed in ("pyproject.toml", "constraints.txt", "jax_ep/ffi/csrc/abi.cc"):
        arguments = [f"VENV={tmp_path}", "-W", changed, "PIP_ARGS=--my-flag", "env"]
        shown = run([make, "-C", str(ROOT), "-n", *arguments], CLEAN)
        assert re.search(r"pip install .*-e '\.\[test,.*--my-flag", shown.stdout), shown.stdout + shown.stderr


def test_gpu_machines_get_the_cuda_packages(make, tmp_path):
    fake(tmp_path / "bin" / "python", "3.12.0")
    fake(tmp_path / "tools" / "nvidia-smi", "3.12.0")
    path = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    shown = run([make, "-C", str(ROOT), "-n", f"VENV={tmp_path}", "env"], CLEAN | {"PATH": path})
    assert re.search(r"-e '\.\[test,[a-z0-9,]*cuda13\]'", shown.stdout), shown.stdout + shown.stderr


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_constraints_name_one_version_of_all_that_is_installed(project):
    """Every direct requirement is locked, and the lock names no index."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==[\w.]+( ; .*)?", line)] == []
    locked = {line.split("==")[0] for line in lines}
    extras = {name: x for name, x in project["project"]["optional-dependencies"].items() if name != "cuda12"}
    wanted = itertools.chain(project["project"]["dependencies"], *extras.values())
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} - {"jax-ep"}
    assert names - locked == set(), "`make lock` writes the file anew"


# Load the library from a copy of the package, without help of the installed one.
PROBE = """
import importlib.metadata, sys

def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.distribution = not_installed
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]  # editable installs
sys.path.insert(0, sys.argv[1])
import jax_ep.ffi
print(jax_ep.ffi.load()._name)
"""


def load_from(site, *left_out):
    """Copy the package into `site`, over existing files, and load its library."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", *left_out)
    shutil.copytree(ROOT / "jax_ep", site / "jax_ep", ignore=ignore, dirs_exist_ok=True)
    return run([sys.executable, "-c", PROBE, str(site)], os.environ)


def test_bare_source_tree_says_how_to_build(tmp_path):
    completed = load_from(tmp_path)
    assert completed.returncode == 1
    assert "LibraryError: jax_ep's compiled library is missing" in completed.stderr
    assert "pip install -e ." in completed.stderr
    assert str(tmp_path / "jax_ep" / "ffi") in completed.stderr


@pytest.mark.slow
def test_wheel_holds_the_library_and_no_sources(tmp_path, project):
    """The real build, if its tools are available offline: CMake and scikit-build-core."""
    pytest.importorskip("scikit_build_core")
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    completed = run([*command, "-w", str(tmp_path), str(ROOT)], os.environ)
    assert completed.returncode == 0, completed.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"jax_ep-{project['project']['version']}-py3-none-"), "one wheel for every Python 3"
    names = zipfile.ZipFile(wheel).namelist()
    assert "jax_ep/ffi/libjax_ep_ffi.so" in names
    assert "jax_ep/py.typed" in names
    assert [name for name in names if not name.startswith(("jax_ep/", "jax_ep-")) or "csrc" in name] == []
