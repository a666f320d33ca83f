"""Flatten and regroup kernel arguments, which may be NamedTuples. The interpreter's workers load it without JAX."""

from __future__ import annotations

import hashlib
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


def code_digest(function: Any) -> str:
    """Hash what a Python function computes, equally in all processes; functions that it calls are not covered."""
    code = function.__code__
    numbers = [value for value in code.co_consts if isinstance(value, int | float | str)]  # sets have no order
    facts = code.co_code, code.co_names, code.co_varnames, numbers
    return hashlib.sha256(repr(facts).encode(errors="surrogatepass")).hexdigest()
