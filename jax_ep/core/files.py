"""Files that are data to others: what identifies a folder of sources, and files that are there as a whole or not."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
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
    _check_regular(path)
    if path.exists():
        path.open("ab").close()
    new = _beside(path)
    try:
        new.write_bytes(bytes(4096))
    finally:
        new.unlink(missing_ok=True)


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _beside(path: Path) -> Path:
    """The name of a new file next to the one that is meant; processes of several machines may share the folder."""
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file, or the file that a symbolic link leads to, by another, never by a part of it."""
    _check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path)
    try:
        new.write_bytes(content)
        new.replace(os.path.realpath(path))
    finally:
        new.unlink(missing_ok=True)
