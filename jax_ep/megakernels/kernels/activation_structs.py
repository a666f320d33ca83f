"""Structs of activation.py, rows.py and fp8_columns.py, the passes over rows in use; see exchange_structs.py."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class RowPass:
    """Static sizes of a pass over the rows in use of `[num_rows, width]`."""

    num_rows: int  # all rows, in use or not
    width: int  # columns of the result
    num_groups: int
    padded_groups: int  # power of two >= num_groups
    block_rows: int
    block_columns: int


@dataclasses.dataclass(frozen=True)
class ColumnPass:
    """Static sizes of a pass that transposes `[M, width]` to `[width, num_places]` in blocks of 128 rows of a group."""

    M: int  # all rows, in use or not, the contraction size of a weight gradient
    width: int  # columns of the input
    num_groups: int
    padded_groups: int  # power of two >= num_groups
    block_rows: int  # 128
    block_columns: int
    num_places: int  # columns of the result: each group's rows padded to 128


@dataclasses.dataclass(frozen=True)
class Activation:
    """What experts compute between their two GEMMs, as in `jax_ep.Experts`."""

    name: str  # of the activation
    gated: bool  # half of the columns are gates
    interleaved: bool  # gates are the even columns instead of the first half
    alpha: float  # factor inside of "silu"
    clamp: float | None  # limit of gates and of up values; None: no limit
    up_offset: float  # added to up values
    weights_on_input: bool  # router weights scale hidden rows instead of results


class RowBias(NamedTuple):
    """Biases of hidden rows."""

    values_ptr: Any  # [num_groups, N]
    group_ptr: Any  # [num_rows] group of each row
