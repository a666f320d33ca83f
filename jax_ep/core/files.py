"""Files that are data to others: what identifies a folder of sources, and files that are there as a whole or not."""

from __future__ import annotations

import functools
import hashlib
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


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by another, never by a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # processes of several machines may share the folder
    try:
        new.write_bytes(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
