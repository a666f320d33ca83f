"""The tensors of a folder of safetensors files.

Everything that the files say about themselves is checked when the folder is opened; the safetensors package checks the
headers. Data is read where it is indexed, from a memory map: the slices of the package copy, and know no FP8 for NumPy.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import functools
import importlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_LENGTH_BYTES = 8
_MAX_JSON_BYTES = 1 << 26
_MAX_NAME_BYTES = 255
_OPEN_FILES = 64  # at most: each has a file descriptor
_NEIGHBORS = 100  # in alphabetical order, among which similar names are looked for

short = reprlib.Repr(maxstring=200, maxother=200).repr
"""`repr`, cut to a length that fits an error: files may hold values of any size."""


def optional(function: str, module: str) -> ModuleType:
    """Import a module of the extra `hf`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{function}: needs {package}, which is not installed: pip install {package}") from error


def folder_path(function: str, folder: Any) -> Path:
    """The `Path` of a caller's folder."""
    if not isinstance(folder, str | os.PathLike) or isinstance(os.fspath(folder), bytes):
        raise TypeError(f"{function}: folder is a {type(folder).__name__}, expected a str or a Path; pass one.")
    if "\0" in os.fspath(folder):
        raise ValueError(f"{function}: folder is {short(folder)}, expected a path without NUL; pass another one.")
    return Path(folder)


