"""File helpers: hashes of source folders, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def sources_digest(folder: Path) -> str:
    """Return a hash of the Python sources below a folder, computed once per process."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(
            f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:16]


def check_writable(path: Path) -> None:
    """Check that a file can be written, before hours of work that end in writing it. Leaves nothing behind.

    Raises:
      OSError: the file cannot be written, or the path is not a regular file.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    _check_regular(path)
    with _errors_name(path):
        if path.exists():
            path.open("ab").close()
            _check_replaceable(path)
        new = _beside(path)
        try:
            new.write_bytes(bytes(4096))
        finally:
            new.unlink(missing_ok=True)


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():  # Do not replace a device by a file.
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _check_replaceable(path: Path) -> None:
    """Check that a file is no mount point, as single files are in containers: it can be written, but not replaced."""
    link = _beside(path)
    try:
        os.link(os.path.realpath(path), link)
    except OSError as error:  # Not every file system has hard links; only EXDEV says that this is another one.
        if error.errno == errno.EXDEV:
            raise OSError(errno.EBUSY, "a mount point, which cannot be replaced; mount its folder instead") from error
    finally:
        link.unlink(missing_ok=True)


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Name a file, or the target of a symbolic link, in errors of its temporary neighbors."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.path.realpath(path)) from error


def _beside(path: Path) -> Path:
    """Return a unique temporary name in the target's folder; processes on several machines may share the folder."""
    target = Path(os.path.realpath(path))  # Keep a symbolic link and replace its target.
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file, or the target of a symbolic link, atomically; the file keeps its mode."""
    _check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _errors_name(path):
        new = _beside(path)
        try:
            with new.open("xb") as file:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
                file.write(content)
            new.replace(os.path.realpath(path))
        finally:
            new.unlink(missing_ok=True)
