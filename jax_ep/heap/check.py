"""Argument checks of `init`."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from jax_ep.types import type_name

_MOST_TIMEOUT_S = 1e6  # nanoseconds in an int64
_MOST_BYTES = 1 << 47


def heap_bytes(value: Any) -> None:
    """A number of bytes, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"init: heap_bytes is {type_name(value)}, expected an int; pass a number of bytes.")
    if value < 1:
        raise ValueError(f"init: heap_bytes={value}, expected at least 1; leave it out for what programs need.")
    if value > _MOST_BYTES:
        raise ValueError(
            f"init: heap_bytes={value}, expected at most {_MOST_BYTES}, all that can be addressed; pass the bytes that"
            " one device can spare, or leave it out."
        )


def timeout_s(value: Any, *, default: float) -> None:
    """A finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"init: timeout_s is {type_name(value)}, expected a number; pass seconds.")
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(
            f"init: timeout_s={value}, expected seconds between 0 and {_MOST_TIMEOUT_S:g}; the default is {default:g}."
        )


def concurrent_launches() -> str | None:
    """Why kernels that meet their peers cannot be launched in this process, or None.

    XLA's default runs the launches of a device in the order of its schedule, in CUDA graphs too. In the mode CONCURRENT
    it keeps those apart only that depend on each other. Two on one heap would then share its queue of tasks and its
    counts, and devices would take them in different orders.
    """
    modes = re.findall(r"--xla_gpu_command_buffer_scheduling_mode=(\S*)", os.environ.get("XLA_FLAGS", ""))
    if not modes or modes[-1].upper() != "CONCURRENT":
        return None
    return (
        "XLA_FLAGS has --xla_gpu_command_buffer_scheduling_mode=CONCURRENT, which lets launches of one device run at"
        " the same time and in any order; leave the flag out"
    )
