"""Which implementations exist, and which of them runs one part of a call.

An implementation is a package, an operation a module of it: `xla/grouped_gemm.py` and `pallas/grouped_gemm.py` have the
same functions. Autodiff and argument checks are in this folder. The function `unsupported_reason(facts, options)` in
`requirements.py` of each package says what it does not support, without loading a compiler.

`plan.py` asks for each part of a public call once; nothing else chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Protocol, cast

from jax_ep.core import check, operations
from jax_ep.core.check import called
from jax_ep.core.facts import (
    Facts,
    FusedMoEFacts,
    GemmActivationFacts,
    GemmFacts,
    LowLatencyFacts,
    Part,
    Portable,
    QuantizedGemmFacts,
)
from jax_ep.core.mesh_axes import axis_tuple, platform
from jax_ep.types import AxisName, Options, Schedule, Topology
from jax_ep.values import shown, type_name

_log = logging.getLogger("jax_ep")

_PACKAGES = {"triton": "jax_ep.megakernels", "pallas": "jax_ep.pallas", "xla": "jax_ep.xla"}

# In order of preference: the first one that accepts a request is the default.
_IMPLEMENTATIONS = {
    "exchange": ("triton", "xla"),
    "balance_plan": ("triton", "xla"),
    "expert_copies": ("triton", "xla"),
    "exchange_gemm": ("triton",),  # others run the all-to-all and the GEMM one after the other
    "gemm_activation": ("triton",),  # others activate in a separate pass
    "grouped_gemm": ("triton", "pallas", "xla"),
    "fused_moe": ("triton",),  # others run the layer one operation after another
    "quantized_gemm": ("triton", "xla"),
    "activation": ("triton", "xla"),
    "moe_sort": ("triton", "xla"),
    "low_latency": ("triton", "xla"),
    "masked": ("triton", "xla"),
}


class Requirements(Protocol):
    """Protocol of the `requirements` module of an implementation."""

    def unsupported_reason(self, facts: Facts, options: Options) -> str | None:
        """Return why the implementation does not support these facts, or None."""


def options(
    function: str,
    axis_name: AxisName = (),
    implementation: str | Sequence[str] | None = None,
    schedule: Schedule | None = None,
    *,
    has_wire: bool = True,
) -> Options:
    """Check the keywords that all operations share.

    Raises:
      ValueError: a name that is not registered.
      TypeError: names, an axis or a schedule of another type.
      NotImplementedError: a `Topology`, which operations that support it handle themselves.
    """
    if isinstance(axis_name, Topology):
        raise NotImplementedError(
            f"{function}: axis_name={axis_name!r}: only dispatch, combine, moe, low_latency_moe, sharded_moe and"
            f" flax.MoE support a Topology; call one of them, or pass the tuple {axis_name.axes} for one all-to-all"
            " among all ranks."
        )
    schedule = checked_schedule(function, schedule)
    if schedule.wire_dtype is not None and not has_wire:
        raise ValueError(
            f"{function}: wire_dtype={schedule.wire_dtype} of the schedule, expected None; pass quantize=True to"
            " low_latency_dispatch, or weights in FP8 to low_latency_moe."
        )
    names = None if implementation is None else _names(function, implementation)
    return Options(called(function), axis_tuple(axis_name), names, schedule.wire_dtype, schedule)


def checked_schedule(function: str, schedule: object, axis_name: AxisName = ()) -> Schedule:
    """Return the schedule, or the default for None.

    Raises:
      NotImplementedError: the schedule does not support a `Topology`.
    """
    checked = check.value_of(function, "schedule", schedule, Schedule, "jax_ep.Schedule") or Schedule()
    if checked.reproducible and isinstance(axis_name, Topology):
        raise NotImplementedError(
            f"{function}: reproducible=True with a Topology is not supported, since nodes round their sums; pass the"
            f" tuple {axis_name.axes} in its place."
        )
    return checked


def _names(function: str, implementation: object) -> tuple[str, ...]:
    names: object = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or isinstance(names, memoryview):
        raise TypeError(
            f"{function}: implementation={shown(implementation)} is {type_name(implementation)}, expected a name, a"
            f" sequence of names, or None; choose from {available()}, or leave it None for the best one."
        )
    unknown = [name for name in names if not isinstance(name, str) or name not in _PACKAGES]
    if unknown or not names:
        raise ValueError(
            f"{function}: implementation={shown(implementation)} names {shown(unknown) if unknown else 'nothing'},"
            f" expected one or more of {available()}; pass one, or leave it None for the best one."
        )
    return tuple(names)


def available(operation: str | None = None) -> tuple[str, ...]:
    """Names of the implementations, most preferred first; with `operation`, of those that have it."""
    return tuple(_PACKAGES) if operation is None else _IMPLEMENTATIONS[operation]


@dataclasses.dataclass(frozen=True)
class Operation[Functions]:
    """The modules of this name, with `Functions`, of all implementations."""

    name: str

    def by(self, implementation: str) -> Functions:
        """Return the module of one implementation."""
        return cast(Functions, importlib.import_module(f"{_PACKAGES[implementation]}.{self.name}"))


EXCHANGE = Operation[operations.Exchange]("exchange")
BALANCE_PLAN = Operation[operations.BalancePlan]("balance_plan")
EXPERT_COPIES = Operation[operations.ExpertCopies]("expert_copies")
GROUPED_GEMM = Operation[operations.GroupedGemm]("grouped_gemm")
FP8_GEMM = Operation[operations.Fp8GroupedGemm]("grouped_gemm")
QUANTIZED_GEMM = Operation[operations.QuantizedGemm]("quantized_gemm")
ACTIVATION = Operation[operations.Activation]("activation")
MOE_SORT = Operation[operations.MoESort]("moe_sort")
LOW_LATENCY = Operation[operations.LowLatency]("low_latency")
MASKED = Operation[operations.Masked]("masked")


def requirements(name: str) -> Requirements:
    """Return the module that states what implementation `name` does not support."""
    return cast(Requirements, importlib.import_module(f"{_PACKAGES[name]}.requirements"))


@functools.cache
def _warn_once(name: str, reason: str, on: str) -> None:
    """On a GPU a fallback deserves a warning; on the CPU the portable implementation is the expected one."""
    if on == "gpu":
        _log.warning("implementation %s is not used: %s", name, reason)


def unsupported_reason(name: str, facts: Facts, options: Options) -> str | None:
    """Why implementation `name` does not support this part, or None."""
    return _reason_of_bits(name, facts, options) or requirements(name).unsupported_reason(facts, options)


def _reason_of_bits(name: str, facts: Facts, options: Options) -> str | None:
    """Why the bits of a row may depend on the other rows where they must not, or None."""
    if not options.schedule.reproducible:
        return None
    if isinstance(facts, QuantizedGemmFacts) or (isinstance(facts, GemmFacts) and facts.in_fp8):
        return "reproducible=True needs GEMMs in the dtype of the tokens; pass weights in it, and leave recipe None"
    if isinstance(facts, LowLatencyFacts | FusedMoEFacts | GemmActivationFacts):
        reason = "reproducible=True, and its bits depend on the number of tokens or on a gradient"
        return f"{reason}; `moe` with weights that are not for serving runs without it"
    if name == "pallas" and isinstance(facts, GemmFacts):
        return "reproducible=True, and its tiles depend on the number of rows; `triton` supports that"
    if name == "xla" and isinstance(facts, GemmFacts) and not facts.is_empty and platform() == "gpu":
        return "reproducible=True, and XLA chooses the algorithm of a matmul by time; pass 16-bit tokens to `triton`"
    return None


def is_specialized(name: str, facts: GemmFacts) -> bool:
    """Whether implementation `name` runs this GEMM by a kernel with a warp that only copies: `pallas`, or in Gluon."""
    from jax_ep.megakernels.requirements import in_gluon

    return name == "pallas" or (name == "triton" and in_gluon(facts))


def choose(options: Options, facts: Facts) -> Part:
    """Choose the first of the requested implementations (None: of all) that supports these facts.

    A `Portable` reason ends the search: `xla` runs the part, or nothing does where its bits are not reproducible.

    Raises:
      NotImplementedError: none supports them; the message gives every reason.
    """
    names: Sequence[str] = options.implementation or _IMPLEMENTATIONS[facts.operation]
    reasons: list[str] = []
    for name in names:
        reason = unsupported_reason(name, facts, options)
        if reason is None:
            return Part(facts.operation, name, reason="; ".join(reasons))
        reasons.append(f"{name}: {reason}")
        if isinstance(reason, Portable):
            refused = _reason_of_bits("xla", facts, options)
            if refused is None:
                return Part(facts.operation, "xla", reason="; ".join(reasons))
            reasons.append(f"xla: {refused}")
            break
        if name in _IMPLEMENTATIONS[facts.operation]:
            _warn_once(name, reason, platform())
    raise NotImplementedError(
        f"{options.function}: no implementation of {tuple(names)} supports this call: {'; '.join(reasons)}. Leave"
        " implementation=None, or name one that can."
    )
