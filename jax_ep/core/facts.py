"""The static facts on which the choice of an implementation depends, one type per kind of work, and the choice.

`ops/registry.py` passes the facts to the `requirements` of each implementation and returns a `Part`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.types import Array, Experts, Layout

type Weights = Array | QuantizedWeights


class Portable(str):
    """A reason to run the portable functions of `xla`, even where the caller named this implementation alone."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a call and the implementation that runs it."""

    operation: str  # the module of the implementation that has the functions
    implementation: str  # its name
    reason: str = ""  # why no implementation or mode that is preferred runs it; empty where the preferred one does


@dataclasses.dataclass(frozen=True)
class FusedModes:
    """Modes of all-to-alls with GEMMs by `[hidden, columns]` weights and their transposes, see `Schedule`."""

    dispatch: str  # of dispatch + GEMM that saves no tokens
    dispatch_saving_rows: str  # of one that saves them as "rows"
    dispatch_saving_tokens: str  # of one that saves them as "tokens"
    combine: str  # of GEMM + combine

    def dispatch_mode(self, save_as: str | None) -> str:
        """Return the mode of dispatch + GEMM that saves tokens as "rows" or "tokens", or not (None)."""
        saving = {"rows": self.dispatch_saving_rows, "tokens": self.dispatch_saving_tokens}
        return self.dispatch if save_as is None else saving[save_as]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Base of all facts: the dtype of the rows, and the operation whose module has the functions."""

    operation: ClassVar[str]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class ExchangeFacts(Facts):
    """Dispatch of tokens `[T, hidden]`, or combine of rows of as many columns."""

    operation = "exchange"
    hidden: int  # columns of what travels
    layout: Layout  # static sizes
    is_foreign: bool = False  # the handle was made by an implementation that does not write to its peers' memory
    columns: int | None = None  # of the weights that the dispatched rows are multiplied by, if they are
    is_combine: bool = False  # combine, not dispatch

    def with_columns(self, columns: int) -> ExchangeFacts:
        """Return the facts of a dispatch or combine next to a GEMM with this many columns."""
        return dataclasses.replace(self, columns=columns)


@dataclasses.dataclass(frozen=True)
class FusedFacts(Facts):
    """An all-to-all of tokens `[T, hidden]` in one kernel with GEMMs by `[hidden, columns]` weights."""

    operation = "exchange_gemm"
    hidden: int
    columns: int
    layout: Layout


@dataclasses.dataclass(frozen=True)
class GemmFacts(Facts):
    """Grouped GEMM of rows `[num_rows, depth]` and weights `[groups, depth, columns]`, or the gradient of weights.

    `dtype` is that of the operands; rows in FP8 have scales. One implementation computes the GEMM and the gradient,
    except in FP8, where the gradient has its own facts.
    """

    operation = "grouped_gemm"
    num_rows: int
    depth: int
    columns: int
    groups: int
    out_dtype: np.dtype

    @property
    def is_empty(self) -> bool:
        """Whether an operand has no element."""
        return 0 in (self.num_rows, self.depth, self.columns, self.groups)

    @property
    def in_fp8(self) -> bool:
        """Whether operands are in FP8, with scales."""
        return self.dtype == FP8


@dataclasses.dataclass(frozen=True)
class GemmActivationFacts(Facts):
    """Grouped GEMM that stores activated rows of these experts."""

    operation = "gemm_activation"
    experts: Experts
    gemm: GemmFacts


@dataclasses.dataclass(frozen=True)
class ActivationFacts(Facts):
    """The weighted activation of hidden rows `[num_rows, columns]`, or its gradient."""

    operation = "activation"
    experts: Experts
    num_rows: int
    columns: int
    groups: int


@dataclasses.dataclass(frozen=True)
class Fp8OperandFacts(Facts):
    """Passes that round arrays of these sizes to FP8, or back."""

    operation = "activation"
    sizes: tuple[int, ...]  # of the arrays; 0 among them: an array is empty
    whole_blocks: bool = True  # the scaled axes are multiples of 128


@dataclasses.dataclass(frozen=True)
class QuantizedGemmFacts(Facts):
    """GEMM of rows of `dtype`, as they are multiplied, and quantized weights."""

    operation = "quantized_gemm"
    shape: tuple[int, ...]
    rhs: QuantizedWeights
    out_dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class FusedMoEFacts(Facts):
    """The whole expert layer of one device, of `num_slots` assignments to the experts of all ranks."""

    operation = "fused_moe"
    experts: Experts
    num_slots: int
    w_gate_up: Weights
    w_down: Weights
    num_ranks: int = 1

    @property
    def own_slots(self) -> int:
        """Assignments to the experts of this device, if those of all ranks are chosen alike."""
        return -(-self.num_slots // self.num_ranks)


@dataclasses.dataclass(frozen=True)
class SortFacts(Facts):
    """The sort of `num_slots` assignments by expert."""

    operation = "moe_sort"
    num_slots: int
    num_experts: int


@dataclasses.dataclass(frozen=True)
class LowLatencyFacts(Facts):
    """Low-latency dispatch or combine of rows of `hidden` columns; `is_foreign` as for `ExchangeFacts`."""

    operation = "low_latency"
    hidden: int
    layout: Layout
    is_foreign: bool = False


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmFacts(Facts):
    """The second GEMM of experts, which sends its rows: `shape` is `[L, M, I]` of rows of `dtype`."""

    operation = "low_latency"
    shape: tuple[int, ...]
    rhs: QuantizedWeights
    out_dtype: np.dtype
    layout: Layout


@dataclasses.dataclass(frozen=True)
class MaskedGemmFacts(Facts):
    """Masked grouped GEMM of blocks of rows of `depth` columns."""

    operation = "masked"
    depth: int


@dataclasses.dataclass(frozen=True)
class MaskedActivationFacts(Facts):
    """Activation of masked blocks, whose result is in FP8 with `quantize`."""

    operation = "masked"
    quantize: bool
