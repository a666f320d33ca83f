"""Atomic replacement of a checkpoint's files: a reader finds the old checkpoint, the new one, or an error.

The steps of a save, under a lock on the folder:
1. Write the new files into `.jax_ep_save/new`, then list their names as the files of `.jax_ep_save/names`.
2. Move the old files into `.jax_ep_save/old`, config.json first: without it there is no checkpoint.
3. Move the new files into the folder, config.json last. This move commits.
4. Remove `.jax_ep_save`.
A killed save leaves `.jax_ep_save`. If its config.json is still there, the next save undoes steps 3 and 2; then it
continues with step 4. Files that the old checkpoint does not name are never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_ep.checkpoints.files import CONFIG, INDEX, SINGLE, TensorFiles, folder_path, open_file, read_index, read_json

_STAGE, _LOCK = ".jax_ep_save", ".jax_ep_save.lock"


@contextlib.contextmanager
def replacing(function: str, folder: Path, names: Sequence[str], *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder for new files of these names, which become the checkpoint of `folder` when the block ends.

    If the block raises, the folder stays unchanged.
    """
    stage = folder / _STAGE
    with _locked(function, folder):
        _recover(function, folder)
        _replaced(function, folder, names, overwrite)
        with _syncing(folder) as sync:  # From the first move to the commit, nothing is opened, which could fail.
            sync()
            try:
                for part in (stage, stage / "new", stage / "old"):
                    _make_folder(part)
                yield stage / "new"
                _complete(stage, names)
                old = _replaced(function, folder, names, overwrite)  # Others may have written files meanwhile.
                for name in old:
                    os.replace(folder / name, stage / "old" / name)
                sync()
                for name in _config_last(names):
                    if name == CONFIG:
                        sync()
                    os.replace(stage / "new" / name, folder / name)
                sync()
            except BaseException:
                _recover(function, folder)
                raise
            with contextlib.suppress(OSError):  # The new checkpoint is complete; the next save removes the rest.
                _recover(function, folder)


def open_complete(function: str, folder: Any) -> TensorFiles:
    """Open a caller's folder and check its files; none may be from a save that has not ended."""
    path = folder_path(function, folder)
    _check_ended(function, path)
    with open_file(function, path / CONFIG) as file:
        opened = os.fstat(file.fileno())
        config = read_json(function, file)
        try:
            return TensorFiles(function, path, config)
        finally:
            _check_unchanged(function, path / CONFIG, opened)


def _check_ended(function: str, folder: Path) -> None:
    """Raise if a save has moved config.json away, or was the first one, and has not ended."""
    new, old, now = (
        os.path.lexists(place / CONFIG) for place in (folder / _STAGE / "new", folder / _STAGE / "old", folder)
    )
    if new and (old or not now):
        raise FileNotFoundError(
            f"{function}: {folder} is not complete, because a save is running or was killed; expected a complete"
            " checkpoint. Open it again when the save has ended. If it was killed, call save: it restores the old"
            " checkpoint first."
        )


def _check_unchanged(function: str, path: Path, opened: os.stat_result) -> None:
    """Check that a path still leads to the file that was opened, and that no save moved it."""
    with contextlib.suppress(OSError):
        now = os.stat(path)
        if os.path.samestat(opened, now) and opened.st_ctime_ns == now.st_ctime_ns:
            return
    raise FileNotFoundError(
        f"{function}: {path} was replaced while the checkpoint was opened, expected no save at the same time; open it"
        " again."
    )


