"""Plain values, such as numbers and names: how errors show them, and checks that classes of `jax_ep.types` use, too.

Messages give the actual value, the expected value and the remedy.
"""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

MOST_EXPERTS = 2**31 - 2
"""Most experts: the id after the last one is an int32, too."""
_ENDS = {2**31 - 1: "2**31", MOST_EXPERTS: "2**31 - 1"}
_SHOWN = 100


class _Shortened(reprlib.Repr):
    def repr_int(self, value: int, _: int) -> str:
        """Format an int; Python does not convert those of more than 4300 digits."""
        return f"{value}" if abs(value) < 10**_SHOWN else f"an integer of {value.bit_length()} bits"


_shorten = _Shortened(maxlevel=2, maxstring=_SHOWN, maxother=_SHOWN)


def shown(value: object) -> str:
    """Format a value in at most 100 printable characters."""
    return cut(_shorten.repr(value), _SHOWN)


def cut(text: object, most: int) -> str:
    """Put a text on one line and shorten its middle to at most `most` characters."""
    line = " ".join(str(text).split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[: most - 3 - half]}...{line[len(line) - half :]}"


def type_name(value: object) -> str:
    """Return the type of a value with its article for error messages, such as "an int"."""
    if isinstance(value, jax.Array):
        return "a traced array" if isinstance(value, jax.core.Tracer) else "an array"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def in_float32(value: Any) -> float:
    """Return a number as XLA's float32 has it: infinite above the largest one, 0 below the smallest normal one."""
    limits = np.finfo(np.float32)
    value = float(value) if isinstance(value, np.generic) else value
    if abs(value) > float(limits.max):
        return math.inf if value > 0 else -math.inf
    return float(value) if value == 0 or not abs(value) < float(limits.tiny) else 0.0


def axis_names(what: str, value: Any, example: str) -> tuple[str, ...]:
    """Return the name of a mesh axis, or several, as a tuple; errors call it `what`."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{what}={shown(value)} is {type_name(value)}, expected the name of a mesh axis, a str, or a tuple of"
            f" names; pass e.g. {example}."
        )
    if "" in names:
        raise ValueError(f"{what}={shown(value)} has an empty name, expected names of mesh axes; pass e.g. {example}.")
    return tuple(names)


def value_of[Value](function: str, name: str, value: Any, kind: type[Value], known_as: str) -> Value | None:
    """Return a configuration value of one class, or None."""
    if value is not None:
        instance(function, name, value, kind, f"a {known_as}, or None")
    return value


def instance(function: str, name: str, value: Any, kind: Any, expected: str, *, remedy: str = "pass one") -> None:
    """Check the type of an argument."""
    if not isinstance(value, kind):
        raise TypeError(f"{function}: {name} is {type_name(value)}, expected {expected}; {remedy}.")


def integer(function: str, name: str, value: Any, *, least: int = 1, most: int = 2**31 - 1, remedy: str = "") -> int:
    """Return a static integer that lies in this range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{function}: {_typed(name, value)}, expected an int; {remedy or 'pass a static one'}.")
    if not least <= value <= most:
        limits = f"at least {least} and below {_ENDS[most]}" if most in _ENDS else f"a number from {least} to {most}"
        raise ValueError(f"{function}: {name}={shown(value)}, expected {limits}; {remedy or 'pass such a number'}.")
    return int(value)


def number(function: str, name: str, value: Any, *, remedy: str = "pass a float") -> float:
    """Return a static number as float32 has it, see `in_float32`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{function}: {_typed(name, value)}, expected a number; {remedy}.")
    return in_float32(value)


def finite(function: str, name: str, value: Any) -> float:
    """Return a static number as float32 has it, which must be finite there."""
    remedy = "pass a float such as 1.0"
    found = number(function, name, value, remedy=remedy)
    if not math.isfinite(found):
        raise ValueError(f"{function}: {name}={shown(value)}, expected a finite float32; {remedy}.")
    return found


def not_deleted(function: str, name: str, value: Any) -> None:
    """Check that an array still has its values, which `donate_argnums` takes away."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise ValueError(
            f"{function}: {name} is a deleted array, expected its values; pass an array before it is donated."
        )


def random_key(function: str, name: str, value: Any) -> jax.Array:
    """Return one key of `jax.random`, of either kind."""
    not_deleted(function, name, value)
    try:
        jax.eval_shape(jax.random.bits, value)
    except (OverflowError, TypeError, ValueError) as error:
        shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"{function}: {name} is {type_name(value)}{shape}, expected one key; pass jax.random.key(seed)."
        ) from error
    return value


def path(function: str, name: str, value: Any) -> Path:
    """Return a path of text."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{function}: {name} is {type_name(value)}, expected a str or a Path; pass one.")
    return Path(value)


def flag(function: str, name: str, value: Any) -> bool:
    """Return a static flag."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: {_typed(name, value)}, expected True or False; pass a static one.")
    return bool(value)


def choice(function: str, name: str, value: Any, choices: tuple[str, ...], *, remedy: str = "pass one of them") -> None:
    """Check that a value is one of these names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{function}: {name}={shown(value)}, expected one of {choices}; {remedy}.")


def _typed(name: str, value: object) -> str:
    """Return a name with its value, unless that is an array, and the type of the value."""
    return f"{name if hasattr(value, 'shape') else f'{name}={shown(value)}'} is {type_name(value)}"


@dataclasses.dataclass(frozen=True)
class Values:
    """The valid values of a setting: one of `choices`, or else a number in a range."""

    least: int = 0  # of a number
    most: int = 0  # of a number
    power_of_two: bool = False  # numbers are powers of two
    choices: tuple[bool | int | str, ...] = ()  # all values; empty for a number

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        if type(value) is not int or not self.least <= value <= self.most:
            return False
        return not self.power_of_two or value & (value - 1) == 0

    def __str__(self) -> str:
        if self.choices:
            return f"one of {self.choices}"
        return f"{'a power of two' if self.power_of_two else 'a number'} from {self.least} to {self.most}"

    def check(self, owner: str, name: str, value: Any, default: str) -> None:
        """Check a value for which `default` can be passed instead."""
        if value in self:
            return
        kind = type(self.choices[0]) if self.choices else int
        if kind is not str and type(value) is not kind:
            wanted = "True, False," if kind is bool else "an int,"
            raise TypeError(
                f"{owner}: {name}={shown(value)} is {type_name(value)}, expected {wanted} or {default}; pass one."
            )
        raise ValueError(f"{owner}: {name}={shown(value)}, expected {self}, or {default}; pass one.")


FLAG = Values(choices=(False, True))
