"""Which implementation serves an operation: one table of names, and what each package says of itself.

An implementation is a package, an operation a module of it: `xla/grouped_gemm.py` and `pallas/grouped_gemm.py` have the
same functions. They know nothing of autodiff and argument checks, which are in this folder, and take the `Options` of
the call. `requirements.py` of each package says what it refuses and why, without loading a compiler:

    refusal(options, operation, dtype, *facts) -> str | None
    is_fastest(options, operation, dtype, *facts) -> bool

The facts of an operation are static, and what its callers here pass to `choose`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from jax_ep.core.mesh_axes import axis_tuple, platform
from jax_ep.core.named_scopes import called
from jax_ep.types import AxisName, Options, Schedule, Topology, type_name

_log = logging.getLogger("jax_ep")

_PACKAGES = {"triton": "jax_ep.megakernels", "pallas": "jax_ep.pallas", "xla": "jax_ep.xla"}

# In order of preference, behind those that are the fastest: the first one that accepts a request is the default.
_IMPLEMENTATIONS = {
    "exchange": ("triton", "xla", "pallas"),
    "exchange_gemm": ("triton",),  # others run the exchange and the product one after the other
    "gemm_activation": ("pallas",),  # others activate in a pass of its own
    "grouped_gemm": ("triton", "pallas", "xla"),
    "fused_moe": ("triton",),  # others run the layer one operation after another
    "quantized_gemm": ("triton", "xla"),
    "activation": ("triton", "xla", "pallas"),
    "moe_sort": ("triton", "xla"),
    "low_latency": ("triton", "xla"),
    "masked": ("triton", "xla"),
}


def options(
    function: str,
    axis_name: AxisName = (),
    implementation: str | Sequence[str] | None = None,
    wire_dtype: DTypeLike | None = None,
    schedule: Schedule | None = None,
) -> Options:
    """The keywords that all operations share, checked.

    Raises:
      ValueError: a name that is not registered.
      TypeError: names, an axis or a schedule of another type.
      NotImplementedError: a `Topology`, which layers and exchanges that know it have taken apart before.
    """
    if isinstance(axis_name, Topology):
        raise NotImplementedError(
            f"{function}: axis_name={axis_name!r}: only dispatch, combine, moe, low_latency_moe, sharded_moe and"
            f" flax.MoE know slow axes; call one of them, or pass the tuple {axis_name.axes} for one exchange among all"
            " ranks."
        )
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(
            f"{function}: schedule is {type_name(schedule)}, expected a jax_ep.Schedule, or None; pass one."
        )
    names = None if implementation is None else _names(function, implementation)
    return Options(called(function), axis_tuple(axis_name), names, wire_dtype, schedule or Schedule())


def _names(function: str, implementation: Any) -> tuple[str, ...]:
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence):
        raise TypeError(
            f"{function}: implementation={implementation!r} is {type_name(implementation)}, expected a name, a"
            f" sequence of names, or None; choose from {available()}."
        )
    unknown = [name for name in names if not isinstance(name, str) or name not in _PACKAGES]
    if unknown or not names:
        raise ValueError(
            f"{function}: implementation={implementation!r} names {unknown or 'nothing'}; choose from {available()}, or"
            " leave it None for the best one."
        )
    return tuple(names)


def available(operation: str | None = None) -> tuple[str, ...]:
    """Names of the implementations, most preferred first; with `operation`, of those that have it."""
    return tuple(_PACKAGES) if operation is None else _IMPLEMENTATIONS[operation]


def get(operation: str, name: str) -> Any:
    """The module with the functions of `operation` in implementation `name`."""
    return importlib.import_module(f"{_PACKAGES[name]}.{operation}")


def requirements(name: str) -> Any:
    """The module in which implementation `name` says what it refuses."""
    return importlib.import_module(f"{_PACKAGES[name]}.requirements")


@functools.cache
def _say_once(name: str, reason: str, on: str) -> None:
    """On a GPU, falling back is worth a word; on the CPU the portable implementation is the expected one."""
    if on == "gpu":
        _log.warning("implementation %s is not used: %s", name, reason)


def choose(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> str:
    """The first of the implementations asked for (None: of all) that can serve `operation` on arrays of `dtype`.

    Raises:
      NotImplementedError: none can serve it; the message gives every reason.
    """
    request = (options, operation, dtype, *facts)
    known = _IMPLEMENTATIONS[operation]
    names: Sequence[str] = options.implementation or sorted(
        known, key=lambda name: not requirements(name).is_fastest(*request)
    )
    refusals = {}
    for name in names:
        if name not in known:
            refusals[name] = f"it has no {operation}"
            continue
        reason = requirements(name).refusal(*request)
        if reason is None:
            return name
        refusals[name] = reason
        if requirements(name).is_made_for(dtype):  # nobody waits for what it was not made for
            _say_once(name, reason, platform())
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(
        f"{options.function}: no implementation of {tuple(names)} can serve this call: {reasons}. Leave"
        " implementation=None, or name one that can."
    )


def first_choice(options: Options, operation: str, dtype: DTypeLike) -> str | None:
    """The first of the implementations asked for (None: of those with `operation`), if it can serve that; else None."""
    known = _IMPLEMENTATIONS[operation]
    name = (options.implementation or known)[0]
    refused = name not in known or requirements(name).refusal(options, operation, dtype) is not None
    return None if refused else name