@contextlib.contextmanager
def _locked(function: str, folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process at the latest."""
    path = folder / _LOCK
    flags = os.O_NONBLOCK | os.O_NOFOLLOW  # Neither wait for a reader of a FIFO, nor follow a link.
    with open(path, "ab", opener=lambda name, more: os.open(name, more | flags)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:  # Another save holds it, or has just removed it.
            raise FileExistsError(
                f"{function}: another save is writing to {folder}, expected one at a time; save again when it has"
                " ended."
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Whoever removed it before has not undone the save.
                path.unlink()


def _replaced(function: str, folder: Path, names: Sequence[str], overwrite: bool) -> list[str]:
    """Return the files that the new ones replace, config.json first."""
    there = [name for name in dict.fromkeys((CONFIG, INDEX, SINGLE, *names)) if _exists(folder / name)]
    if there and not overwrite:
        raise FileExistsError(
            f"{function}: {folder} already has {', '.join(sorted(there)[:5])}, expected a folder without a checkpoint;"
            " pass another one, or overwrite=True."
        )
    shards = set(read_index(function, folder).values()) if INDEX in there else set()
    strangers = [name for name in there if name not in {CONFIG, INDEX, SINGLE, *shards}]
    if strangers:
        raise FileExistsError(
            f"{function}: {folder} has {', '.join(strangers[:5])}, which its checkpoint does not name, expected no"
            " file of that name; move it away, or pass another folder."
        )
    old = [name for name in (CONFIG, INDEX, *{SINGLE, *shards}) if _exists(folder / name)]
    folders = [name for name in old if (folder / name).is_dir()]
    if folders:
        raise IsADirectoryError(
            f"{function}: {folder / folders[0]} is a folder, expected a file to replace; move it away."
        )
    return old


def _complete(stage: Path, names: Sequence[str]) -> None:
    """Sync the new files to disk with the permissions of the umask, and list them."""
    mode = (stage / "new" / CONFIG).stat().st_mode
    _make_folder(stage / "listing")
    for name in names:
        os.chmod(stage / "new" / name, mode)  # The safetensors package creates files that only their owner can read.
        _sync(stage / "new" / name)
        (stage / "listing" / name).touch()
    for part in ("new", "listing"):
        _sync(stage / part)
    os.replace(stage / "listing", stage / "names")
    _sync(stage)


def _recover(function: str, folder: Path) -> None:
    """Undo a save that moved files and did not commit, and remove its folder."""
    stage = folder / _STAGE
    if not _exists(stage):
        return
    parts = [stage, *(stage.iterdir() if stage.is_dir() else ())]
    if any(path.is_symlink() or not path.is_dir() for path in parts):
        raise FileExistsError(f"{function}: {stage} is not the folder of a save, expected none or one; move it away.")
    if (stage / "names").is_dir():
        if _exists(stage / "new" / CONFIG):
            _undo(function, folder)
        os.replace(stage / "names", stage / "listing")  # Nothing is left to undo.
        _sync(folder)
    shutil.rmtree(stage)


def _undo(function: str, folder: Path) -> None:
    """Move the files of a save that did not commit back to where they were."""
    stage = folder / _STAGE
    new, old, names = stage / "new", stage / "old", os.listdir(stage / "names")
    ours = [name for name in names if _exists(folder / name) and not _exists(new / name)]
    moved = _config_last(os.listdir(old))
    strangers = [name for name in moved if _exists(folder / name) and name not in ours]
    if strangers:
        raise FileExistsError(
            f"{function}: {folder} has {', '.join(strangers[:5])}, but a killed save has moved the files of these names"
            f" to {old}, from where they are restored, expected none of these names; move yours away."
        )
    for name in ours:
        os.replace(folder / name, new / name)
    for name in moved:
        os.replace(old / name, folder / name)


def _exists(path: Path) -> bool:
    """Return whether there is a file, also a broken link; `os.path.lexists` takes every error for "no"."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _config_last(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: name == CONFIG)


def _make_folder(folder: Path) -> None:
    """Make a folder that can be removed whatever the umask is, and in which other users find a file of known name.

    Otherwise, `_check_ended` would see no save of another user.
    """
    folder.mkdir()
    folder.chmod(0o711)


@contextlib.contextmanager
def _syncing(path: Path) -> Iterator[Callable[[], None]]:
    """Open a file or a folder, and yield a function that syncs it, or the names in it, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield functools.partial(os.fsync, descriptor)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _syncing(path) as sync:
        sync()
