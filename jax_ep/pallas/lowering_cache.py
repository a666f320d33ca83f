"""Cache lowered launches in files next to XLA's compiled programs, so that other processes need not lower them again.

JAX finds a compiled program by its lowered module, so its persistent compilation cache saves compile time but not the
time to lower the kernels. If that cache is in use, lowered launches are saved in a folder of it. A file holds a digest
and the serialized `jax.export` of a launch. Its name is a hash of everything that the launch depends on: its function,
sizes, kind of device, the sources of this package, and the versions of JAX, since Mosaic is not stable across versions.
A file with other content is overwritten. JAX's limit on the size of its cache also holds for this folder: the least
recently used files are deleted first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib
from jax import export

from jax_ep.core.files import sources_digest, write_atomically
from jax_ep.core.json_files import read_regular
from jax_ep.values import cut

type Shapes = tuple[jax.ShapeDtypeStruct, ...]

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "jax_ep_lowered"
_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 28  # of a file; a launch has half a megabyte


def cached_or_made(
    launch: Callable[..., object], facts: tuple[Shapes, *tuple[object, ...]], make: Callable[[], export.Exported]
) -> export.Exported:
    """Return the cached export of a launch, or make it and cache it; the facts are identified by their `repr`."""
    folder = _folder()
    if folder is None:
        return make()
    path = folder / _name(launch, facts)
    found = _read(path)
    if found is not None and _takes(found, facts[0]):
        return found
    made = make()
    payload = bytes(made.serialize())
    try:
        _write(path, _digest(path, payload) + payload)
    except (OSError, ValueError) as error:  # ValueError: a path that the system does not support
        warnings.warn(f"a lowered kernel is not cached for other processes: {cut(error, 200)}", stacklevel=2)
    return made


def _folder() -> Path | None:
    """Return the folder in JAX's persistent compilation cache; None if that cache is off or remote."""
    named = jax.config.jax_compilation_cache_dir
    if not named or not jax.config.jax_enable_compilation_cache or "://" in named:
        return None
    if importlib.util.find_spec("flatbuffers") is None:  # `jax.export` serializes with it
        return None
    return Path(named) / _FOLDER


def _name(launch: Callable[..., object], facts: object) -> str:
    device = jax.local_devices()[0]
    machine = jax.default_backend(), device.device_kind, getattr(device, "core_count", None)
    versions = jax.__version__, jaxlib.__version__, sources_digest(_PACKAGE)
    key = repr((launch.__module__, launch.__qualname__, facts, machine, versions))
    return f"{launch.__name__.strip('_')}-{hashlib.sha256(key.encode()).hexdigest()}"


def _digest(path: Path, payload: bytes) -> bytes:
    """Hash name and content, so that a launch under the name of another one is not used."""
    return hashlib.sha256(path.name.encode() + b"\0" + payload).digest()


def _read(path: Path) -> export.Exported | None:
    """Read a launch; None if the file is missing or invalid."""
    try:
        content = read_regular(path, _MAX_BYTES)
    except (OSError, ValueError):
        return None
    payload = content[_DIGEST_BYTES:]
    if _digest(path, payload) != content[:_DIGEST_BYTES]:
        return None
    try:
        found = export.deserialize(bytearray(payload))
        found.mlir_module()  # parses what `deserialize` leaves for later
    except Exception:  # invalid bytes raise errors of any type; the file is overwritten
        return None
    with contextlib.suppress(OSError):  # a read-only folder keeps its times
        os.utime(path)
    return found


def _takes(found: export.Exported, operands: Shapes) -> bool:
    """Return whether a launch is one for GPUs of these operands."""
    given = jax.tree.unflatten(found.in_tree, [(x.shape, x.dtype) for x in found.in_avals])
    expected = tuple((x.shape, x.dtype) for x in operands)
    return given == (expected, {}) and found.platforms == ("cuda",)


def _write(path: Path, content: bytes) -> None:
    """Write a file, unless it alone exceeds JAX's limit."""
    limit = jax.config.jax_compilation_cache_max_size
    if limit != -1:
        if len(content) > limit:
            return
        _make_room(path.parent, limit - len(content))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.unlink()  # a pipe or a device with this name
    write_atomically(path, content)


def _make_room(folder: Path, limit: int) -> None:
    """Delete the least recently used files until the rest has at most `limit` bytes."""
    found = []
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # other processes delete files, too
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
