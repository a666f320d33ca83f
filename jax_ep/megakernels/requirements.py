"""What the `triton` implementation does not support, without loading its compiler."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from jax_ep import context
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.facts import (
    ActivationFacts,
    ExchangeFacts,
    Facts,
    Fp8OperandFacts,
    FusedFacts,
    FusedMoEFacts,
    GemmActivationFacts,
    GemmFacts,
    LowLatencyFacts,
    LowLatencyGemmFacts,
    MaskedActivationFacts,
    MaskedGemmFacts,
    Portable,
    QuantizedGemmFacts,
    SortFacts,
)
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import BOUND
from jax_ep.core.mesh_axes import automatic_axes, platform
from jax_ep.formats import format_of, needs_decoder
from jax_ep.heap import nvshmem, peer_access, transports
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels import compile, tuned
from jax_ep.types import Experts, Options

_MOST_TOKENS_PER_BLOCK = 8
_MOST_RANKS = 63  # kernels keep a set of ranks in an int64
MOST_LOW_LATENCY_TOKENS = 1024
_MOST_LOW_LATENCY_TOP_K = 16
_MOST_LOW_LATENCY_ROWS = 4096
"""Of a rank whose second GEMM sends its rows: each (token, k) has a row in the buffer of the rank that sends it."""
MAX_GROUPS = 1024
"""Of a grouped GEMM: more groups would take more registers than a program has."""
BLOCK_SIZES = (16, 32, 64, 128)
"""Elements of K that may share a scale in the kernels, unless all do."""
_MOST_SORTED_EXPERTS = 1 << 10
_HALF = (jnp.bfloat16, jnp.float16)
_EMPTY = Portable("there is nothing to compute: an operand is empty")


def unsupported_reason(facts: Facts, options: Options) -> str | None:
    """Why this implementation does not support these facts, or None; see ops/registry.py."""
    on = platform()
    if on not in ("gpu", "cpu"):
        return f"it needs NVIDIA GPUs, and the platform is {on}"
    if on == "cpu" and context.transport() != "shared_memory":
        return "it runs on GPUs; on CPU devices only for tests, after init(transport='shared_memory')"
    if on == "cpu" and (automatic := automatic_axes()):
        return f"it runs on GPUs; on CPU devices only where every mesh axis is manual, but {automatic} are not"
    if on == "gpu" and (reason := _missing_on_gpu(facts)) is not None:
        return reason
    if context.transport() == "xla":
        return "the context was initialized with transport='xla'"
    return _reason(facts, options)


@functools.singledispatch
def _reason(facts: Facts, options: Options) -> str | None:
    return f"it has no {facts.operation}"


@_reason.register
def _of_exchange(facts: ExchangeFacts, options: Options) -> str | None:
    if platform() == "gpu" and (reason := transports.unordered_launches_reason()) is not None:
        return reason
    layout, fp8 = facts.layout, options.wire_dtype is not None
    if layout.num_tokens == 0:
        return Portable("there are no tokens")
    most_tokens = MAX_BLOCKS * (options.schedule.tokens_per_block or _MOST_TOKENS_PER_BLOCK)
    if layout.num_tokens > most_tokens:
        return f"T={layout.num_tokens} exceeds {most_tokens} tokens per rank"
    if layout.num_ranks > _MOST_RANKS:
        return f"W={layout.num_ranks} exceeds {_MOST_RANKS} ranks"
    if layout.num_ranks > 1 and (reason := context.unreachable_reason(options.axis)) is not None:
        return reason
    if facts.is_foreign:
        return "the handle was made by another implementation"
    if fp8 and (reason := missing_fp8("FP8 on the wire")) is not None:
        return reason
    if facts.columns is not None and (reason := _reason_against_fused_modes(facts, facts.columns, options)) is not None:
        return reason
    if facts.is_combine and layout.num_ranks == 1 and not fp8:
        return Portable("on one device, XLA adds rows faster than the kernel (docs/design/exchange.md)")
    return None


def _reason_against_fused_modes(facts: ExchangeFacts, columns: int, options: Options) -> str | None:
    """Why the fused modes that the schedule asks for do not exist, or None."""
    modes = options.schedule.combine_mode, options.schedule.dispatch_mode
    fused = [mode for mode in modes if mode not in (None, "serial")]
    if not fused or _reason(FusedFacts(facts.dtype, facts.hidden, columns, facts.layout), options) is None:
        return None
    return (
        f"mode={fused[0]!r} takes bfloat16 and float16 without FP8 on the wire, and matrices whose sizes are multiples"
        f" of 8, on GPUs with TMA ({TMA_MODELS}); here tokens of {facts.dtype},"
        f" wire_dtype={options.wire_dtype} and matrices between {facts.hidden} and {columns} columns"
    )


@_reason.register
def _of_fused(facts: FusedFacts, options: Options) -> str | None:
    """Tensor cores take 16-bit tokens, descriptors whole rows of 16 bytes, and tiles the shared memory of a Hopper."""
    layout = facts.layout
    if options.wire_dtype is not None:
        return "with FP8 on the wire, the all-to-all and the GEMM are separate kernels"
    if facts.dtype not in _HALF:
        return f"its fused kernels support bfloat16 and float16, not {facts.dtype}"
    if facts.hidden % 8 or facts.columns % 8 or min(facts.hidden, facts.columns, layout.num_tokens) == 0:
        return (
            f"its fused kernels need weight sizes that are multiples of 8, these are [{facts.hidden}, {facts.columns}]"
        )
    if layout.num_local_experts > MAX_GROUPS:
        return f"{layout.num_local_experts} local experts exceed {MAX_GROUPS}"
    return missing_tma("one kernel for the all-to-all and the GEMM")


@_reason.register
def _of_gemm(facts: GemmFacts, options: Options) -> str | None:
    """Tensor cores lack full precision for float32 and float64, which cuBLAS has."""
    if not facts.in_fp8 and facts.dtype not in _HALF:
        return Portable(f"tensor cores lack the precision of {facts.dtype}")
    name = "FP8" if facts.in_fp8 else facts.dtype
    if (reason := missing_tma(f"its grouped GEMM in {name}")) is not None:
        return reason
    if facts.out_dtype == jnp.float64 if facts.in_fp8 else facts.out_dtype not in (facts.dtype, jnp.float32):
        return Portable(f"it has no grouped GEMM of {name} to {facts.out_dtype}")
    if facts.is_empty:
        return _EMPTY
    if facts.groups > MAX_GROUPS or facts.num_rows > BOUND:
        return Portable(f"{facts.groups} groups of {facts.num_rows} rows exceed {MAX_GROUPS} groups or {BOUND} rows")
    return None


@_reason.register
def _of_gemm_activation(facts: GemmActivationFacts, options: Options) -> str | None:
    experts, gemm = facts.experts, facts.gemm
    if not activates(experts):
        return "its GEMM activates rows of gated experts alone, whose gates come first and whose weights scale results"
    if not tuned.setting("grouped_gemm", "gluon", in_gluon(gemm), **dataclasses.asdict(gemm)):
        return "no kernel in Gluon runs this GEMM"
    return _reason(gemm, options)


def activates(experts: Experts) -> bool:
    """Return whether a GEMM can store activated rows of these experts."""
    of_halves = experts.gated and not experts.interleaved
    return of_halves and not callable(experts.activation) and experts.weight_on == "output"


@_reason.register
def _of_activation(facts: ActivationFacts, options: Options) -> str | None:
    if callable(facts.experts.activation):
        return Portable("the activation is a function of the caller")
    if facts.dtype not in _HALF:
        return Portable(f"its activation kernel supports bfloat16 and float16, not {facts.dtype}")
    if 0 in (facts.num_rows, facts.columns, facts.groups):
        return _EMPTY
    if facts.columns % (16 if facts.experts.gated else 8):
        return Portable(f"rows of {facts.columns} columns are not whole 16-byte words")
    return None


@_reason.register
def _of_fp8_operand(facts: Fp8OperandFacts, options: Options) -> str | None:
    if facts.dtype == jnp.float64:
        return Portable("it does not round float64 to FP8")
    if 0 in facts.sizes:
        return _EMPTY
    return None if facts.whole_blocks else Portable(f"an axis that shares scales is not a multiple of {GROUP_SIZE}")


@_reason.register
def _of_sort(facts: SortFacts, options: Options) -> str | None:
    if facts.num_slots == 0:
        return _EMPTY
    if facts.num_experts > _MOST_SORTED_EXPERTS:
        return Portable(f"{facts.num_experts} experts exceed {_MOST_SORTED_EXPERTS}")
    return None


@_reason.register
def _of_fused_moe(facts: FusedMoEFacts, options: Options) -> str | None:
    return missing_tma("its layer in one kernel")


@_reason.register
def _of_quantized_gemm(facts: QuantizedGemmFacts, options: Options) -> str | None:
    if facts.dtype in (FP8, *_HALF) and (reason := missing_tma("its GEMM of quantized weights")):
        return reason
    if facts.dtype not in (FP8, jnp.int8, *_HALF):
        return Portable(f"it has no GEMM of {facts.dtype} rows and quantized weights")
    if facts.out_dtype == jnp.float64:
        return Portable("it has no GEMM of quantized weights to float64")
    if 0 in facts.shape:
        return _EMPTY
    if facts.shape[-2] > BOUND or facts.shape[-1] * facts.dtype.itemsize % 16 or not is_readable(facts.rhs):
        return Portable(f"its kernels do not read rows {facts.shape} and weights {facts.rhs.shape} of this format")
    return None


@_reason.register
def _of_low_latency(facts: LowLatencyFacts, options: Options) -> str | None:
    layout = facts.layout
    if layout.num_tokens > MOST_LOW_LATENCY_TOKENS:
        return (
            f"max_tokens_per_rank={layout.num_tokens} exceeds {MOST_LOW_LATENCY_TOKENS}, at which dispatch is the"
            " faster one"
        )
    if layout.top_k > _MOST_LOW_LATENCY_TOP_K:
        return f"K={layout.top_k} exceeds {_MOST_LOW_LATENCY_TOP_K} experts per token"
    if facts.hidden * facts.dtype.itemsize % 16:
        return f"rows of {facts.hidden} {facts.dtype} are not whole 16-byte words"
    if FP8 in (facts.dtype, options.wire_dtype) and (reason := missing_fp8("FP8")) is not None:
        return reason
    return _of_exchange(ExchangeFacts(facts.dtype, facts.hidden, layout, facts.is_foreign), options)


@_reason.register
def _of_low_latency_gemm(facts: LowLatencyGemmFacts, options: Options) -> str | None:
    if needs_decoder(facts.rhs):
        gemm: Facts = QuantizedGemmFacts(facts.dtype, facts.shape, facts.rhs, facts.out_dtype)
    else:
        gemm = MaskedGemmFacts(facts.dtype, facts.shape[2])
    if (reason := _reason(gemm, options)) is not None:
        return reason
    if facts.out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or facts.shape[2] == 0:
        return f"its fused GEMM does not send {facts.out_dtype} rows computed from {facts.shape[2]} columns"
    if facts.rhs.shape[2] * facts.out_dtype.itemsize % 16:
        return f"rows of {facts.rhs.shape[2]} {facts.out_dtype} are not whole 16-byte words"
    if facts.layout.num_tokens * facts.layout.top_k > _MOST_LOW_LATENCY_ROWS:
        return f"{facts.layout.num_tokens * facts.layout.top_k} rows of a rank exceed {_MOST_LOW_LATENCY_ROWS}"
    return missing_tma("one kernel for GEMM and combine")


@_reason.register
def _of_masked_gemm(facts: MaskedGemmFacts, options: Options) -> str | None:
    if facts.dtype not in (FP8, *_HALF):
        return f"it has no masked grouped GEMM for {facts.dtype}"
    if facts.depth * facts.dtype.itemsize % 16:
        return f"rows of {facts.depth} {facts.dtype} are not whole 16-byte words"
    return missing_tma("its masked grouped GEMM")


@_reason.register
def _of_masked_activation(facts: MaskedActivationFacts, options: Options) -> str | None:
    if facts.dtype == jnp.float64:
        return "it has no activation kernel for float64"
    return missing_fp8("FP8") if facts.quantize else None


def is_readable(rhs: QuantizedWeights) -> bool:
    """Whether kernels take such matrices."""
    return (
        0 not in rhs.shape
        and rhs.shape[0] <= MAX_GROUPS
        and rhs.values.shape[-1] * rhs.values.dtype.itemsize % 16 == 0
        and format_of(rhs).block_size(rhs) in (0, *BLOCK_SIZES)
    )


def _missing_on_gpu(facts: Facts) -> str | None:
    if (reason := missing_capability()) is not None:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "not installed: triton (pip install '.[cuda13]')"
    if not isinstance(facts, ExchangeFacts | FusedFacts | LowLatencyFacts | LowLatencyGemmFacts):
        return None  # others compute on one GPU
    if jax.process_count() == 1 or peer_access.unsupported_processes_reason() is None:
        return peer_access.unsupported_reason() or context.missing_init_reason()
    return nvshmem.unsupported_reason() or context.missing_init_reason()


GLUON_CAPABILITY = 90
_FEW_ROWS, _NARROW = 64, 128  # rows per group, and columns, up to which tiles of Gluon's size would be partly empty
_INT32 = 1 << 31  # offsets of biases


def runs_gluon() -> bool:
    """Return whether these GPUs, and the launcher, run kernels in Gluon; jax-triton describes operands only."""
    on_gpu = jax.default_backend() == "gpu" and context.launcher() != "jax-triton"
    return on_gpu and compile.device_capability() == GLUON_CAPABILITY


def in_gluon(facts: GemmFacts) -> bool:
    """Return whether a kernel in Gluon runs this grouped GEMM by default, or a weight gradient of its columns."""
    if facts.dtype not in _HALF or facts.out_dtype.itemsize > 4 or facts.is_empty:
        return False
    has_size = facts.num_rows > _FEW_ROWS * facts.groups and _NARROW < facts.columns < _INT32 // facts.groups
    return has_size and runs_gluon()


_LEAST, _FP8, _TMA, _WITHOUT_TMA = 8.0, 8.9, 9.0, 12.0
"""Compute capabilities from which Triton supports GPUs, and these convert to FP8, have TMA, and are small again."""
TMA_MODELS = "9.0 to 11.x"


def missing_capability() -> str | None:
    """Return why no kernel can run on these GPUs, or None."""
    capability = _capability()
    try:
        number = float(capability)
    except ValueError:  # ROCm writes the name of an architecture
        return f"it needs NVIDIA GPUs, these are {jax.local_devices()[0].device_kind} ({capability}); `xla` runs there"
    return None if number >= _LEAST else _missing("it", f"{_LEAST} or more")


def missing_fp8(what: str) -> str | None:
    """Return why `what` cannot convert to FP8 here, or None."""
    return None if _is_cpu() or float(_capability()) >= _FP8 else _missing(what, f"{_FP8} or more")


def missing_tma(what: str) -> str | None:
    """Return why `what` cannot copy by TMA here, or None."""
    return None if has_tma() else _missing(what, TMA_MODELS)


def has_tma() -> bool:
    """Whether the devices copy blocks by descriptor and have the memory for wide tiles; the interpreter does.

    That is Hopper and the Blackwell of data centers: the Blackwell of workstations has TMA, but 99 KB instead of 227.
    """
    return _is_cpu() or _TMA <= float(_capability()) < _WITHOUT_TMA


def _is_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


def _capability() -> str:
    return str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))


def _missing(what: str, needed: str) -> str:
    return f"{what} needs GPUs of compute capability {needed}, these have {_capability()}; `xla` runs the call"
