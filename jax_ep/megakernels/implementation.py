"""The `triton` implementation: its functions (see `backends.Implementation`), and what it refuses."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from jax_ep import context
from jax_ep.core.dtypes import FP8
from jax_ep.heap import nvshmem, peer_access
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels import capability, gemm, gemm_fp8, low_latency, masked, tuning
from jax_ep.megakernels.activation import activate, activate_gradient
from jax_ep.megakernels.exchange import (
    return_tokens,
    return_weights,
    send_quantized,
    send_rows,
    send_tokens,
    send_weights,
)
from jax_ep.megakernels.fp8_operands import activate_quantized, dequantize_rows, quantize_matrices, quantize_rows
from jax_ep.megakernels.fused import dispatch_gemm, fuses, gemm_combine, token_products
from jax_ep.megakernels.fused_gradients import fuses_products, gemm_combine_products
from jax_ep.megakernels.gemm import grouped_gemm, grouped_gemm_weights
from jax_ep.megakernels.gemm_fp8 import grouped_gemm_fp8
from jax_ep.megakernels.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.megakernels.low_latency_gemm import fuses_low_latency, low_latency_gemm_combine
from jax_ep.megakernels.masked import masked_gated_activation, masked_grouped_gemm
from jax_ep.megakernels.plan import plan

__all__ = [
    "activate",
    "activate_gradient",
    "activate_quantized",
    "dequantize_rows",
    "dispatch_gemm",
    "fuses",
    "fuses_low_latency",
    "fuses_products",
    "gemm_combine",
    "gemm_combine_products",
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_gemm_weights",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_gemm_combine",
    "masked_gated_activation",
    "masked_grouped_gemm",
    "plan",
    "quantize_matrices",
    "quantize_rows",
    "refusal",
    "return_tokens",
    "return_weights",
    "send_quantized",
    "send_rows",
    "send_tokens",
    "send_weights",
    "token_products",
]

_MOST_RANKS = 63  # kernels keep a set of ranks in an int64


def refusal(request: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see `backends.Request`."""
    if request.platform not in ("gpu", "cpu"):
        return f"the platform is {request.platform}, it needs NVIDIA GPUs"
    if request.platform == "cpu" and context.transport() != "shared_memory":
        return "it runs on GPUs; on CPU devices only for tests, after init(transport='shared_memory')"
    if request.platform == "gpu" and (reason := _missing_on_gpu()) is not None:
        return reason
    if context.transport() == "xla":
        return "the context was initialised with transport='xla'"
    if request.operation in ("masked_gemm", "masked_activation"):
        return masked.refusal(request)
    if request.operation not in ("exchange", "gemm", "gemm_weights", "activation", "low_latency"):
        return f"it has no {request.operation} kernels"
    if request.operation == "activation":
        return None
    if request.operation in ("gemm", "gemm_weights"):
        return gemm_fp8.refusal(request) if request.dtype == FP8 else gemm.refusal(request)
    if request.operation == "low_latency" and (reason := low_latency.refusal(request)) is not None:
        return reason
    if request.platform == "gpu" and (reason := context.concurrent_launches()) is not None:
        return reason
    if request.layout.num_tokens == 0:
        return None  # backends.choose takes what needs no kernel
    if request.layout.num_tokens > MAX_BLOCKS * tuning.BLOCK_T:
        return f"T={request.layout.num_tokens} exceeds {MAX_BLOCKS * tuning.BLOCK_T} tokens per rank"
    if request.layout.num_ranks > _MOST_RANKS:
        return f"W={request.layout.num_ranks} exceeds {_MOST_RANKS} ranks"
    if request.foreign_handle:
        return "the handle was made by another implementation"
    if request.wire_dtype is not None and (reason := capability.missing_fp8("FP8 on the wire")) is not None:
        return reason
    fused = request.mode if request.mode not in (None, "serial") else request.dispatch_mode
    if fused not in (None, "serial") and not _fuses(request):
        return (
            f"mode={fused!r} takes bfloat16 and float16 without FP8 on the wire, and matrices whose sizes are"
            f" multiples of 8, on GPUs with TMA ({capability.TMA_MODELS}); here tokens of {request.dtype},"
            f" wire_dtype={request.wire_dtype} and matrices of [{request.hidden}, {request.columns}]"
        )
    return None


def _fuses(request: Any) -> bool:
    """Whether the exchange and the product of a request may go through one launch."""
    known = request.wire_dtype is None and request.columns is not None
    return known and fuses(request.layout, request.dtype, request.hidden, request.columns)


def _missing_on_gpu() -> str | None:
    if (reason := capability.missing()) is not None:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "not installed: triton (pip install 'jax-ep[cuda13]')"
    if jax.process_count() == 1:
        return peer_access.missing()
    return nvshmem.missing() or context.missing_init()
