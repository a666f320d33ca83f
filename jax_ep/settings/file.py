"""The JSON file of tuned settings: where it is, what it must hold to be used, and writing it.

It is data, read by `json` and checked name by name. One that does not fit, because it is of another kind of device or
was made for other kernels, is not used at all: settings of other kernels may be worse than none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_ep.core.files import sources_digest, write_atomically
from jax_ep.settings.operations import NAMES, Fact, Setting, bucket, check, check_blocks, key

ENVIRONMENT = "JAX_EP_TUNING"
"""A path, or "off" for none; unset or empty: the file of this kind of device in the user's cache folder."""
FORMAT = 1
_PACKAGE = Path(__file__).resolve().parents[1]
_FIELDS = ("format", "device_kind", "kernels", "rates", "entries")
_ENTRY_FIELDS = frozenset({"operation", "facts", "settings", "measured"})


class TuningWarning(UserWarning):
    """A file of tuned settings is not used, and why."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine has been measured to do.

    Attributes:
      link_bytes_per_s: of one large copy from a GPU to another, in the slower direction; None: there is one GPU.
      memory_bytes_per_s: read by a sum over a large array.
      product_flops_per_s: of large bfloat16 products, one after another for long enough that clocks have settled.
    """

    link_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    product_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{field.name}={value!r}, expected a number")
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value!r}, expected a positive number")


@dataclasses.dataclass(frozen=True, eq=False)
class Tuning:
    """Tuned settings of one kind of device, and its rates. Two of them are the same only if they are one object.

    Attributes:
      device_kind: as JAX names it.
      entries: settings by operation and facts, see `operations.key`.
      rates: of the machine, or None.
      path: the file that they are from, or None.
    """

    device_kind: str
    entries: Mapping[tuple[Fact, ...], Mapping[str, Setting]] = MappingProxyType({})
    rates: Rates | None = None
    path: Path | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is written of one operation: `measured` is for people, and not read."""

    operation: str
    facts: Mapping[str, Any]
    settings: Mapping[str, Setting]
    measured: Mapping[str, Any]


def kernel_sources() -> str:
    """A hash of the kernels and of what launches them."""
    return sources_digest(_PACKAGE / "megakernels")


def default_path(device_kind: str) -> Path:
    """In the user's cache folder, which `XDG_CACHE_HOME` names."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    return Path(folder) / "jax_ep" / "tuning" / f"{name}.json"


def read_chosen(device_kind: str) -> Tuning:
    """That of the environment, or else the default file; without settings where there is none."""
    named = os.environ.get(ENVIRONMENT, "")
    if named == "off":
        return _read_once(None, device_kind, False)
    return _read_once(Path(named) if named else default_path(device_kind), device_kind, bool(named))


@functools.cache
def _read_once(path: Path | None, device_kind: str, must_exist: bool) -> Tuning:
    """The file; one warning, and no settings, where it is bad."""
    if path is None:
        return Tuning(device_kind)
    try:
        return read(path, device_kind)
    except FileNotFoundError as error:
        if not must_exist:
            return Tuning(device_kind)
        reason: Exception = error
    except (OSError, ValueError) as error:
        reason = error
    warnings.warn(f"{reason} The package's own settings are used.", TuningWarning, stacklevel=2)
    return Tuning(device_kind)


def read(path: Path, device_kind: str) -> Tuning:
    """The file, checked.

    Raises:
      FileNotFoundError: there is none.
      OSError: it cannot be read.
      ValueError: it is not for this kind of device or these kernels, or not what `write` makes.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"tuned settings: there is no {path}; `jax-ep tune --out {path}` makes it.") from error
    try:
        return _parsed(json.loads(data.decode("utf-8")), path, device_kind)
    except (ValueError, RecursionError) as error:
        reason = f"no JSON, {error}" if isinstance(error, json.JSONDecodeError) else error
        remedy = "`jax-ep tune` makes one that does."
        raise ValueError(f"tuned settings of {path} do not fit: {reason}; {remedy}") from error


def _parsed(content: Any, path: Path, device_kind: str) -> Tuning:
    _check_names("the file", content, _FIELDS)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
    if content["device_kind"] != device_kind:
        raise ValueError(f"measured on {content['device_kind']!r}, the device here is {device_kind!r}")
    if content["kernels"] != kernel_sources():
        raise ValueError(f"measured with kernels {content['kernels']!r}, those here are {kernel_sources()!r}")
    if not isinstance(content["entries"], list):
        raise ValueError(f"entries is a {type(content['entries']).__name__}, expected a list")
    entries = dict(_parsed_entry(entry) for entry in content["entries"])
    if len(entries) < len(content["entries"]):
        raise ValueError("two entries of the same operation and facts")
    return Tuning(device_kind, MappingProxyType(entries), _parsed_rates(content["rates"]), path)


def _parsed_rates(rates: Any) -> Rates | None:
    if rates is None:
        return None
    _check_names("rates", rates, [field.name for field in dataclasses.fields(Rates)])
    return Rates(**rates)


def _parsed_entry(entry: Any) -> tuple[tuple[Fact, ...], Mapping[str, Setting]]:
    _check_names("an entry", entry, _ENTRY_FIELDS)
    operation, facts, settings = entry["operation"], entry["facts"], entry["settings"]
    for name, value in (("facts", facts), ("settings", settings)):
        if not isinstance(value, dict):
            raise ValueError(f"{name} of an entry is a {type(value).__name__}, expected an object")
    check(operation, settings)
    for name, value in facts.items():
        kind = str if name in NAMES else int
        if type(value) is not kind or value != bucket(name, value):
            expected = "a name" if kind is str else "a size, as a power of two where sizes share settings"
            raise ValueError(f"{operation}: {name}={value!r}, expected {expected}")
    found = key(operation, facts)
    check_blocks(operation, settings, facts)
    return found, MappingProxyType(dict(settings))


def _check_names(what: str, content: Any, names: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{what} is a {type(content).__name__}, expected an object")
    unknown, missing = sorted(set(content) - set(names)), sorted(set(names) - set(content))
    if unknown or missing:
        raise ValueError(f"{what} has unknown {unknown} and lacks {missing}, expected {sorted(names)}")


def write(path: Path, device_kind: str, entries: list[Entry], rates: Rates | None) -> None:
    """Writes the file as a whole, or not at all; what is there of the same kind is replaced.

    Raises:
      ValueError: settings that could not be read again.
    """
    for entry in entries:
        check(entry.operation, entry.settings)
    facts = [{name: bucket(name, value) for name, value in entry.facts.items()} for entry in entries]
    content = {
        "format": FORMAT,
        "device_kind": device_kind,
        "kernels": kernel_sources(),
        "rates": None if rates is None else dataclasses.asdict(rates),
        "entries": [dataclasses.asdict(entry) | {"facts": found} for entry, found in zip(entries, facts, strict=True)],
    }
    _parsed(content, path, device_kind)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def settings_of(tuning: Tuning, operation: str, facts: Mapping[str, Any]) -> Mapping[str, Setting]:
    """Those of the operation for these facts; none where nothing has been measured."""
    return tuning.entries.get(key(operation, facts), {}) if tuning.entries else {}
