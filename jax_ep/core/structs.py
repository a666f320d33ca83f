"""Flatten and regroup kernel arguments, which may be NamedTuples. The interpreter's workers load it without JAX."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def flat(arguments: Iterable[Any]) -> list[Any]:
    """Flatten operands or results, which may be NamedTuples."""
    return [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]


def type_of(argument: Any) -> Any:
    """Return the NamedTuple type of an operand or result, or None for a single one."""
    return type(argument) if isinstance(argument, tuple) else None


def regrouped(values: Iterable[Any], types: Iterable[Any]) -> list[Any]:
    """Invert `flat`: regroup values into NamedTuples of the given types."""
    rest = iter(values)
    return [next(rest) if kind is None else kind(*itertools.islice(rest, len(kind._fields))) for kind in types]
