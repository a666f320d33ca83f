"""The Python standard library's sources as bytes, and a resumable iterator over random windows."""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np

NUM_BYTES = 256
# Tests and generated tables differ from library code, and are twice its size.
_LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
_END_OF_FILE = b"\0"
_HELD_OUT_SHARE = 0.05  # of the files


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two byte texts, `train` and `held_out`, from different files."""

    train: np.ndarray
    held_out: np.ndarray

    def held_out_windows(self, count: int, length: int) -> np.ndarray:
        """Return evenly spaced windows `[count, length + 1]`: inputs and, shifted by one, targets."""
        _check_length(self.held_out, length)
        starts = np.linspace(0, len(self.held_out) - length - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, length)


def read_corpus() -> Corpus:
    """Read all sources of the standard library, in the order of their names.

    A hash of its name decides whether a file is held out, so the split is stable across Python versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        if not _LEFT_OUT.intersection(name.split("/")[:-1]):
            is_held_out = zlib.crc32(name.encode()) < _HELD_OUT_SHARE * 2**32
            parts[is_held_out].append((root / name).read_bytes() + _END_OF_FILE)
    if not parts[False] or not parts[True]:
        raise ValueError(f"{root} has {len(names)} Python files, too few to train on some and hold out others")
    train, held_out = (np.frombuffer(b"".join(parts[key]), np.uint8) for key in (False, True))
    return Corpus(train, held_out)


def unigram_entropy(text: np.ndarray) -> float:
    """Return the entropy in nats per byte: a lower bound on the loss of models that ignore the context."""
    share = np.bincount(text, minlength=NUM_BYTES) / len(text)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


class WindowIterator:
    """Endless batches of random windows; `state` and `restore` continue the same sequence in another process."""

    def __init__(self, text: np.ndarray, *, batch_size: int, length: int, seed: int) -> None:
        _check_length(text, length)
        self._text, self._batch_size, self._length = text, batch_size, length
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def __next__(self) -> np.ndarray:
        """Return the next batch `[batch_size, length + 1]` int32."""
        starts = self._generator.integers(0, len(self._text) - self._length, self._batch_size)
        return _windows(self._text, starts, self._length)

    def __iter__(self) -> WindowIterator:
        return self

    def state(self) -> dict[str, Any]:
        """Return the full state as JSON types."""
        return dict(self._generator.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the iterator that returned `state`."""
        self._generator.bit_generator.state = state


def _check_length(text: np.ndarray, length: int) -> None:
    if len(text) <= length:
        raise ValueError(f"the text has {len(text)} bytes, too few for windows of {length} + 1")


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
