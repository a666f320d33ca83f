"""The expert layer of PyTorch's own grouped products, on the arrays of JAX: what a user of PyTorch runs on one GPU.

Its calls are captured as a CUDA graph, so that no time of the host is in it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

from jax_ep.tools.benchmark.harness import Timing

_CALLS, _WARMUP = 10, 3


def is_here() -> bool:
    """Whether PyTorch is installed; it comes with none of the extras."""
    return jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None


def layer(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any) -> Any:
    """The layer, of tensors."""
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


def measure(operands: tuple[Any, ...], rounds: int) -> Timing:
    """Times of one call, of tokens, ids, router weights and both matrices as `jax_ep.fused_moe` takes them.

    Raises:
      RuntimeError: of PyTorch, such as for sizes that its products do not take.
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
