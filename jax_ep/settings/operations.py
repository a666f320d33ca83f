"""Tunable operations: the settings of each one with their values, and the facts by which they are looked up.

A setting changes the times of a launch, and in results only the order of some roundings. Settings are fields of
`Schedule`, with the same names and values, or of the operation's tiles (`jax_ep/megakernels`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ep.core.layout import power_of_two
from jax_ep.types import SCHEDULE_VALUES, Schedule
from jax_ep.values import FLAG, Values, shown

Setting = bool | int | str
Fact = int | str


@dataclasses.dataclass(frozen=True)
class Operation:
    """Facts and settings of one operation."""

    facts: tuple[str, ...]  # names of the facts by which settings are looked up, besides the kind of device
    settings: Mapping[str, Values]  # names and values


def _of_schedule(*names: str) -> dict[str, Values]:
    return {name: SCHEDULE_VALUES[name] for name in names}


_BLOCK = Values(16, 256, power_of_two=True)
_COLUMNS = Values(32, 256, power_of_two=True)  # a quarter, the least part that TMA stores, has whole 16-byte words
_LAUNCH = _of_schedule("num_warps") | {"num_stages": Values(1, 8), "programs": Values(1, 8)}
_STORED = _LAUNCH | {
    "group_m": Values(1, 64),
    "tma_store": FLAG,
    "store_parts": Values(choices=(1, 2, 4)),
    "gluon": FLAG,
}

_EXCHANGE = ("num_ranks", "num_tokens", "hidden", "top_k", "dtype")
_EXCHANGE_GEMM = ("num_ranks", "num_tokens", "top_k", "num_experts", "depth", "columns", "dtype")
_PRODUCT = ("num_rows", "depth", "columns", "groups", "dtype", "out_dtype")
_MASKED = ("num_rows", "expected_rows", "depth", "columns", "groups", "dtype", "out_dtype")
_MASKED_TILES = {
    "block_m": Values(16, 128, power_of_two=True),
    "block_n": Values(16, 128, power_of_two=True),
    **_LAUNCH,
}
_QUANTIZED = ("rows_of_group", "depth", "columns", "groups", "dtype", "format")
_LAYER = ("num_slots", "num_experts", "hidden", "intermediate", "format")
_GLUON_LAUNCH = {"num_stages": Values(2, 8), "programs": Values(1, 8)}
_FP8_TILES = _MASKED_TILES | {"group_m": Values(1, 64), "gluon": FLAG}

OPERATIONS: Mapping[str, Operation] = {
    "dispatch": Operation(
        (*_EXCHANGE, "wire_dtype"),
        _of_schedule("num_communicating_programs", "num_warps", "tokens_per_block"),
    ),
    "combine": Operation(
        _EXCHANGE, _of_schedule("num_combining_programs", "num_warps", "tokens_per_block", "rows_in_flight")
    ),
    "dispatch_grouped_gemm": Operation(_EXCHANGE_GEMM, _of_schedule("dispatch_mode", "num_communicating_programs")),
    "grouped_gemm_combine": Operation(_EXCHANGE_GEMM, _of_schedule("combine_mode")),
    "low_latency_dispatch": Operation((*_EXCHANGE, "wire_dtype"), _of_schedule("num_communicating_programs")),
    "low_latency_combine": Operation(_EXCHANGE, _of_schedule("num_combining_programs")),
    "low_latency_gemm_combine": Operation(_MASKED, _MASKED_TILES),
    "grouped_gemm": Operation(_PRODUCT, {"block_m": _BLOCK, "block_n": _COLUMNS, "block_k": _BLOCK, **_STORED}),
    "grouped_gemm_fp8": Operation(_PRODUCT, _FP8_TILES),
    "weight_gradient": Operation(_PRODUCT, {"block_m": _BLOCK, "block_n": _COLUMNS, "block_r": _BLOCK, **_STORED}),
    "weight_gradient_fp8": Operation(_PRODUCT, _FP8_TILES),
    "masked_grouped_gemm": Operation(_MASKED, _MASKED_TILES),
    "quantized_gemm": Operation(
        _QUANTIZED,
        {
            "block_m": Values(16, 128, power_of_two=True),
            "block_n": _BLOCK,
            **_LAUNCH,
            "gluon": FLAG,
            "dequantize": FLAG,
        },
    ),
    "quantized_gemm_gluon": Operation(_QUANTIZED, {"block_m": Values(8, 128, power_of_two=True), **_GLUON_LAUNCH}),
    "fused_moe": Operation(
        _LAYER,
        {
            "single_launch": FLAG,
            "block_m": Values(16, 128, power_of_two=True),
            "hidden_columns": _BLOCK,
            "columns": _BLOCK,
            "splits": Values(1, 64, power_of_two=True),
            "depth": Values(32, 256, power_of_two=True),
            "gluon": FLAG,
            **_LAUNCH,
        },
    ),
    "fused_moe_gluon": Operation(
        _LAYER,
        {
            "block_m": Values(8, 64, power_of_two=True),
            "splits": Values(1, 64, power_of_two=True),
            "consumers": Values(1, 2),
            **_GLUON_LAUNCH,
        },
    ),
}
_CHOICES = {"keep_tokens", "wire_dtype", "reproducible"}
SCHEDULE_FIELDS = frozenset(field.name for field in dataclasses.fields(Schedule)) - _CHOICES
"""Fields that measured times decide; the other fields also change memory or results."""
MOST_BLOCKS = 1 << 15
"""Number of flags of a peer in the symmetric heap, the maximum number of blocks (`heap.symmetric.MAX_BLOCKS`)."""
NAMES = frozenset({"dtype", "out_dtype", "wire_dtype", "format"})
"""Facts that are names; the others are sizes."""
# Sizes within a factor of two share settings, except these, which have few values and change a launch as a whole.
_EXACT = frozenset({"num_ranks", "top_k", "num_experts", "groups"})


def bucket(name: str, value: Any) -> Fact:
    """Return the value that stands for all facts with the same settings: the next power of two, or a dtype's name."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if name in _EXACT or value == 0 else power_of_two(value)
    return str(value)


def key(operation: str, facts: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return the key of an operation's settings.

    Raises:
      ValueError: these are not the facts of the operation.
    """
    wanted = OPERATIONS[operation].facts
    if set(facts) != set(wanted):
        raise ValueError(f"{operation}: facts {sorted(facts)}, expected {sorted(wanted)}.")
    return (operation, *(bucket(name, facts[name]) for name in wanted))


def check(operation: Any, settings: Mapping[str, Any]) -> None:
    """Check the name of an operation, and the names and values of its settings.

    Raises:
      ValueError: an unknown name or value.
    """
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ValueError(f"operation {shown(operation)}, expected one of {', '.join(OPERATIONS)}")
    known = OPERATIONS[operation].settings
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{operation} has no setting {shown(name)}, expected some of {', '.join(known)}")
        if value not in known[name]:
            raise ValueError(f"{operation}: {name}={shown(value)}, expected {known[name]}")


def check_blocks(operation: str, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Check that there is a flag for each block of tokens.

    Raises:
      ValueError: there are too few flags.
    """
    block, tokens = settings.get("tokens_per_block"), facts.get("num_tokens", 0)
    if block is not None and tokens > MOST_BLOCKS * block:
        raise ValueError(
            f"{operation}: tokens_per_block={block} for {tokens} tokens, expected at least {-(-tokens // MOST_BLOCKS)},"
            f" because there are {MOST_BLOCKS} flags"
        )
