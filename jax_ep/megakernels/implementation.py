"""The `triton` implementation: its functions (see `backends.Implementation`), and what it refuses."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from jax_ep import context, nvshmem
from jax_ep.heap import MAX_BLOCKS
from jax_ep.megakernels import low_latency, peer_access, tuning
from jax_ep.megakernels.exchange import deliver, return_tokens, return_weights, send_rows, send_tokens, send_weights
from jax_ep.megakernels.fused import dispatch_gemm, fuses, gemm_combine, token_products
from jax_ep.megakernels.gemm import grouped_gemm, grouped_gemm_weights
from jax_ep.megakernels.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.megakernels.plan import plan

__all__ = [
    "deliver",
    "dispatch_gemm",
    "fuses",
    "gemm_combine",
    "grouped_gemm",
    "grouped_gemm_weights",
    "low_latency_combine",
    "low_latency_dispatch",
    "plan",
    "refusal",
    "return_tokens",
    "return_weights",
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
    if request.operation not in ("exchange", "gemm", "low_latency"):
        return f"it has no {request.operation} kernels"
    if request.operation == "gemm":
        return None
    if request.operation == "low_latency" and (reason := low_latency.refusal(request)) is not None:
        return reason
    if request.layout.num_tokens == 0:
        return "T=0: there is nothing to exchange"
    if request.layout.num_tokens > MAX_BLOCKS * tuning.BLOCK_T:
        return f"T={request.layout.num_tokens} exceeds {MAX_BLOCKS * tuning.BLOCK_T} tokens per rank"
    if request.layout.num_ranks > _MOST_RANKS:
        return f"W={request.layout.num_ranks} exceeds {_MOST_RANKS} ranks"
    if request.foreign_handle:
        return "the handle was made by another implementation"
    return None


def _missing_on_gpu() -> str | None:
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (pip install 'jax-ep[cuda13]')"
    if jax.process_count() == 1:
        return peer_access.missing()
    return nvshmem.missing() or context.missing_init()
