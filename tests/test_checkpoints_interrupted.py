"""Killed, failing or concurrent saves: a reader finds the old checkpoint, the new one, or an error."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors.numpy

from hub_checkpoints import HUB
from jax_ep.checkpoints import Checkpoint, save

CONFIG = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}
STEPS = ("replace", "fsync", "chmod", "mkdir", "unlink", "rmdir", "listdir")
FOREIGN = {"tokenizer.json", "model.ema.safetensors", "model-lora.safetensors"}
ONE_FILE, TWO_FILES = 10**9, 16


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """Simulates the end of the process."""


def write(folder: Path, value: float, max_shard_bytes: int = ONE_FILE, **options: Any) -> None:
    tensors = {name: np.full(4, value, np.float32) for name in "ab"}
    save(folder, CONFIG | {"made": value}, {}, tensors, max_shard_bytes=max_shard_bytes, **options)


def found(folder: Path) -> float | None:
    """Return the value of a complete checkpoint, or None if opening or reading it is an error."""
    try:
        checkpoint = Checkpoint(folder)
        values = {float(value) for name in checkpoint.names for value in np.asarray(checkpoint.read(name))}
    except (ValueError, OSError):
        return None
    assert values == {checkpoint.config["made"]}, "a mixture"
    return checkpoint.config["made"]


def steps(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int], bool], error: BaseException) -> None:
    """Raise in the operating system calls whose number is wrong."""
    number = itertools.count()

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_wrong(next(number)):
                raise error
            return call(*args, **kwargs)

        return run

    for name in STEPS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))


def attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int | None, new: int, error: BaseException, *, all_after: bool
) -> Iterator[tuple[Path, bool]]:
    """Yield the folder after a save that fails in step 0, then step 1, and so on, and whether the save ended."""
    for wrong in itertools.count():
        folder = tmp_path / str(wrong)
        folder.mkdir()
        for name in FOREIGN:
            (folder / name).write_text("theirs")
        if old is not None:
            write(folder, 1, old)
        last = [0]

        def is_wrong(number: int, wrong: int = wrong, last: list[int] = last) -> bool:
            last[0] = number
            return number >= wrong if all_after else number == wrong

        with monkeypatch.context() as patch:
            steps(patch, is_wrong, error)
            message = "save: "
            try:
                write(folder, 2, new, overwrite=True)
                ended = True
            except type(error) as raised:
                ended = False
                message = str(raised)
        assert message.startswith("save: ") or all_after
        yield folder, ended
        if last[0] < wrong:
            return


SIZES = pytest.mark.parametrize(
    ("old", "new"),
    [(None, TWO_FILES), (ONE_FILE, ONE_FILE), (ONE_FILE, TWO_FILES), (TWO_FILES, ONE_FILE), (TWO_FILES,) * 2],
)


@SIZES
def test_save_killed_at_any_step(old: int | None, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save writes a complete checkpoint, and removes the remains of the killed one."""
    for folder, ended in attempts(tmp_path, monkeypatch, old, new, Killed(), all_after=True):
        assert found(folder) in ((2,) if ended else (None, 1, 2))
        if old is not None:  # Without overwrite, the next save restores the old checkpoint and keeps it.
            with pytest.raises(FileExistsError, match="already"):
                write(folder, 3)
            assert found(folder) in (1, 2)
        write(folder, 4, overwrite=True)
        assert found(folder) == 4
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"} | FOREIGN
        assert all((folder / name).read_text() == "theirs" for name in FOREIGN)


@SIZES
def test_save_fails_at_any_step(old: int | None, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    for folder, ended in attempts(tmp_path, monkeypatch, old, new, error, all_after=False):
        assert found(folder) in ((2,) if ended else (None if old is None else 1, 2))


def test_save_killed_reader_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if not (tmp_path / "config.json").exists():
            raise Killed
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        write(tmp_path, 2, overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"a save is running or was killed.*call save: it restores"):
        Checkpoint(tmp_path)


def test_save_disk_full(tmp_path: Path) -> None:
    write(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .* File too large.*free space"):
            save(tmp_path, CONFIG, {}, {"a": np.zeros(10_000)}, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_save_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .*file"):
            write(folder, 1)
    assert (tmp_path / "file").read_text() == "theirs"


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_concurrent(overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save is an error at any time while the first one writes."""
    real = safetensors.numpy.save_file

    def save_file(*args: Any, **kwargs: Any) -> None:
        with pytest.raises(FileExistsError, match="another save is writing to"):
            write(tmp_path, 2, overwrite=overwrite)
        real(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    write(tmp_path, 1)
    assert found(tmp_path) == 1


def test_save_keeps_foreign_files(tmp_path: Path) -> None:
    write(tmp_path, 1, TWO_FILES)
    for name in FOREIGN:
        (tmp_path / name).write_text("theirs")
    write(tmp_path, 2, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"} | FOREIGN

    (tmp_path / "model-00002-of-00002.safetensors").write_text("theirs")
    with pytest.raises(
        FileExistsError, match=r"has model-00002-of-00002\.safetensors, which its checkpoint does not name"
    ):
        write(tmp_path, 3, TWO_FILES, overwrite=True)
    assert found(tmp_path) == 2
    assert (tmp_path / "model-00002-of-00002.safetensors").read_text() == "theirs"


@pytest.mark.parametrize("name", ["../theirs.safetensors", "tokenizer.json", "sub/x.safetensors"])
def test_save_old_index_names_foreign_files(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / name).write_text("theirs")
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(ValueError, match=r"^save: .*expected the name of a \.safetensors file in the same folder"):
        write(folder, 1, overwrite=True)
    assert (folder / name).read_text() == "theirs"


@pytest.mark.parametrize("name", [".jax_ep_save", ".jax_ep_save.lock", ".jax_ep_save/old"])
@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_save_folder_or_lock_is_foreign(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    folder = tmp_path / "checkpoint"
    (folder / name).parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=rf"^save: .*{Path(name).parts[0]}"):
        write(folder, 1)
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_save_permissions_follow_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "new", 1, TWO_FILES)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o666 & ~umask}
