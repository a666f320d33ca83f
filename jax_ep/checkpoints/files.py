"""The tensors of a folder of safetensors files.

Opening a folder checks everything that the files declare. Data is read when it is indexed, without the safetensors
package, which maps files and does not support FP8 in NumPy.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jax_ep.core import check, json_files
from jax_ep.core.json_files import OBJECT, TEXT, Schema, array, integer, mapping, record, value_of
from jax_ep.values import cut, shown, type_name

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
MAX_JSON_BYTES = 1 << 26
_LENGTH_BYTES = 8
_OPEN_FILES = 64  # At most.
_BLOCK_BYTES = 1 << 20  # Of rows that are read together: they stay in the cache until their columns are copied.
_GAP_BYTES = 1 << 15  # Bytes between parts of rows that take as long to read as another call.
_NEIGHBORS = 100  # Names searched for similar ones, in alphabetical order.


def _is_shard(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and "/" not in name
    return plain and name.endswith(".safetensors") and len(name.encode()) <= 255


_SHARD = value_of("the name of a .safetensors file in the same folder", _is_shard)
_INDEX = record({"metadata": OBJECT, "weight_map": mapping(_SHARD, TEXT)}, more=True, fewer=("metadata",))
_METADATA = record({"__metadata__": json_files.optional(mapping(TEXT, TEXT))}, more=True, fewer=("__metadata__",))
_NUMBER = integer(0, 1 << 62)
_TENSOR = {"dtype": TEXT, "shape": array(_NUMBER), "data_offsets": array(_NUMBER, 2)}
_TENSORS = mapping(record(_TENSOR, more=True), TEXT)


def optional(function: str, module: str) -> ModuleType:
    """Import a module of the extra `hf`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{function}: needs {package} ({error}): pip install {package}") from error


def folder_path(function: str, folder: Any) -> Path:
    """Convert a caller's folder to a `Path`."""
    path = check.path(function, "folder", folder)
    try:
        if b"\0" in os.fsencode(folder) or not os.fspath(folder):
            raise ValueError("a NUL, or empty")
        return path.absolute()  # The caller may change the current folder.
    except (OSError, ValueError) as error:
        kind = type(error) if isinstance(error, OSError) else ValueError
        raise kind(
            f"{function}: folder is {shown(folder)} ({error}), expected a path that this system supports; pass another"
            " one."
        ) from error


@contextlib.contextmanager
def _system_errors(function: str, path: str | Path) -> Iterator[None]:
    """Turn system errors into errors that name the file."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"{function}: cannot read {cut(path, 4096)} ({error.strerror}), expected a regular file of a Hugging Face"
            " checkpoint; check the path, or download it with jax_ep.checkpoints.download."
        ) from error


def open_file(function: str, path: Path) -> BinaryIO:
    """Open a regular file of a checkpoint."""
    with _system_errors(function, path):
        return json_files.open_regular(path)


def read_json(function: str, file: BinaryIO, schema: Schema = OBJECT) -> dict[str, Any]:
    """Parse the JSON of an open file and check it."""
    with _system_errors(function, file.name):
        data = file.read(MAX_JSON_BYTES + 1) or b""  # None: a file in /proc without data.
    return _parsed(f"{function}: {file.name}", data, schema)


def _parsed(what: str, data: bytes, schema: Schema = OBJECT) -> dict[str, Any]:
    try:
        value = json_files.parse(data, MAX_JSON_BYTES)
        schema(value, "")
    except ValueError as error:
        raise ValueError(f"{what} is not valid ({error}), expected a JSON object; download it again.") from error
    return value


def read_index(function: str, folder: Path) -> dict[str, str]:
    """Read the file of each tensor from the index; all are plain names of safetensors files in this folder."""
    with open_file(function, folder / INDEX) as file:
        return read_json(function, file, _INDEX)["weight_map"]


class _Header(NamedTuple):
    """The checked header of one safetensors file, and the identity of that file."""

    stamp: tuple[int, int, int, int]
    first_byte: int
    tensors: dict[str, Any]


def _stamp(file: int) -> tuple[int, int, int, int]:
    """Return device, inode, size and time of the last change of an open file."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header(num_bytes: int) -> Schema:
    """Accept the header of a file with this many bytes of data, which its tensors fill without gaps or overlaps."""

    def check(value: Any, name: str) -> None:
        _METADATA(value, name)
        tensors = {key: tensor for key, tensor in value.items() if key != "__metadata__"}
        _TENSORS(tensors, "its header")
        end = 0
        for key, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = tensor["data_offsets"]
            known = DTYPES.get(tensor["dtype"])
            expected = stop - begin if known is None else math.prod(tensor["shape"]) * np.dtype(known).itemsize
            if begin != end or not 0 <= expected == stop - begin:
                raise ValueError(f"{shown(key)} has {shown(tensor)}, expected {expected} bytes from byte {end} on")
            end = stop
        if end != num_bytes:
            raise ValueError(f"its tensors have {end} bytes, the file has {num_bytes} bytes of data")

    return check


