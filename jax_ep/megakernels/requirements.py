"""What the `triton` implementation refuses, without loading its compiler."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.core.dtypes import FP8
from jax_ep.core.mesh_axes import automatic_axes, platform
from jax_ep.heap import nvshmem, peer_access
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels import capability
from jax_ep.types import Layout, Options

_MOST_TOKENS_PER_BLOCK = 8
_MOST_RANKS = 63  # kernels keep a set of ranks in an int64
MOST_LOW_LATENCY_TOKENS = 1024
_MOST_LOW_LATENCY_TOP_K = 16


def is_fastest(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> bool:
    """Only where it is the first that can serve the request."""
    return False


def is_made_for(dtype: DTypeLike) -> bool:
    """All dtypes of the package: those that no kernel takes go through the portable functions."""
    return True


def refusal(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see ops/registry.py."""
    on = platform()
    if on not in ("gpu", "cpu"):
        return f"the platform is {on}, it needs NVIDIA GPUs"
    if on == "cpu" and context.transport() != "shared_memory":
        return "it runs on GPUs; on CPU devices only for tests, after init(transport='shared_memory')"
    if on == "cpu" and (automatic := automatic_axes()):
        return f"it runs on GPUs; on CPU devices only where every mesh axis is manual, but {automatic} are not"
    if on == "gpu" and (reason := _missing_on_gpu()) is not None:
        return reason
    if context.transport() == "xla":
        return "the context was initialized with transport='xla'"
    dtype = jnp.dtype(dtype)
    if operation == "masked":
        return _refusal_of_masked(dtype, *facts)
    if operation == "quantized_gemm":
        return _refusal_of_quantized(dtype)
    if operation == "grouped_gemm":
        return _refusal_of_products(dtype)
    if operation in ("activation", "moe_sort"):
        return None
    if operation == "fused_moe":
        return capability.missing_tma("its layer in one launch")
    if operation == "low_latency" and (reason := _refusal_of_low_latency(options, dtype, *facts)) is not None:
        return reason
    if on == "gpu" and (reason := context.unordered_launches_reason()) is not None:
        return reason
    return _refusal_of_exchange(options, operation, dtype, *facts)


def _refusal_of_exchange(
    options: Options,
    operation: str,
    dtype: jnp.dtype,
    hidden: int,
    layout: Layout,
    is_foreign: bool,
    columns: int | None = None,
) -> str | None:
    if layout.num_tokens == 0:
        return None  # needs no kernel
    most_tokens = MAX_BLOCKS * (options.schedule.tokens_per_block or _MOST_TOKENS_PER_BLOCK)
    if layout.num_tokens > most_tokens:
        return f"T={layout.num_tokens} exceeds {most_tokens} tokens per rank"
    if layout.num_ranks > _MOST_RANKS:
        return f"W={layout.num_ranks} exceeds {_MOST_RANKS} ranks"
    if layout.num_ranks > 1 and (reason := context.unreachable_reason(options.axis)) is not None:
        return reason
    if is_foreign:
        return "the handle was made by another implementation"
    if options.wire_dtype is not None and (reason := capability.missing_fp8("FP8 on the wire")) is not None:
        return reason
    modes = options.schedule.combine_mode, options.schedule.dispatch_mode
    fused = [mode for mode in modes if mode not in (None, "serial")]
    if columns is None or not fused:
        return None
    from jax_ep.megakernels.exchange_gemm import fuses

    if options.wire_dtype is None and fuses(layout, dtype, hidden, columns):
        return None
    return (
        f"mode={fused[0]!r} takes bfloat16 and float16 without FP8 on the wire, and matrices whose sizes are multiples"
        f" of 8, on GPUs with TMA ({capability.TMA_MODELS}); here tokens of {dtype}, wire_dtype={options.wire_dtype}"
        f" and matrices of [{hidden}, {columns}]"
    )


def _refusal_of_products(dtype: jnp.dtype) -> str | None:
    """float32 and float64 are a loop over products of XLA in every implementation."""
    if dtype not in (FP8, jnp.bfloat16, jnp.float16):
        return None
    return capability.missing_tma(f"its grouped GEMM in {'FP8' if dtype == FP8 else dtype}")


def _refusal_of_quantized(dtype: jnp.dtype) -> str | None:
    """Likewise for float32 and float64."""
    if dtype not in (FP8, jnp.bfloat16, jnp.float16):
        return None
    return capability.missing_tma("its products of quantised matrices")


def _refusal_of_low_latency(
    options: Options, dtype: jnp.dtype, hidden: int, layout: Layout, is_foreign: bool
) -> str | None:
    if layout.num_tokens > MOST_LOW_LATENCY_TOKENS:
        return (
            f"max_tokens_per_rank={layout.num_tokens} exceeds {MOST_LOW_LATENCY_TOKENS}, at which dispatch is the"
            " faster one"
        )
    if layout.top_k > _MOST_LOW_LATENCY_TOP_K:
        return f"K={layout.top_k} exceeds {_MOST_LOW_LATENCY_TOP_K} experts per token"
    if hidden * dtype.itemsize % 16:
        return f"rows of {hidden} {dtype} are no whole 16-byte words"
    return capability.missing_fp8("FP8") if FP8 in (dtype, options.wire_dtype) else None


def _refusal_of_masked(dtype: jnp.dtype, kind: str, width: int, quantize: bool = False) -> str | None:
    """`kind` is "grouped_gemm" of rows of so many elements, or "activation", whose result may be FP8."""
    if kind == "activation":
        if dtype == jnp.float64:
            return "it has no kernel of the activation for float64"
        return capability.missing_fp8("FP8") if quantize else None
    if dtype not in (FP8, jnp.bfloat16, jnp.float16):
        return f"it has no masked grouped GEMM for {dtype}"
    if width * dtype.itemsize % 16:
        return f"rows of {width} {dtype} are no whole 16-byte words"
    return capability.missing_tma("its masked grouped GEMM")


def _missing_on_gpu() -> str | None:
    if (reason := capability.missing()) is not None:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "not installed: triton (pip install '.[cuda13]')"
    if jax.process_count() == 1 or peer_access.unsupported_processes_reason() is None:
        return peer_access.unsupported_reason() or context.missing_init_reason()
    return nvshmem.unsupported_reason() or context.missing_init_reason()
