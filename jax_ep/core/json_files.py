"""Reading of untrusted JSON files: bounded sizes, and schemas.

A schema is a function of a value and the name that errors give it, "" for the whole file. It raises a one-line
`ValueError`. Schemas compose: `record({"begin": integer(0, 9), "names": array(TEXT)})`.
"""

from __future__ import annotations

import collections
import errno
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jax_ep.values import cut, shown

Schema = Callable[[Any, str], None]
_GZIP = b"\x1f\x8b"


def value_of(expected: str, is_valid: Callable[[Any], object]) -> Schema:
    """Accept values for which `is_valid` returns true."""

    def check(value: Any, name: str) -> None:
        if not is_valid(value):
            raise ValueError(f"{f'{name}=' if name else 'the file has '}{shown(value)}, expected {expected}")

    return check


def integer(least: int, most: int) -> Schema:
    """Accept an int in this range, but no bool."""
    return value_of(f"an integer from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Schema:
    """Accept a finite number in this range, but no bool."""
    return value_of(
        f"a number from {least:g} to {most:g}", lambda value: type(value) in (int, float) and least <= value <= most
    )


def choice(choices: Collection[Any]) -> Schema:
    """Accept one of these strings."""
    return value_of(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


BOOLEAN = value_of("true or false", lambda value: isinstance(value, bool))
TEXT = value_of("a string", lambda value: isinstance(value, str))
OBJECT = value_of("an object", lambda value: isinstance(value, dict))
_ARRAY = value_of("an array", lambda value: isinstance(value, list))


def optional(schema: Schema) -> Schema:
    """Accept null, or values that `schema` accepts."""
    return lambda value, name: None if value is None else schema(value, name)


def array(item: Schema, length: int | None = None) -> Schema:
    """Accept an array whose items match `item`, of any length or of this one."""

    def check(value: Any, name: str) -> None:
        _ARRAY(value, name)
        if length not in (None, len(value)):
            raise ValueError(f"{name} has {len(value)} items, expected {length}")
        for i, one in enumerate(value):
            item(one, f"{name}[{i}]")

    return check


def integers(least: int, most: int) -> Schema:
    """Accept an array of distinct ints in this range."""
    item = integer(least, most)
    different = value_of("different integers", lambda value: len(set(value)) == len(value))

    def check(value: Any, name: str) -> None:
        array(item)(value, name)
        different(value, name)

    return check


def mapping(item: Schema, key: Schema) -> Schema:
    """Accept an object whose names match `key` and whose values match `item`."""

    def check(value: Any, name: str) -> None:
        OBJECT(value, name)
        for one, held in value.items():
            key(one, f"a name in {name}")
            item(held, f"{name}[{shown(one)}]")

    return check


def record(fields: Mapping[str, Schema], *, more: bool = False, fewer: Collection[str] = ()) -> Schema:
    """Accept an object with these fields. Fields in `fewer` may be missing; `more` allows unknown fields."""

    def check(value: Any, name: str) -> None:
        OBJECT(value, name)
        if missing := [field for field in fields if field not in value and field not in fewer]:
            raise ValueError(f"{name or 'the file'} lacks {missing[0]!r}")
        if not more and (unknown := value.keys() - fields.keys()):
            raise ValueError(f"{name or 'the file'} has an unknown field {shown(min(unknown))}")
        for field, schema in fields.items():
            if field in value:
                schema(value[field], f"{name}.{field}" if name else field)

    return check


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
      OSError: the file cannot be read, or is not a regular file; reading a FIFO or a device may never end.
    """
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # Without O_NONBLOCK, opening a FIFO waits for a writer.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
      OSError: the file cannot be read, or is not a regular file.
      ValueError: the file is larger.
    """
    with open_regular(path) as file:
        return _at_most(file.read(most + 1) or b"", most)  # None: a file in /proc without data.


def read(path: Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes, optionally gzip-compressed.

    Raises:
      OSError: the file cannot be read, or is not a regular file.
      ValueError: the file is larger or damaged.
    """
    data = read_regular(path, most)
    if data.startswith(_GZIP):
        import gzip

        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"damaged gzip data, {error}") from error
    return parse(data, most)


def parse(data: bytes, most: int) -> Any:
    """Parse strict JSON of at most `most` bytes: UTF-8, finite numbers, unique names in each object.

    Raises:
      ValueError: the data is anything else.
    """
    hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite, "object_pairs_hook": _unique}
    try:
        return json.loads(_at_most(data, most).decode(), **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON, {error}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _at_most(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    return data


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{cut(text, 100)} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shown(twice)} occurs twice in an object")
    return found