def _read_header(function: str, path: Path) -> _Header:
    with open_file(function, path) as file, _system_errors(function, path):
        stamp = _stamp(file.fileno())
        length = int.from_bytes(file.read(_LENGTH_BYTES) or b"", "little")
        data = file.read(min(length, MAX_JSON_BYTES + 1)) or b""
    first_byte = _LENGTH_BYTES + length
    what = f"{function}: {path} is not a complete safetensors file: its header of {length} bytes"
    tensors = _parsed(what, data, _header(stamp[2] - first_byte))
    tensors.pop("__metadata__", None)
    return _Header(stamp, first_byte, tensors)


class _Descriptor(int):
    """A file descriptor that closes when nothing refers to it."""

    def __del__(self) -> None:
        os.close(self)


class StoredArray:
    """A tensor in a file. Indexing reads the parts of its first two axes, or returns the tensor of one index.

    Files are read rather than mapped: a mapped file that another program cuts ends the process (SIGBUS).
    """

    def __init__(
        self, read: Callable[[memoryview, int], None], first_byte: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._read, self._first_byte = read, first_byte
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def view(self, dtype: DTypeLike) -> StoredArray:
        """Return the same bytes in another dtype; the last axis counts elements of its size."""
        other = np.dtype(dtype)
        scaled = [size * self.dtype.itemsize // other.itemsize for size in self.shape[-1:]]
        return StoredArray(self._read, self._first_byte, (*self.shape[:-1], *scaled), other)

    def with_last_axes_merged(self) -> StoredArray:
        """Return the same values with one axis instead of the last two."""
        *leading, rows, columns = self.shape
        return StoredArray(self._read, self._first_byte, (*leading, rows * columns), self.dtype)

    def __getitem__(self, index: int | tuple[slice, ...]) -> Any:
        if isinstance(index, int):
            stride = math.prod(self.shape[1:]) * self.dtype.itemsize
            return StoredArray(self._read, self._first_byte + index * stride, self.shape[1:], self.dtype)
        part = np.empty([one.stop - one.start for one in index] + list(self.shape[len(index) :]), self.dtype)
        self.read_into(part, index)
        return part

    def read_into(self, part: np.ndarray, index: tuple[slice, ...]) -> None:
        """Read a part into a C-contiguous array of its shape and of this dtype."""
        if not part.size:
            return
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        first_byte = self._first_byte + (index[0].start * row_bytes if index else 0)
        into = part.reshape(-1).view(np.uint8)
        if part.shape[1:] == self.shape[1:]:
            self._read(memoryview(into), first_byte)
            return
        rows = into.reshape(len(part), -1)
        start = index[1].start * (row_bytes // self.shape[1])
        columns = slice(start, start + rows.shape[1])
        if row_bytes - rows.shape[1] > _GAP_BYTES:
            for i, row in enumerate(rows):
                self._read(memoryview(row), first_byte + i * row_bytes + start)
            return
        block = np.empty((min(len(rows), max(1, _BLOCK_BYTES // row_bytes)), row_bytes), np.uint8)
        for i in range(0, len(rows), len(block)):
            some = block[: len(rows) - i]
            self._read(memoryview(some.reshape(-1)), first_byte + i * row_bytes)
            rows[i : i + len(some)] = some[:, columns]


class TensorFiles:
    """Mapping of names to the tensors in the files, which are read when indexed.

    `config` is the parsed config.json, and `shards` has the names of the files.
    """

    def __init__(self, function: str, folder: Path, config: dict[str, Any]) -> None:
        self._function = function
        self.folder = folder
        self.config = config
        self._opened = functools.lru_cache(_OPEN_FILES)(self._descriptor)
        there = [name for name in (SINGLE, INDEX) if os.path.lexists(folder / name)]
        if len(there) != 1:
            raise (ValueError if there else FileNotFoundError)(
                f"{function}: {folder} has {' and '.join(there) or 'no tensors'}, expected either {SINGLE} or {INDEX};"
                " convert other formats to safetensors, or remove the file of another checkpoint."
            )
        if there == [SINGLE]:
            self._headers = {SINGLE: _read_header(function, folder / SINGLE)}
            self._file_of = dict.fromkeys(self._headers[SINGLE].tensors, SINGLE)
        else:
            self._file_of = read_index(function, folder)
            shards = dict.fromkeys(self._file_of.values())
            self._headers = {shard: _read_header(function, folder / shard) for shard in shards}
            self._check_index()
        self.names = tuple(self._file_of)
        self.shards = tuple(self._headers)

    def close(self) -> None:
        """Close the open files; reading opens them again."""
        self._opened.cache_clear()

    def _check_index(self) -> None:
        """Check that the files have the tensors of the index, each in one file."""
        for name, shard in self._file_of.items():
            if name not in self._headers[shard].tensors:
                raise ValueError(
                    f"{self._function}: {self.folder / INDEX} places {shown(name)} in {shard}, which has no such"
                    " tensor; download both again."
                )
        for shard, header in self._headers.items():
            for name in header.tensors:
                if self._file_of.get(name, shard) != shard:
                    raise ValueError(
                        f"{self._function}: {self.folder} has {shown(name)} in {shard} and in {self._file_of[name]},"
                        " expected each tensor once; download the checkpoint again."
                    )

    def _open(self, shard: str) -> BinaryIO:
        """Open the file whose header was read; a replaced file is an error."""
        file = open_file(self._function, self.folder / shard)
        if _stamp(file.fileno()) != self._headers[shard].stamp:
            file.close()
            raise ValueError(
                f"{self._function}: {self.folder / shard} has been replaced, expected the file that was there when the"
                " checkpoint was opened; open Checkpoint again."
            )
        return file

    def _descriptor(self, shard: str) -> _Descriptor:
        with self._open(shard) as file, _system_errors(self._function, file.name):
            return _Descriptor(os.dup(file.fileno()))

    def _read(self, shard: str, into: memoryview, first_byte: int) -> None:
        """Fill a buffer with bytes of a file that has not changed since its header was read."""
        file = self._opened(shard)
        try:
            while count := os.preadv(file, [into], first_byte):
                into, first_byte = into[count:], first_byte + count
        except OSError:
            with _system_errors(self._function, self.folder / shard):
                raise
        if into or _stamp(file) != self._headers[shard].stamp:
            raise ValueError(
                f"{self._function}: {self.folder / shard} was changed while it was read, expected the file that was"
                " there when the checkpoint was opened; open Checkpoint again."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> StoredArray:
        if not isinstance(name, str):
            raise TypeError(f"{self._function}: name is {type_name(name)}, expected a str; pass one of names.")
        shard = self._file_of.get(name)
        if shard is None:
            ordered = sorted(self.names)
            place = bisect.bisect(ordered, name)
            close = difflib.get_close_matches(name, ordered[max(0, place - _NEIGHBORS) : place + _NEIGHBORS], 3)
            near = f" (similar: {', '.join(map(shown, close))})" if close else ""
            raise ValueError(
                f"{self._function}: {self.folder} has no tensor {shown(name)}{near}; Checkpoint.names lists what it"
                " has."
            )
        header = self._headers[shard]
        tensor = header.tensors[name]
        if tensor["dtype"] not in DTYPES:
            raise NotImplementedError(
                f"{self._function}: {shown(name)} has dtype {shown(tensor['dtype'])}, expected one of"
                f" {', '.join(DTYPES)}; convert it first."
            )
        self._open(shard).close()
        shape, dtype = tuple(tensor["shape"]), np.dtype(DTYPES[tensor["dtype"]])
        try:
            np.broadcast_to(np.zeros((), dtype), shape)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{self._function}: {shown(name)} has shape {shown(tensor['shape'])}, expected one that NumPy supports"
                f" ({error}); convert it first."
            ) from error
        first_byte = header.first_byte + tensor["data_offsets"][0]
        return StoredArray(functools.partial(self._read, shard), first_byte, shape, dtype)
