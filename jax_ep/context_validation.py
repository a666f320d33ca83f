"""Argument checks of `init`."""

from __future__ import annotations

from typing import Any

import numpy as np

_MOST_TIMEOUT_S = 1e6  # nanoseconds in an int64


def heap_bytes(value: Any) -> None:
    """A number of bytes, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"init: heap_bytes is a {type(value).__name__}, expected an int; pass a number of bytes.")
    if value < 1:
        raise ValueError(f"init: heap_bytes={value}, expected at least 1; leave it out for what programs need.")


def timeout_s(value: Any, *, default: float) -> None:
    """A finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"init: timeout_s is a {type(value).__name__}, expected a number; pass seconds.")
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(
            f"init: timeout_s={value}, expected seconds between 0 and {_MOST_TIMEOUT_S:g}; the default is {default:g}."
        )
