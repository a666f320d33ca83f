"""The JSON file of tuned settings: its place, its schema, reading and writing.

A file for another kind of device or for other kernels is not used at all: settings of other kernels may be worse than
none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_ep.core import json_files
from jax_ep.core.files import sources_digest, write_atomically
from jax_ep.core.json_files import OBJECT, TEXT, Schema, array, choice, number, optional, record, value_of
from jax_ep.settings.operations import NAMES, OPERATIONS, Fact, Setting, bucket, check_blocks, key
from jax_ep.values import cut, instance, shown

ENVIRONMENT = "JAX_EP_TUNING"
"""A path, or "off" for none; unset or empty: the file of this kind of device in the user's cache folder."""
FORMAT = 1
_PACKAGE = Path(__file__).resolve().parents[1]
MOST_BYTES = 4 << 20
_RATE = optional(number(1, 1e30))


class TuningWarning(UserWarning):
    """Warning that a file of tuned settings is not used, with the reason."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured rates of a machine.

    Attributes:
      link_bytes_per_s: of one large copy from a GPU to another, in the slower direction; None with one GPU.
      memory_bytes_per_s: read by a sum over a large array.
      product_flops_per_s: of large bfloat16 GEMMs, after enough of them that clocks have settled.

    Raises:
      ValueError: a rate is not a number from 1.

    Example:
      >>> from jax_ep.tuning import Rates
      >>> Rates(memory_bytes_per_s=4.5e12).link_bytes_per_s is None
      True
    """

    link_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    product_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _RATE(getattr(self, field.name), f"Rates: {field.name}")


@dataclasses.dataclass(frozen=True, eq=False)
class Tuning:
    """Tuned settings of one kind of device, and its rates; equal only to itself.

    Attributes:
      device_kind: as JAX names it.
      entries: settings by operation and facts, see `operations.key`.
      rates: of the machine, or None.
      path: of the file, or None.

    Example:
      >>> from jax_ep.tuning import Tuning
      >>> dict(Tuning("NVIDIA H200").entries)
      {}
    """

    device_kind: str
    entries: Mapping[tuple[Fact, ...], Mapping[str, Setting]] = MappingProxyType({})
    rates: Rates | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        expected = "mappings of settings by operation and facts"
        instance("Tuning", "entries", self.entries, Mapping, expected)
        for facts, settings in self.entries.items():
            instance("Tuning", f"entries[{shown(facts)}]", settings, Mapping, "a mapping of settings")
        entries = {facts: MappingProxyType(dict(settings)) for facts, settings in self.entries.items()}
        object.__setattr__(self, "entries", MappingProxyType(entries))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the value; Python does neither with read-only mappings."""
        entries = {facts: dict(settings) for facts, settings in self.entries.items()}
        return Tuning, (self.device_kind, entries, self.rates, self.path)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the file; `measured` is for people, and is not read."""

    operation: str
    facts: Mapping[str, Any]
    settings: Mapping[str, Setting]
    measured: Mapping[str, Any]


def kernel_sources() -> str:
    """Return a hash of the kernels and of the code that launches them."""
    return sources_digest(_PACKAGE / "megakernels") + sources_digest(_PACKAGE / "formats" / "kernels")


