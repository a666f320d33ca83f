"""What several implementations provide: one protocol per operation, which the module of that name satisfies.

`jax_ep/xla` documents the functions; other implementations give the same results. Implementations take the
checked `Options` of the call; autodiff and argument checks are in `jax_ep/ops`.
"""

from __future__ import annotations

from typing import Protocol

from jax.typing import DTypeLike

from jax_ep.core.activations import HiddenRows
from jax_ep.core.balance import PassPlan
from jax_ep.core.expert_matrices import GemmWeights, QuantizedWeights
from jax_ep.core.layout import Bias, SortSizes
from jax_ep.types import (
    Array,
    Experts,
    Handle,
    Layout,
    LowLatencyHandle,
    Options,
    Quantized,
    SortedTokens,
    Tokens,
)


class Exchange(Protocol):
    """Dispatch and combine."""

    def plan(self, options: Options, topk_idx: Array, layout: Layout, /) -> Handle: ...

    def dispatch_rows(self, options: Options, x: Array, handle: Handle, /) -> Array: ...

    def dispatch_tokens(
        self, options: Options, x: Array, weights: Array | None, handle: Handle, /
    ) -> tuple[Array, Array | None]: ...

    def dispatch_quantized(
        self, options: Options, x: Array, weights: Array | None, handle: Handle, /
    ) -> tuple[Quantized, Array | None]: ...

    def combine_tokens(
        self, options: Options, y: Array, row_weights: Array | None, handle: Handle, /
    ) -> tuple[Array, Array | None]: ...


class BalancePlan(Protocol):
    """Plans of balanced passes."""

    def plan_pass(self, counts: Array, rows: int, spare: int, /) -> PassPlan: ...

    def place_assignments(
        self, topk_idx: Array, counts: Array, plan: PassPlan, rank: Array | int, /
    ) -> tuple[Array, Array]: ...


class ExpertCopies(Protocol):
    """Copies of experts on other ranks, for balanced layers."""

    def fetch_copies(
        self, axis: tuple[str, ...], copies: Array, w: Array, order: Array, /, *, zeroed: bool
    ) -> tuple[Array, Array]: ...

    def add_gradients(
        self, axis: tuple[str, ...], copies: Array, home: Array, spare: Array, order: Array, /
    ) -> tuple[Array, Array]: ...


class GroupedGemm(Protocol):
    """Grouped GEMM and the gradient of its weights."""

    def grouped_gemm(
        self,
        lhs: Array,
        rhs: GemmWeights,
        group_sizes: Array,
        *,
        transpose: bool,
        out_dtype: DTypeLike,
        bias: Bias | None = None,
    ) -> Array: ...

    def weight_gradient(
        self, lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
    ) -> GemmWeights: ...


class Fp8GroupedGemm(GroupedGemm, Protocol):
    """Grouped GEMM of an implementation that supports operands in FP8."""

    def grouped_gemm_fp8(
        self, lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike
    ) -> Array: ...

    def weight_gradient_fp8(
        self, lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
    ) -> GemmWeights: ...


class Activation(Protocol):
    """Activation between the GEMMs of the layer, its gradient, and FP8 quantization of operands."""

    def activate(self, experts: Experts, rows: HiddenRows, /) -> Array: ...

    def activate_gradient(
        self, experts: Experts, rows: HiddenRows, d_rows: Array, /, *, keep: bool
    ) -> tuple[Array, Array, Array | None]: ...

    def activate_quantized(self, experts: Experts, rows: HiddenRows, /) -> Quantized: ...

    def activate_columns(self, experts: Experts, rows: HiddenRows, /) -> Quantized: ...

    def quantize_rows(self, x: Array, group_sizes: Array, /) -> Quantized: ...

    def dequantize_rows(self, values: Array, scales: Array, group_sizes: Array, /, *, dtype: DTypeLike) -> Array: ...

    def quantize_columns(self, x: Tokens, group_sizes: Array, /) -> Quantized: ...

    def quantize_both_ways(self, x: Array, group_sizes: Array, /) -> tuple[Quantized, Quantized]: ...

    def quantize_matrices(
        self, w: GemmWeights, group_sizes: Array | None = None, /, *, transpose: bool = True
    ) -> Quantized: ...

    def quantize_masters(self, w: Array, /) -> tuple[Array, Array, Array]: ...


class QuantizedGemm(Protocol):
    """GEMM of rows and quantized weights, in groups one after another or in masked blocks."""

    def grouped_gemm(
        self, rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike
    ) -> Array: ...

    def masked_grouped_gemm(
        self, rows: Tokens, rhs: QuantizedWeights, sizes: Array, /, *, out_dtype: DTypeLike, expected_rows: int | None
    ) -> Array: ...


class MoESort(Protocol):
    """The sort of one device's assignments by expert."""

    def moe_sort(
        self, topk_idx: Array, topk_weights: Array | None, num_tokens: Array | None, sizes: SortSizes, /
    ) -> SortedTokens: ...


class LowLatency(Protocol):
    """Dispatch and combine of decode-sized batches."""

    def low_latency_dispatch(
        self,
        options: Options,
        x: Tokens,
        topk_idx: Array,
        num_tokens: Array | None,
        layout: Layout,
        group_size: int | None,
    ) -> tuple[Array, Array | None, Array, LowLatencyHandle]: ...

    def low_latency_combine(
        self, options: Options, y: Array, topk_weights: Array, handle: LowLatencyHandle
    ) -> Array: ...


class Masked(Protocol):
    """Masked grouped GEMM and the activation of masked blocks."""

    def masked_grouped_gemm(
        self, rows: Tokens, rhs: QuantizedWeights, sizes: Array, /, *, out_dtype: DTypeLike, expected_rows: int | None
    ) -> Array: ...

    def masked_gated_activation(
        self, experts: Experts, hidden: Array, group_sizes: Array, bias: Array | None, /, *, quantize: bool
    ) -> tuple[Array, Array | None]: ...
