"""Files that are data to others: what identifies a folder of sources, and files that are there as a whole or not."""

from __future__ import annotations

import errno
import functools
import hashlib
import tempfile
import uuid
from pathlib import Path


@functools.cache
def sources_digest(folder: Path) -> str:
    """A hash of the Python sources below a folder, as they are when it is first asked for."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(
            f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:16]


def check_writable(path: Path) -> None:
    """Check that a file can be written here before the work of hours that it is for; leaves nothing behind.

    Raises:
      OSError: it cannot, or there is something other than a regular file.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    if path.exists():
        _check_regular(path)
        path.open("ab").close()
    else:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(4096))


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by another, never by a part of it."""
    _check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # processes of several machines may share the folder
    try:
        new.write_bytes(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
