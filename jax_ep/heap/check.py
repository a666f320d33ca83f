"""Argument checks of `init`."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from jax_ep.types import type_name

_MOST_TIMEOUT_S = 1e6  # Nanoseconds must fit in an int64.
_MOST_BYTES = 1 << 47


def heap_bytes(value: Any) -> None:
    """Check that `heap_bytes` is a number of bytes or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"init: heap_bytes is {type_name(value)}, expected an int; pass a number of bytes.")
    if value < 1:
        raise ValueError(f"init: heap_bytes={value}, expected at least 1; leave it out to allocate what programs need.")
    if value > _MOST_BYTES:
        raise ValueError(
            f"init: heap_bytes={value}, expected at most {_MOST_BYTES}, the address space; pass the bytes that one"
            " device can spare, or leave it out."
        )


def timeout_s(value: Any, *, default: float) -> None:
    """Check that `timeout_s` is a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"init: timeout_s is {type_name(value)}, expected a number; pass seconds.")
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(
            f"init: timeout_s={value}, expected more than 0 and at most {_MOST_TIMEOUT_S:g} seconds; the default is"
            f" {default:g}."
        )


def unordered_launches_reason() -> str | None:
    """Return why this process cannot launch communication kernels, or None if it can.

    By default XLA runs the launches of a device in schedule order, also in CUDA graphs. In CONCURRENT mode it orders
    only
    launches that depend on each other. Two launches on one heap would then share its task queue and counters, and
    devices
    would run them in different orders.
    """
    modes = re.findall(r"--xla_gpu_command_buffer_scheduling_mode=(\S*)", os.environ.get("XLA_FLAGS", ""))
    if not modes or modes[-1].upper() != "CONCURRENT":
        return None
    return (
        "XLA_FLAGS has --xla_gpu_command_buffer_scheduling_mode=CONCURRENT, which lets launches of one device run at"
        " the same time and in any order; remove the flag"
    )
