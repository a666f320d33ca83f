"""Expert parallelism for Mixture-of-Experts layers in JAX.

Per-shard functions for use inside `jax.shard_map`; see `dispatch` for the shapes and the quick start. Wrappers for
globally sharded arrays are in `jax_ep.sharding`, the Flax NNX layer in `jax_ep.flax`.
"""

import os
import sys

if os.path.basename("".join(sys.argv[:1])) == "jax-ep" or (sys.argv[:1] == ["-m"] and "jax_ep" in sys.orig_argv):
    # This is the command. Its imports, which take a second, must not end in a traceback: neither by Ctrl-C, nor where
    # JAX does not accept an environment variable. So this comes before all imports of modules that are not loaded yet.
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # shells start background jobs without it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = lambda _, error, __: print(f"jax-ep: {' '.join(str(error).split())}", file=sys.stderr)

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jax_ep import lora as lora
from jax_ep import placement as placement
from jax_ep import quantization as quantization
from jax_ep import serving as serving
from jax_ep import sharding as sharding
from jax_ep import tuning as tuning
from jax_ep.context import finalize, init
from jax_ep.core.balance import Balance
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.router import Router
from jax_ep.ops.exchange import combine, dispatch, row_experts
from jax_ep.ops.exchange_gemm import dispatch_grouped_gemm, grouped_gemm_combine
from jax_ep.ops.explain import explain
from jax_ep.ops.fused_moe import fused_moe
from jax_ep.ops.grouped_gemm import grouped_gemm
from jax_ep.ops.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.ops.masked import masked_grouped_gemm
from jax_ep.ops.memory import plan_memory
from jax_ep.ops.moe import moe
from jax_ep.ops.moe_low_latency import low_latency_moe
from jax_ep.ops.moe_sort import moe_sort
from jax_ep.ops.triton_call import triton_call
from jax_ep.quantization import dequantize, quantize
from jax_ep.routing import load_balancing_loss, router_z_loss, topk_router, update_router_bias
from jax_ep.types import Experts, Schedule, Topology

if TYPE_CHECKING:
    from jax_ep import checkpoints as checkpoints
    from jax_ep import flax as flax
    from jax_ep import integrations as integrations
    from jax_ep import tracing as tracing

__version__ = "0.1.0"

__all__ = [
    "Balance",
    "Experts",
    "QuantizedWeights",
    "Router",
    "Schedule",
    "Topology",
    "combine",
    "dequantize",
    "dispatch",
    "dispatch_grouped_gemm",
    "explain",
    "finalize",
    "fused_moe",
    "grouped_gemm",
    "grouped_gemm_combine",
    "init",
    "load_balancing_loss",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_moe",
    "masked_grouped_gemm",
    "moe",
    "moe_sort",
    "plan_memory",
    "quantize",
    "router_z_loss",
    "row_experts",
    "topk_router",
    "triton_call",
    "update_router_bias",
]


# Loaded when they are asked for: they need other packages, or take long.
_ON_DEMAND = ("checkpoints", "flax", "integrations", "tracing")
_MODULES = ("lora", "placement", "quantization", "routing", "serving", "sharding", "tuning", "types", *_ON_DEMAND)

if not TYPE_CHECKING:  # A type checker takes these modules from the imports below, and reports other names.

    def __getattr__(name: str) -> ModuleType:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:  # `hasattr` and `help` expect this type; the message has the remedy.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
