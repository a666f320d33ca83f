"""Lowered launches in files beside what XLA has compiled, so that other processes need not lower them again.

JAX finds a compiled program by its lowered module: its persistent compilation cache spares compiling, but all kernels
are lowered before anything is looked for. So what came of that is kept in a folder of that cache, where there is one. A
file holds what `jax.export` makes of a launch, behind a hash of it. Its name says all that it depends on: the launch,
its sizes, the kind of device, the sources of this package, and the versions of JAX, since Mosaic promises nothing to
others. JAX's limit on the size of its cache holds for the folder, too: what has not been used for longest goes first.
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
        _write(path, hashlib.sha256(payload).digest() + payload)
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


def _read(path: Path) -> export.Exported | None:
    """None where there is no such file, or it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    payload = content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
        return None
    with contextlib.suppress(OSError):  # who may only read the folder does not say what is in use
        os.utime(path)
    return export.deserialize(bytearray(payload))


def _write(path: Path, content: bytes) -> None:
    """Unless JAX's limit leaves no room for it, even without the others."""
    limit = jax.config.jax_compilation_cache_max_size
    if limit != -1:
        if len(content) > limit:
            return
        _make_room(path.parent, limit - len(content))
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
