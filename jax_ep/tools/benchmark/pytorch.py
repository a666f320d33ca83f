"""PyTorch's grouped GEMMs (CUTLASS), and the expert layer that a PyTorch user builds from them, on JAX's arrays."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_ep.tools.benchmark.harness import Timing

BF16, FP8 = "PyTorch _grouped_mm", "PyTorch _scaled_grouped_mm, FP8, a scale per row"
_FP8_MAX = 448.0
_CALLS, _WARMUP = 10, 3


def is_here() -> bool:
    """Return whether PyTorch is installed, which none of the extras installs."""
    return jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None


@dataclasses.dataclass(frozen=True)
class OnStream:
    """A tensor that PyTorch's stream computes; a leaf that `jax.block_until_ready` waits for."""

    tensor: Any

    def block_until_ready(self) -> OnStream:
        """Wait for the tensor."""
        import torch

        torch.cuda.synchronize()
        return self

    def array(self) -> Array:
        """Return the tensor as a JAX array."""
        return jnp.from_dlpack(self.block_until_ready().tensor)


def gemms(operands: Mapping[str, tuple[Array, Array, Array]]) -> dict[str, Callable[[str], OnStream]]:
    """Return GEMMs by name, functions of a key of `operands`, the same rows and weights with different group sizes.

    Weights are stored with the contraction last, which is faster, and FP8 operands are quantized before.
    """
    import torch

    lhs, rhs, _ = next(iter(operands.values()))
    rows = torch.from_dlpack(lhs)
    weights = torch.from_dlpack(jnp.swapaxes(rhs, 1, 2).copy())
    row_scales, scales = (x.float().abs().amax(-1) / _FP8_MAX for x in (rows, weights))
    fp8_rows = (rows.float() / row_scales[..., None]).to(torch.float8_e4m3fn)
    fp8_weights = torch.stack(
        [(w.float() / s[..., None]).to(torch.float8_e4m3fn) for w, s in zip(weights, scales, strict=True)]
    )
    ends = {key: torch.from_dlpack(jnp.cumsum(sizes, dtype=jnp.int32)) for key, (_, _, sizes) in operands.items()}

    def in_bf16(key: str) -> OnStream:
        return OnStream(torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends[key]))

    def in_fp8(key: str) -> OnStream:
        quantized = fp8_rows, fp8_weights.transpose(-2, -1), row_scales, scales
        keywords = {"offs": ends[key], "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return OnStream(torch._scaled_grouped_mm(*quantized, **keywords))

    return {BF16: in_bf16, FP8: in_fp8}


def layer(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any) -> Any:
    """Compute the layer of tensors."""
    import torch

    tokens, top_k = ids.shape
    num_experts, _, hidden = w_down.shape
    experts = ids.reshape(-1).long()
    order = torch.argsort(experts, stable=True)
    sizes = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    ends = sizes.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0).int()
    rows = torch._grouped_mm(x[order // top_k], w_gate_up, offs=ends)
    gate, up = rows.chunk(2, dim=-1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down, offs=ends)
    scaled = rows.float() * weights.reshape(-1)[order, None]
    return torch.zeros(tokens, hidden, device=x.device).index_add_(0, order // top_k, scaled).to(x.dtype)


def measure_layer(operands: tuple[Any, ...], rounds: int) -> Timing:
    """Measure one call of the layer in a CUDA graph, which excludes the host's time.

    Args:
      operands: tokens, ids, router weights and expert weights of `jax_ep.fused_moe`.
      rounds: number of samples.

    Raises:
      RuntimeError: from PyTorch, such as for sizes that its GEMMs do not support.
    """
    import torch

    tensors = [torch.from_dlpack(a) for a in operands]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP):
            layer(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            layer(*tensors)
    samples = []
    for i in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i:  # the first replay uploads the graph
            samples.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return Timing(tuple(samples))
