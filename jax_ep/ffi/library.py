"""Discovery, checks and loading of `libjax_ep_ffi.so`, and registration of its custom calls, on first use."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import operator
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

NAME = "libjax_ep_ffi.so"
ABI_VERSION = 4  # Equals JAX_EP_ABI_VERSION of csrc/abi.h.
BUILD_COMMANDS = (
    "Build it with `pip install -e .` in the source tree (`make` does so in its own environment), or into the tree"
    " itself with `make ffi`."
)

POINTER_TABLE = "jax_ep_pointer_table"
CHECK_STATUS = "jax_ep_check_status"
LAUNCH_KERNEL = "jax_ep_launch_kernel"

_HERE = Path(__file__).resolve().parent
_LOAD_LOCK = threading.Lock()


class LibraryError(ImportError):
    """The compiled library of jax_ep is missing, or was built from sources that do not match this Python code."""


class Platform(enum.IntEnum):
    """Platform of a device, as the library numbers it; ordinals count separately on each."""

    CPU = 0
    CUDA = 1


def device_key(device: jax.Device) -> tuple[Platform, int]:
    """Return the platform and ordinal of a device of this process, as the custom calls identify it."""
    platforms = {"cpu": Platform.CPU, "gpu": Platform.CUDA, "cuda": Platform.CUDA}
    if device.platform not in platforms:
        raise ValueError(f"jax_ep has no custom calls for {device} of platform {device.platform!r}, only cpu and gpu.")
    if device.process_index != jax.process_index(device.client):
        raise ValueError(
            f"{device} belongs to process {device.process_index}, not to this one ({jax.process_index(device.client)})."
            " Every process registers the devices in mesh.local_devices only."
        )
    platform = platforms[device.platform]
    # On the CPU, XLA counts the devices of all processes.
    ordinal = device.id if platform is Platform.CPU else device.local_hardware_id
    return platform, device.id if ordinal is None else int(ordinal)


def candidates() -> list[Path]:
    """Return candidate paths of the library: next to this file (wheel, `make ffi`), then an editable install's."""
    # An editable install gives the package two folders: the sources, and site-packages with the compiled library.
    places = [_HERE, *map(Path, sys.modules[__package__].__path__)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        places.append(Path(str(importlib.metadata.distribution("jax-ep").locate_file("jax_ep/ffi"))))
    return list(dict.fromkeys(place / NAME for place in places))


def source_hash(csrc: Path) -> str | None:
    """Return the hash of the C++ sources as CMakeLists.txt computes it, or None without sources, as in a wheel."""
    files = sorted((*csrc.glob("*.cc"), *csrc.glob("*.h")), key=lambda path: path.name)
    if not files:
        return None
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_library(paths: Sequence[Path], csrc: Path) -> ctypes.CDLL:
    """Open the first library of `paths` that matches this Python code and the sources in `csrc`.

    Reads each file first and opens only a match, because opening a library runs its constructors.

    Raises:
      LibraryError: no library matches.
    """
    expected = source_hash(csrc)
    problems = []
    for path in paths:
        if not path.exists():
            problems.append(f"{path}: does not exist")
            continue
        try:
            problem = _mismatch(read_stamp(path), expected)
            if problem is None:
                return _declare(ctypes.CDLL(str(path)))
        except OSError as error:
            problem = f"cannot be loaded ({error})"
        problems.append(f"{path}: {problem}")
    found = "is missing" if all(problem.endswith("does not exist") for problem in problems) else "does not fit"
    looked = "\n".join(f"  {problem}" for problem in problems)
    raise LibraryError(f"jax_ep's compiled library {found}:\n{looked}\n{BUILD_COMMANDS}", name="jax_ep.ffi")


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Version stamp of a library, from `jax_ep_ffi_stamp` of csrc/abi.h."""

    abi_version: int  # version of the C functions and of the custom calls
    xla_api_version: int  # version of the XLA FFI headers used in the build, major * 1000 + minor
    source_hash: str  # hash of the sources


_STAMP = re.compile(rb"jax_ep_ffi stamp abi=(\d+) xla=(\d+)\.(\d+) source=([0-9a-f]{64})\0")


def read_stamp(path: Path) -> Stamp | None:
    """Read the stamp from a file; return None unless there is exactly one."""
    stamps = set(_STAMP.findall(path.read_bytes()))
    if len(stamps) != 1:
        return None
    abi, major, minor, built_from = stamps.pop()
    return Stamp(int(abi), int(major) * 1000 + int(minor), built_from.decode())


def _mismatch(stamp: Stamp | None, expected_hash: str | None) -> str | None:
    """Return why a library with this stamp does not match this Python code, or None if it does."""
    if stamp is None:
        return "has no version stamp"
    if stamp.abi_version != ABI_VERSION:
        return f"has ABI version {stamp.abi_version}, this Python code needs {ABI_VERSION}"
    built_for, offered = stamp.xla_api_version, xla_api_version()
    if offered is not None and built_for > offered:
        return (
            f"was built with headers of a newer jaxlib (XLA FFI {_dotted(built_for)}) than the installed"
            f" {jaxlib.__version__} (XLA FFI {_dotted(offered)}) supports; upgrade jaxlib, or build it here with `pip"
            " install --no-build-isolation`"
        )
    if expected_hash is not None and stamp.source_hash != expected_hash:
        return f"is stale: built from sources {stamp.source_hash[:12]}, the sources here are {expected_hash[:12]}"
    return None


def _dotted(version: int) -> str:
    return "{}.{}".format(*divmod(version, 1000))


def xla_api_version() -> int | None:
    """Return the XLA FFI version of the installed jaxlib, major * 1000 + minor, or None without its headers.

    XLA rejects custom calls built for a newer version than its own and accepts all older ones.
    """
    header = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    parts = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header.read_text(), re.MULTILINE))
    return int(parts["MAJOR"]) * 1000 + int(parts["MINOR"]) if len(parts) == 2 else None


def _exact(wrapping: type, bits: int) -> type:
    """Return a ctypes integer that raises an error for a number of more bits, which ctypes would wrap."""

    def from_param(cls: Any, value: Any) -> Any:
        number = operator.index(value)
        if not -1 << bits - 1 <= number < 1 << bits - 1:
            raise OverflowError(f"{number} does not fit in {bits} bits")
        return cls(number)

    return type(f"Exact{bits}", (wrapping,), {"from_param": classmethod(from_param)})


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the C signature of every function of csrc/abi.h."""
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    exact: dict[type, type] = {i32: _exact(i32, 32), i64: _exact(i64, 64)}
    signatures: dict[str, tuple[type, list[type]]] = {
        "jax_ep_ffi_stamp": (ctypes.c_char_p, []),
        "jax_ep_last_error": (ctypes.c_char_p, []),
        "jax_ep_register_table": (i32, [i32, i64, i32, ctypes.POINTER(i64), i64, i64]),
        "jax_ep_table_used": (i64, [i32, i64, i32]),
        "jax_ep_hide_table": (i32, [i64]),
        "jax_ep_unregister_table": (i32, [i64]),
        "jax_ep_alloc_status": (i32, [i32, i32, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_uint64)]),
        "jax_ep_free_status": (i32, [i32, i32, pointer]),
        "jax_ep_register_status": (i32, [i32, i64, i32, pointer]),
        "jax_ep_unregister_status": (i32, [i64]),
        "jax_ep_format_status": (i64, [ctypes.POINTER(i32), ctypes.c_char_p, i64]),
        "jax_ep_status_fields": (ctypes.c_char_p, []),
        "jax_ep_status_states": (ctypes.c_char_p, []),
        "jax_ep_status_operations": (ctypes.c_char_p, []),
        "jax_ep_launch_type_id": (pointer, []),
        "jax_ep_launch_type_info": (pointer, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, [exact.get(kind, kind) for kind in arguments]
    return library


@functools.cache
def _load_once() -> ctypes.CDLL:
    library = open_library(candidates(), _HERE / "csrc")
    for target in (POINTER_TABLE, CHECK_STATUS):
        for suffix, platform in (("cpu", "cpu"), ("cuda", "CUDA")):
            handler = jax.ffi.pycapsule(getattr(library, f"{target}_{suffix}"))
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    _register_launches(library)
    return library


def _register_launches(library: ctypes.CDLL) -> None:
    """Register the kernel launch custom call and its state type for CUDA devices."""
    type_id, type_info = (
        jax.ffi.pycapsule(ctypes.c_void_p(address))
        for address in (library.jax_ep_launch_type_id(), library.jax_ep_launch_type_info())
    )
    jax.ffi.register_ffi_type(LAUNCH_KERNEL, {"type_id": type_id, "type_info": type_info}, platform="CUDA")
    stages = {
        "instantiate": library.jax_ep_launch_kernel_instantiate_cuda,
        "execute": library.jax_ep_launch_kernel_cuda,
    }
    handlers = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
    jax.ffi.register_ffi_target(LAUNCH_KERNEL, handlers, platform="CUDA")


def load() -> ctypes.CDLL:
    """Load the library, and register its custom calls for the CPU and CUDA platforms.

    The wrappers call this. Call it before running an executable that was compiled by another process and deserialized
    here.
    """
    with _LOAD_LOCK:  # `functools.cache` alone may run the function twice.
        return _load_once()


def raise_for(code: int) -> None:
    """Raise a Python exception with the library's message for a non-zero code of csrc/abi.h."""
    if code == 0:
        return
    message = load().jax_ep_last_error().decode()
    raise ValueError(message) if code == 1 else RuntimeError(message)


def batch_invariant(call: Callable[[jax.Array], jax.Array], token: jax.Array) -> jax.Array:
    """Run `call(token)`; under `jax.vmap`, run it once with the batched token and return one unbatched result.

    For calls that use an array of any shape only as a data dependence. Their handlers know the result's shape, which
    must not get a batch axis.
    """

    @jax.custom_batching.custom_vmap
    def of_token(token: jax.Array) -> jax.Array:
        return call(token)

    @of_token.def_vmap
    def _of_all(axis_size: int, batched: list[bool], tokens: jax.Array) -> tuple[Any, bool]:
        return of_token(tokens), False

    return of_token(token)
