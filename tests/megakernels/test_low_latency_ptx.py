"""The low-latency kernels compile to PTX without a GPU, for few and many tokens: 16-byte accesses, no spills."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest
from compiling import compiled

from jax_ep.core.kernel import Config
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import low_latency
from jax_ep.megakernels.kernels.exchange_structs import Peers, Rows
from jax_ep.megakernels.kernels.low_latency_structs import LowLatencyCombine, LowLatencyDispatch, LowLatencyPlan
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

W, E, K, H = 4, 256, 8, 7168
BF16, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
PROGRAMS = 264  # Of an H200.
CASES = [(90, 1, False), (90, 1, True), (90, 128, False), (90, 128, True), (100, 128, True), (80, 128, False)]


def built(name, num_tokens, fp8, capability):
    layout = Layout(W, E, num_tokens, K, E * num_tokens)
    wire, scales = (FP8, H // 128) if fp8 else (BF16, 0)
    sizes = low_latency.layout_sizes(layout, num_tokens, H)
    types: dict[str, Any] = {"peers": Peers("*i32", "*i64")}
    parts = {"values_offset": num_tokens * H * wire.itemsize, "scales_offset": num_tokens * K * scales * 4}
    # The tuning for a CPU has fewer programs, and so another task order.
    lag = min(num_tokens, PROGRAMS // 4)
    if name == "dispatch":
        _, tile = low_latency.dispatch_tile(Schedule(), layout, num_tokens, H, BF16, wire, scales)
        types |= {"x": Rows("*bf16", "*bf16"), "topk_idx_ptr": "*i32", "num_tokens_ptr": "*i32"}
        types |= {"out": Rows("*fp8e4nv" if fp8 else "*bf16", "*fp32"), "plan": LowLatencyPlan(*["*i32"] * 7)}
        offsets, _ = low_latency.buffer_offsets(ids_offset=num_tokens * K * 4, **parts)
        sizes |= {"num_scales": scales, "scale_block": 128 if fp8 else 0, "has_num_tokens": True}
        given: Any = LowLatencyDispatch(**sizes, **offsets, tile=dataclasses.replace(tile, lag=lag))
    else:
        _, tile = low_latency.combine_tile(Schedule(), layout, num_tokens, H, BF16)
        types |= {"y_ptr": "*bf16", "out_ptr": "*bf16", "weights_ptr": "*fp32"}
        types |= {"assignment_to_row_ptr": "*i32", "own_topk_idx_ptr": "*i32"}
        parts["values_offset"] *= K
        offsets, _ = low_latency.buffer_offsets(weights_offset=num_tokens * K * 4, **parts)
        given = LowLatencyCombine(**sizes, **offsets, fp8=fp8, tile=dataclasses.replace(tile, lag=lag))
    config = Config(1, max_registers=128 if num_tokens > 1 else None)
    constants = {"S": given, "HEAP": heap_of(HeapLayout(W), W, 6)}
    kernel = low_latency._DISPATCH if name == "dispatch" else low_latency._COMBINE
    programs = 2 if num_tokens > 1 else 1  # per multiprocessor
    return compiled(kernel, types, constants, config, capability, programs=programs)


@pytest.mark.parametrize(("capability", "num_tokens", "fp8"), CASES)
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.slow(unless={"num_tokens": [128], "fp8": [True]})
def test_low_latency_ptx_kernels(name, capability, num_tokens, fp8):
    ptx = built(name, num_tokens, fp8, capability)["ptx"]
    assert "ld.global.v4.b32" in ptx, "rows are not loaded 16 bytes at a time"
    assert re.search(r"(fence\.release|fence\.acq_rel|release)\.sys", ptx)
