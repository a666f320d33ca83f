"""Discovery of the compiled library, the check against its sources, loading, and the C ABI."""

import concurrent.futures
import ctypes
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffi_calls import cxx_compiler, new_id
from jax_ep import ffi
from jax_ep.ffi import library

PACKAGE = Path(library.__file__).parent


def test_library_loaded_once_by_many_threads():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [pool.submit(library.load) for _ in range(8)]
    assert len({id(one.result()) for one in found}) == 1


def declared_functions():
    """Return the functions that csrc/abi.h declares, and the handlers."""
    header = (PACKAGE / "csrc" / "abi.h").read_text()
    handlers = {f"{target}_{suffix}" for target in ("jax_ep_pointer_table", "jax_ep_check_status")
                for suffix in ("cpu", "cuda")}  # fmt: skip
    handlers |= {"jax_ep_launch_kernel_cuda", "jax_ep_launch_kernel_instantiate_cuda"}
    return set(re.findall(r"^JAX_EP_EXPORT .*?(jax_ep_\w+)\(", header, re.MULTILINE)) | handlers


def library_path():
    return Path(library.load()._name)


def test_library_exported_symbols():
    if shutil.which("nm") is None or sys.platform == "darwin":
        pytest.skip("needs nm, and version scripts")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library_path())], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert exported == declared_functions()
    assert len(exported) >= 18


@pytest.mark.parametrize(
    ("platform", "ordinal", "entries", "message"),
    [
        (7, 0, 1, "platform 7 is neither"),
        (0, -1, 1, "-1 is negat"),
        # The size in bytes of the largest numbers of entries does not fit in 64 bits.
        *(
            (0, 0, n, f"got {n} entries .* expected 1 to 1048576")
            for n in (0, -1, 2**20 + 1, 2**60, 2**61 + 1, 2**63 - 1)
        ),
    ],
)
def test_library_c_abi_invalid_arguments(platform, ordinal, entries, message):
    one = (ctypes.c_int64 * 1)(1)
    code = library.load().jax_ep_register_table(platform, new_id(), ordinal, one, entries, 0)
    with pytest.raises(ValueError, match=message):
        library.raise_for(code)


def has_cuda_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_cuda_driver(), reason="this machine has the CUDA driver")
def test_library_cuda_without_driver():
    one = (ctypes.c_int64 * 1)(1)
    code = library.load().jax_ep_register_table(ffi.Platform.CUDA, new_id(), 0, one, 1, 0)
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 could not be loaded.*needs the NVIDIA driver"):
        library.raise_for(code)
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1"):
        ffi.alloc_status(ffi.Platform.CUDA, 0)


def test_library_missing(tmp_path):
    nowhere = tmp_path / library.NAME
    with pytest.raises(ffi.LibraryError, match=r"(?s)is missing.*does not exist.*pip install -e \.") as raised:
        library.open_library([nowhere], PACKAGE / "csrc")
    assert isinstance(raised.value, ImportError)
    assert str(nowhere) in str(raised.value)


@pytest.fixture
def csrc(tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(PACKAGE / "csrc", copy)
    return copy


def test_library_matching_among_mismatching(tmp_path, csrc):
    other = tmp_path / "other.so"
    other.write_text("not a library")
    for order in ([library_path(), other], [other, library_path()]):
        assert library.open_library(order, csrc)._name == str(library_path())


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed"])
def test_library_stale(csrc, change):
    if change == "edited":
        (csrc / "abi.cc").write_text((csrc / "abi.cc").read_text() + "\n")
    elif change == "added":
        (csrc / "more.cc").write_text("")
    elif change == "removed":
        (csrc / "status.h").unlink()
    else:
        (csrc / "status.h").rename(csrc / "state.h")
    with pytest.raises(ffi.LibraryError, match=r"(?s)does not fit.*is stale.*pip install -e \."):
        library.open_library([library_path()], csrc)


INTRUDER = """
#include <fstream>
extern "C" const char* jax_ep_ffi_stamp() { return STAMP; }
extern "C" int jax_ep_ffi_abi_version() { return 4; }
extern "C" const char* jax_ep_ffi_source_hash() { return "stale"; }
__attribute__((constructor)) static void run() { std::ofstream(TRACE) << "was here"; }
"""


@pytest.mark.parametrize("stamp", ["none", "stale", "of another version"])
def test_library_mismatching_is_not_opened(tmp_path, csrc, stamp):
    """Opening a library runs its constructors, so its file is checked first."""
    source, intruder, trace = tmp_path / "intruder.cc", tmp_path / library.NAME, tmp_path / "trace"
    version = library.ABI_VERSION + (stamp == "of another version")
    text = "" if stamp == "none" else f"jax_ep_ffi stamp abi={version} xla=0.1 source={'0' * 64}"
    source.write_text(INTRUDER.replace("STAMP", f'"{text}"').replace("TRACE", f'"{trace}"'))
    subprocess.run([cxx_compiler(), "-shared", "-fPIC", source, "-o", intruder], check=True)
    message = {"none": "has no version stamp", "stale": "is stale", "of another version": "has ABI version"}[stamp]
    with pytest.raises(ffi.LibraryError, match=message):
        library.open_library([intruder], csrc)
    assert not trace.exists()
    ctypes.CDLL(str(intruder))  # It does run when opened.
    assert trace.exists()


def test_library_without_sources_checked_by_version(tmp_path, monkeypatch):
    library.open_library([library_path()], tmp_path)
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.raises(ffi.LibraryError, match=r"(?s)has ABI version \d+, this Python code needs 999"):
        library.open_library([library_path()], tmp_path)


def test_library_for_newer_jaxlib(tmp_path, monkeypatch):
    """XLA's error at registration names neither the file nor a remedy."""
    offered = library.xla_api_version()
    stamp = library.read_stamp(library_path())
    assert offered >= stamp.xla_api_version >= 1
    assert stamp.source_hash == library.source_hash(PACKAGE / "csrc")
    assert f"abi={stamp.abi_version} " in library.load().jax_ep_ffi_stamp().decode()
    monkeypatch.setattr(library, "xla_api_version", lambda: 2)
    with pytest.raises(ffi.LibraryError, match=r"newer jaxlib \(XLA FFI 0\.\d\) than .*\(XLA FFI 0\.2\)"):
        library.open_library([library_path()], tmp_path)


def test_library_unloadable_files(tmp_path, csrc):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + library.load().jax_ep_ffi_stamp() + b"\0")
    with pytest.raises(ffi.LibraryError, match=r"(?s)does not fit.*absent\.so: .*broken\.so: cannot be"):
        library.open_library([tmp_path / "absent.so", broken], csrc)

    import _ctypes  # A real shared library of another project.

    with pytest.raises(ffi.LibraryError, match="has no version stamp"):
        library.open_library([Path(_ctypes.__file__)], csrc)


def test_library_device_key_other_platforms():
    @dataclasses.dataclass
    class Device:
        platform: str

    with pytest.raises(ValueError, match="'tpu', only cpu and gpu"):
        ffi.device_key(Device("tpu"))