@contextlib.contextmanager
def open_file(function: str, path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a FIFO or a device is an error, not a wait."""
    expected = "expected a regular file of a Hugging Face checkpoint"
    remedy = "check the path, or download it with jax_ep.checkpoints.download"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{function}: {path} is a FIFO, socket or device, {expected}; {remedy}.")
            yield file
    except OSError as error:
        if error.errno is None:  # an error of this package, raised while the file was open
            raise
        what = f"{path} does not exist" if isinstance(error, FileNotFoundError) else f"cannot read {path}: {error}"
        raise type(error)(f"{function}: {what}, {expected}; {remedy}.") from error


def check_unchanged(function: str, path: Path, opened: os.stat_result) -> None:
    """Check that a path still leads to the file that was opened, and that no save moved it meanwhile."""
    now = os.stat(path) if path.exists() else None
    if now is None or not os.path.samestat(opened, now) or opened.st_ctime_ns != now.st_ctime_ns:
        raise FileNotFoundError(
            f"{function}: {path} was replaced while the checkpoint was opened, expected no save at that time; open it"
            " again."
        )


def read_json(function: str, file: BinaryIO) -> dict[str, Any]:
    """The JSON object in an open file."""
    return parse_json(f"{function}: {file.name}", file.read(_MAX_JSON_BYTES + 1))


def parse_json(what: str, data: bytes) -> dict[str, Any]:
    """A JSON object as the standard has it: UTF-8, finite numbers, each key once."""
    if len(data) > _MAX_JSON_BYTES:
        raise ValueError(f"{what} is longer than {_MAX_JSON_BYTES} bytes, expected a JSON object; get the file again.")
    hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite, "object_pairs_hook": _unique}
    try:
        value = json.loads(data.decode(), **hooks)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON ({error}), expected a JSON object; get the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object but a {type(value).__name__}; get the file again.")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{short(text)} is no finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {short(twice)} is there twice")
    return result


def read_index(function: str, folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index; all of them are plain names of safetensors files in this folder."""
    with open_file(function, folder / INDEX) as file:
        index = read_json(function, file)
    what = f"{function}: {folder / INDEX}"
    file_of = index.get("weight_map")
    if not isinstance(file_of, dict) or not isinstance(index.get("metadata", {}), dict):
        raise ValueError(
            f"{what} has no object 'weight_map', or a 'metadata' that is none, expected the file of each tensor; get"
            " the file again."
        )
    for name, shard in file_of.items():
        if not _is_shard(shard):
            raise ValueError(
                f"{what} places {short(name)} in {short(shard)}, expected the name of a .safetensors file in the same"
                " folder; get the file again."
            )
    return file_of


def _is_shard(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and "/" not in name
    return plain and name.endswith(".safetensors") and len(name.encode()) <= _MAX_NAME_BYTES


class _Header(NamedTuple):
    """What one safetensors file says about its tensors, checked, and which file that was."""

    stamp: tuple[int, ...]
    first_byte: int
    tensors: dict[str, Any]


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(function: str, path: Path) -> _Header:
    safetensors = optional(function, "safetensors")
    broken = f"{function}: {path} is not a whole safetensors file"
    with open_file(function, path) as file:
        try:
            with safetensors.safe_open(f"/dev/fd/{file.fileno()}", "np"):
                pass
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{broken} ({str(error)[:300]}), expected one; download it again.") from error
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        tensors = parse_json(f"{broken}: its header", file.read(min(length, _MAX_JSON_BYTES + 1)))
        tensors.pop("__metadata__", None)
        return _Header(_stamp(file), _LENGTH_BYTES + length, tensors)


class TensorFiles:
    """`files[name]` is a read-only NumPy array over the bytes of the file: reading begins where it is indexed.

    `config` is the parsed config.json.
    """

    def __init__(self, function: str, folder: Path, config: dict[str, Any]) -> None:
        self._function = function
        self._folder = folder
        self.config = config
        self._open = functools.lru_cache(_OPEN_FILES)(self._map)
        there = [name for name in (SINGLE, INDEX) if os.path.lexists(folder / name)]
        if not there:
            raise FileNotFoundError(
                f"{function}: {folder} has neither {SINGLE} nor {INDEX}, expected one of them; convert checkpoints of"
                " another format to safetensors."
            )
        if len(there) == 2:
            raise ValueError(
                f"{function}: {folder} has both {SINGLE} and {INDEX}, expected one of them; remove the one that is not"
                " of this checkpoint."
            )
        if there == [SINGLE]:
            self._headers = {SINGLE: _read_header(function, folder / SINGLE)}
            self._file_of = dict.fromkeys(self._headers[SINGLE].tensors, SINGLE)
        else:
            self._file_of = read_index(function, folder)
            self._headers = self._read_shards()
        self.names = tuple(self._file_of)

    def _read_shards(self) -> dict[str, _Header]:
        """The headers of the files that the index names, which have its tensors, each in one file."""
        shards = list(dict.fromkeys(self._file_of.values()))
        missing = sorted(shard for shard in shards if not os.path.exists(self._folder / shard))
        if missing:
            raise FileNotFoundError(
                f"{self._function}: {INDEX} names {', '.join(missing[:5])}, which {self._folder} lacks"
                f" ({len(missing)} in all), expected every file; download what is missing."
            )
        headers = {shard: _read_header(self._function, self._folder / shard) for shard in shards}
        for name, shard in self._file_of.items():
            if name not in headers[shard].tensors:
                raise ValueError(
                    f"{self._function}: {self._folder / INDEX} places {short(name)} in {shard}, which has no such"
                    " tensor; download both again."
                )
        for shard, header in headers.items():
            for name in header.tensors:
                if self._file_of.get(name, shard) != shard:
                    raise ValueError(
                        f"{self._function}: {self._folder} has {short(name)} in {shard} and in {self._file_of[name]},"
                        " expected each tensor once; download the checkpoint again."
                    )
        return headers

    def _map(self, shard: str) -> np.memmap:
        with open_file(self._function, self._folder / shard) as file:
            if _stamp(file) != self._headers[shard].stamp:
                raise ValueError(
                    f"{self._function}: {self._folder / shard} has been replaced, expected the file that was there when"
                    " the checkpoint was opened; open Checkpoint again."
                )
            return np.memmap(file, np.uint8, "r")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> np.ndarray:
        if not isinstance(name, str):
            raise TypeError(f"{self._function}: name is a {type(name).__name__}, expected a str; pass one of names.")
        shard = self._file_of.get(name)
        if shard is None:
            ordered = sorted(self.names)
            place = bisect.bisect(ordered, name)
            close = difflib.get_close_matches(name, ordered[max(0, place - _NEIGHBORS) : place + _NEIGHBORS], 3)
            near = f" (similar: {', '.join(map(short, close))})" if close else ""
            raise ValueError(
                f"{self._function}: {self._folder} has no tensor {short(name)}{near}; Checkpoint.names lists what it"
                " has."
            )
        header = self._headers[shard]
        tensor = header.tensors[name]
        if tensor["dtype"] not in DTYPES:
            raise NotImplementedError(
                f"{self._function}: {short(name)} has dtype {tensor['dtype']}, expected one of {', '.join(DTYPES)};"
                " convert it first."
            )
        data, first_byte = self._open(shard), header.first_byte + tensor["data_offsets"][0]
        try:
            return np.ndarray(tensor["shape"], DTYPES[tensor["dtype"]], data, first_byte)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{self._function}: {short(name)} has shape {short(tensor['shape'])}, expected one that NumPy has"
                f" ({error}); convert it first."
            ) from error
