"""The tensors of a folder of safetensors files, of which nothing is read but what is indexed.

The format is a table of names, dtypes, shapes and places, and then the bytes
(https://huggingface.co/docs/safetensors). The slices of the safetensors package copy, and know no FP8 for NumPy; a
memory map of the same bytes does both.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
_OPEN_FILES = 64  # at most: each has a file descriptor


class _File(NamedTuple):
    """A memory map, and the table at its beginning."""

    data: np.memmap
    first_byte: int
    tensors: dict[str, Any]


def read_json(function: str, path: Path) -> Any:
    """A file that must exist and be JSON."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{function}: {path} does not exist, expected the folder of a Hugging Face checkpoint with"
            f" {path.name} in it; check the path, or download it with jax_ep.checkpoints.download."
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{function}: {path} is not valid JSON ({error}); get the file again.") from error


class TensorFiles:
    """`files[name]` is a read-only NumPy array over the bytes of the file: reading begins where it is indexed."""

    def __init__(self, function: str, folder: Path) -> None:
        self._function = function
        self._folder = folder
        self._open = functools.lru_cache(_OPEN_FILES)(self._map)
        if (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).tensors, SINGLE)
        elif (folder / INDEX).is_file():
            self._file_of = self._read_index()
        else:
            raise FileNotFoundError(
                f"{function}: {folder} has neither {SINGLE} nor {INDEX}, expected one of them; convert checkpoints of"
                " another format to safetensors."
            )
        self.names = tuple(self._file_of)

    def _read_index(self) -> dict[str, str]:
        index = read_json(self._function, self._folder / INDEX)
        file_of = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise ValueError(
                f"{self._function}: {self._folder / INDEX} has no object 'weight_map', expected the file of each"
                " tensor there; get the file again."
            )
        missing = sorted({file for file in file_of.values() if not (self._folder / file).is_file()})
        if missing:
            raise FileNotFoundError(
                f"{self._function}: {INDEX} names {', '.join(missing)}, which {self._folder} lacks; download what is"
                " missing."
            )
        return file_of

    def _map(self, file: str) -> _File:
        path = self._folder / file
        broken = f"{self._function}: {path} is not a whole safetensors file"
        size = path.stat().st_size
        if size < _LENGTH_BYTES:
            raise ValueError(f"{broken}: it has {size} bytes; download it again.")
        data = np.memmap(path, np.uint8, "r")
        first_byte = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        if first_byte > size:
            raise ValueError(f"{broken}: its table would end at byte {first_byte} of {size}; download it again.")
        try:
            tensors = json.loads(data[_LENGTH_BYTES:first_byte].tobytes())
        except ValueError as error:
            raise ValueError(f"{broken}: its table is not JSON ({error}); download it again.") from error
        tensors.pop("__metadata__", None)
        end = first_byte + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"{broken}: it should have {end} bytes and has {size}; download it again.")
        return _File(data, first_byte, tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._file_of.get(name)
        if file is None:
            close = difflib.get_close_matches(name, self.names, 3)
            near = f" (similar: {', '.join(close)})" if close else ""
            raise ValueError(
                f"{self._function}: {self._folder} has no tensor {name!r}{near}; Checkpoint.names lists what it has."
            )
        opened = self._open(file)
        if name not in opened.tensors:
            raise ValueError(
                f"{self._function}: {INDEX} places {name!r} in {file}, which has no such tensor; download both again."
            )
        tensor = opened.tensors[name]
        if tensor["dtype"] not in DTYPES:
            raise NotImplementedError(
                f"{self._function}: {name!r} has dtype {tensor['dtype']}, expected one of {', '.join(DTYPES)}; convert"
                " it first."
            )
        dtype, shape = np.dtype(DTYPES[tensor["dtype"]]), tuple(tensor["shape"])
        start, end = tensor["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{self._function}: {name!r} has {end - start} bytes in {file}, expected"
                f" {math.prod(shape) * dtype.itemsize} for {dtype} {shape}; download the file again."
            )
        return np.ndarray(shape, dtype, opened.data, opened.first_byte + start)
