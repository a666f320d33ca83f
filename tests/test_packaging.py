"""Packaging: locked requirements, the message of a source tree that is not built, and the content of a wheel."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jax_ep.ffi

ROOT = Path(__file__).resolve().parents[1]

if not (ROOT / "constraints.txt").exists():
    pytest.skip("not a source checkout", allow_module_level=True)


def run(command, environment):
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)


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


@pytest.mark.slow
def test_cuda12_dependencies_resolve(project):
    """The lock is for CUDA 13; the extra for CUDA 12 has versions on the index that fit together."""
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["cuda12"]
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--disable-pip-version-check"]
    done = run([sys.executable, "-m", "pip", "install", *options, *wanted], os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "jax-cuda12-plugin" in done.stdout


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


def built(folder, *options):
    """Build a wheel for real, if the tools are available offline: CMake and scikit-build-core."""
    pytest.importorskip("scikit_build_core")
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", *options]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    completed = run([*command, "-w", str(folder), str(ROOT)], os.environ | {"PATH": path})
    assert completed.returncode == 0, completed.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_holds_the_library_and_no_sources(tmp_path, project):
    wheel = built(tmp_path)
    assert wheel.name.startswith(f"jax_ep-{project['project']['version']}-py3-none-"), "one wheel for every Python 3"
    names = zipfile.ZipFile(wheel).namelist()
    assert "jax_ep/ffi/libjax_ep_ffi.so" in names
    assert "jax_ep/py.typed" in names
    assert [name for name in names if not name.startswith(("jax_ep/", "jax_ep-")) or "csrc" in name] == []


def facts_of_library(file):
    """Return the machine of a shared library, the libraries that it needs, and the symbols that it exports."""
    library = pytest.importorskip("elftools.elf.elffile").ELFFile(file)
    needed = {tag.needed for tag in library.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    symbols = library.get_section_by_name(".dynsym").iter_symbols()
    exported = {one.name for one in symbols if one.name and one["st_shndx"] != "SHN_UNDEF"}
    return library["e_machine"], needed, exported


@pytest.mark.slow
@pytest.mark.skipif(not Path(sys.executable).with_name("python-zig").exists(), reason="needs ziglang")
@pytest.mark.skipif(sys.platform != "linux", reason="compares with the library of Linux")
def test_wheel_for_aarch64(tmp_path):
    toolchain = f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'tools' / 'aarch64.cmake'}"
    wheel = built(tmp_path, "-C", toolchain, "-C", "env._PYTHON_HOST_PLATFORM=linux-aarch64")
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(wheel).open("jax_ep/ffi/libjax_ep_ffi.so") as file:
        machine, needed, exported = facts_of_library(file)
    assert machine == "EM_AARCH64"
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-aarch64.so.1"}
    with open(jax_ep.ffi.load()._name, "rb") as file:
        assert exported == facts_of_library(file)[2]
