"""Lowered launches in files beside what XLA has compiled, so that other processes need not lower them again.

JAX finds a compiled program by its lowered module: its persistent compilation cache saves compiling, but all kernels
are lowered before it is searched. So lowered launches are saved in a folder of it, where there is one. A file holds
what `jax.export` makes of a launch, behind a digest of its name and content. Its name depends on all that the launch
does: its function, sizes, kind of device, the sources of this package, and the versions of JAX, since Mosaic promises
nothing to others. A file that holds anything else is written anew. JAX's limit on the size of its cache holds for the
folder, too: what has not been used for longest goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax import export

from jax_ep.core.files import sources_digest, write_atomically

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "jax_ep_lowered"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 28  # of a file that is read: launches have half a megabyte


def kept_or_made(launch: Callable[..., Any], facts: Any, make: Callable[[], export.Exported]) -> export.Exported:
    """What a file holds of a launch with these facts, which differ in their `repr`; else what is made now, and kept."""
    folder = _folder()
    if folder is None:
        return make()
    path = folder / _name(launch, facts)
    found = _read(path)
    if found is not None:
        return found
    made = make()
    payload = bytes(made.serialize())
    try:
        _write(path, _digest(path, payload) + payload)
    except OSError as error:
        warnings.warn(f"a lowered kernel is not kept for other processes: {error}", stacklevel=2)
    return made


def _folder() -> Path | None:
    """In JAX's persistent compilation cache, where that is in use and a folder of this machine."""
    named = jax.config.jax_compilation_cache_dir
    if not named or not jax.config.jax_enable_compilation_cache or "://" in named:
        return None
    if importlib.util.find_spec("flatbuffers") is None:  # with which JAX writes them
        return None
    return Path(named) / _FOLDER


def _name(launch: Callable[..., Any], facts: Any) -> str:
    device = jax.local_devices()[0]
    machine = jax.default_backend(), device.device_kind, getattr(device, "core_count", None)
    versions = jax.__version__, jaxlib.__version__, sources_digest(_PACKAGE)
    key = repr((launch.__module__, launch.__qualname__, facts, machine, versions))
    return f"{launch.__name__.strip('_')}-{hashlib.sha256(key.encode()).hexdigest()}"


def _digest(path: Path, payload: bytes) -> bytes:
    """Of a file: a launch under the name of another one is not taken."""
    return hashlib.sha256(path.name.encode() + b"\0" + payload).digest()


def _read(path: Path) -> export.Exported | None:
    """None where there is no such file, or what it holds is not a launch."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    payload = content[_DIGEST_BYTES:]
    if _digest(path, payload) != content[:_DIGEST_BYTES]:
        return None
    try:
        found = export.deserialize(bytearray(payload))
        found.mlir_module()  # reads the part that is read only when a program is lowered
    except Exception:  # bytes that are no launch may lead to any error; the file is written anew
        return None
    with contextlib.suppress(OSError):  # a folder that is only readable does not tell what is in use
        os.utime(path)
    return found


def _write(path: Path, content: bytes) -> None:
    """Unless JAX's limit leaves no room for it, even without the others."""
    limit = jax.config.jax_compilation_cache_max_size
    if limit != -1:
        if len(content) > limit:
            return
        _make_room(path.parent, limit - len(content))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.unlink()  # a pipe or a device under the name of a file of this cache
    write_atomically(path, content)


def _make_room(folder: Path, limit: int) -> None:
    """Deletes what has not been used for longest, until files have at most that many bytes."""
    found = []
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # other processes delete files, too
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
