"""Which settings a launch has: what the caller says, else an override, else what was measured here, else the default.

All that is asked here is static, and asked at trace time. Ranks that launch together must get the same answers: a
launch of other sizes than its peers' ends in an error (`launch.launch_identity`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.settings.file import Rates, settings_of
from jax_ep.settings.operations import SCHEDULE_FIELDS, Setting, check_blocks
from jax_ep.types import Layout, Schedule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def schedule(given: Schedule, operation: str, **facts: object) -> Schedule:
    """`given`, with its None fields filled in where there are settings of the operation.

    Raises:
      ValueError: an override with too few tokens per block for these sizes.
    """
    found = {name: value for name, value in _settings(operation, facts).items() if name in SCHEDULE_FIELDS}
    missing: dict[str, Any] = {name: value for name, value in found.items() if getattr(given, name) is None}
    check_blocks(operation, missing, facts)
    return dataclasses.replace(given, **missing) if missing else given


def tiles[Tiles: DataclassInstance](default: Tiles, operation: str, **facts: object) -> Tiles:
    """Return `default` with the tuned settings of the operation in place of its fields."""
    fields = {field.name for field in dataclasses.fields(default)}
    found = {name: value for name, value in _settings(operation, facts).items() if name in fields}
    return dataclasses.replace(default, **found) if found else default


def setting[Value](operation: str, name: str, default: Value, **facts: object) -> Value:
    """Return one tuned setting of the operation, or the default."""
    return cast(Value, _settings(operation, facts).get(name, default))


def rates() -> Rates | None:
    """Measured rates of this machine, or None."""
    return context.tuning().rates


def exchange_facts(layout: Layout, hidden: int, dtype: DTypeLike) -> dict[str, object]:
    """Return the facts by which settings of dispatch and combine are looked up, for rows `[., hidden]`."""
    sizes = {"num_ranks": layout.num_ranks, "num_tokens": layout.num_tokens, "top_k": layout.top_k}
    return {**sizes, "hidden": hidden, "dtype": dtype}


def exchange_gemm_facts(layout: Layout, depth: int, columns: int, dtype: DTypeLike) -> dict[str, object]:
    """Return those of an all-to-all with a GEMM, `[., depth]` times `[depth, columns]`."""
    sizes = {"num_ranks": layout.num_ranks, "num_tokens": layout.num_tokens, "top_k": layout.top_k}
    return {**sizes, "num_experts": layout.num_experts, "depth": depth, "columns": columns, "dtype": dtype}


def _settings(operation: str, facts: Mapping[str, object]) -> dict[str, Setting]:
    overridden = {name: value for of, name, value in context.overrides() if of == operation}
    return {**settings_of(context.tuning(), operation, facts), **overridden}