def default_path(device_kind: str) -> Path | None:
    """Return a path in the user's cache folder, `XDG_CACHE_HOME`; None for a user without a home."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user that the system does not know
        return None
    return folder / "jax_ep" / "tuning" / f"{name}.json"


def read_chosen(device_kind: str) -> Tuning:
    """Read the file that the environment names, or else the default file; no settings if it does not exist."""
    named = os.environ.get(ENVIRONMENT, "")
    if named == "off":
        return _read_once(None, device_kind, False)
    return _read_once(Path(named) if named else default_path(device_kind), device_kind, bool(named))


@functools.cache
def _read_once(path: Path | None, device_kind: str, must_exist: bool) -> Tuning:
    """Read a file; if it is bad, warn once and return no settings."""
    if path is None:
        return Tuning(device_kind)
    try:
        return _load(path, device_kind)
    except (OSError, ValueError) as error:
        if must_exist or not isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = cut(getattr(error, "strerror", None) or error, 90)
            message = f"ignored the tuned settings {cut(path, 40)}: {reason}; `jax-ep tune` makes new ones"
            warnings.warn(message, TuningWarning, stacklevel=2)
    return Tuning(device_kind)


def read(path: Path, device_kind: str, function: str = "jax-ep tune") -> Tuning:
    """Read and check a file.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it cannot be read.
      ValueError: it is for another kind of device or other kernels, or `write` has not made it.
    """
    try:
        return _load(path, device_kind)
    except OSError as error:
        raise type(error)(
            f"{function}: cannot read {cut(path, 200)} ({error.strerror}), expected a file of tuned settings;"
            " `jax-ep tune --out FILE` makes one."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{function}: {cut(path, 200)} does not fit: {error}; `jax-ep tune` makes one that does."
        ) from error


def _load(path: Path, device_kind: str) -> Tuning:
    return _parsed(json_files.read(path, MOST_BYTES), path, device_kind)


def _fact(name: str) -> Schema:
    if name in NAMES:
        return TEXT
    expected = "a size, rounded as `bucket` does"
    return value_of(expected, lambda size: type(size) is int and 0 <= size < 1 << 62 and size == bucket(name, size))


_ENTRIES = {
    name: record(
        {
            "operation": choice((name,)),
            "facts": record({fact: _fact(fact) for fact in operation.facts}),
            "settings": record(
                {name: value_of(str(values), values.__contains__) for name, values in operation.settings.items()},
                fewer=operation.settings,
            ),
            "measured": OBJECT,
        }
    )
    for name, operation in OPERATIONS.items()
}


def _entry(value: Any, name: str) -> None:
    """Check an entry by the schema of its operation."""
    record({"operation": choice(OPERATIONS)}, more=True)(value, name)
    _ENTRIES[value["operation"]](value, name)


def _same(wanted: str | int) -> Schema:
    return value_of(f"{wanted!r}, as here", lambda value: type(value) is type(wanted) and value == wanted)


def _schema(device_kind: str) -> Schema:
    """Return the schema of a file for this kind of device and these kernels."""
    return record(
        {
            "format": _same(FORMAT),
            "device_kind": _same(device_kind),
            "kernels": _same(kernel_sources()),
            "rates": optional(record(dict.fromkeys((field.name for field in dataclasses.fields(Rates)), _RATE))),
            "entries": array(_entry),
        }
    )


def _parsed(content: Any, path: Path, device_kind: str) -> Tuning:
    _schema(device_kind)(content, "")
    entries = dict(_parsed_entry(entry) for entry in content["entries"])
    if len(entries) < len(content["entries"]):
        raise ValueError("two entries of the same operation and facts")
    rates = None if content["rates"] is None else Rates(**content["rates"])
    return Tuning(device_kind, entries, rates, path)


def _parsed_entry(entry: Any) -> tuple[tuple[Fact, ...], Mapping[str, Setting]]:
    operation, facts, settings = entry["operation"], entry["facts"], entry["settings"]
    check_blocks(operation, settings, facts)
    return key(operation, facts), settings


def write(path: Path, device_kind: str, entries: list[Entry], rates: Rates | None) -> None:
    """Write the file atomically.

    Raises:
      ValueError: settings that `read` would not accept.
    """
    facts = [{name: bucket(name, value) for name, value in entry.facts.items()} for entry in entries]
    content = {
        "format": FORMAT,
        "device_kind": device_kind,
        "kernels": kernel_sources(),
        "rates": None if rates is None else dataclasses.asdict(rates),
        "entries": [dataclasses.asdict(entry) | {"facts": found} for entry, found in zip(entries, facts, strict=True)],
    }
    data = (json.dumps(content, indent=1) + "\n").encode()
    _parsed(json_files.parse(data, MOST_BYTES), path, device_kind)
    write_atomically(path, data)


def settings_of(tuning: Tuning, operation: str, facts: Mapping[str, Any]) -> Mapping[str, Setting]:
    """Return the settings of the operation for these facts; empty if it has not been tuned."""
    return tuning.entries.get(key(operation, facts), {}) if tuning.entries else {}
