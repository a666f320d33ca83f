"""Kernels over rows, and the sort, compile to PTX without a GPU: 16-byte accesses, no spilled registers."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compiled

from jax_ep import Experts
from jax_ep.core.kernel import Config
from jax_ep.core.layout import SortSizes
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels import low_latency, moe_sort
from jax_ep.megakernels.kernels.exchange_structs import Peers, Rows
from jax_ep.megakernels.kernels.gemm_structs import RowBias
from jax_ep.megakernels.kernels.low_latency_structs import LowLatencyCombine, LowLatencyDispatch, LowLatencyPlan
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule
from oracle_experts import GPT_OSS

ROWS, INNER, GROUPS = 32768, 2048, 64


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch):
    monkeypatch.setattr(kernels, "num_programs", lambda *_: 1056)


def compile_pass(kernel, types, constants, config=None):
    ptx = compiled(kernel, types, constants, config or kernels.pass_config(1056))["ptx"]
    assert "ld.global.v4.b32" in ptx and "ld.global.b16" not in ptx


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_exact", "relu", "relu_squared", "gpt-oss", "llama 4"])
@pytest.mark.parametrize(
    ("kernel", "keep"),
    [(kernels._ACTIVATE, False), (kernels._GRADIENT, False), (kernels._GRADIENT, True)],
    ids=["rows", "gradient", "gradient and rows"],
)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_rows_ptx_activation(kernel, keep, name, gated):
    """The experts of gpt-oss have gates and biases."""
    experts = {"llama 4": Experts(gated=gated, weight_on="input"), "gpt-oss": GPT_OSS}.get(name)
    if experts is None:
        experts = Experts(name, gated=gated)
    elif experts.gated != gated:
        return
    types = dict.fromkeys(["hidden_ptr", "out_ptr", "d_rows_ptr", "d_hidden_ptr"], "*bf16")
    types |= {"sizes_ptr": "*i32", "weights_ptr": "*fp32", "d_weights_ptr": "*fp32"}
    types["bias"] = RowBias("*bf16", "*i32") if experts is GPT_OSS else None
    sizes = kernels.sizes_of if kernel is kernels._ACTIVATE else functools.partial(kernels.gradient_sizes_of, experts)
    constants = {"S": sizes((ROWS, INNER), np.zeros(GROUPS, np.int32)), "KIND": kernels.kind_of(experts)}
    config = None
    if kernel is kernels._GRADIENT:
        config = kernels.gradient_config(experts, constants["S"], keep)
        constants["KEEP"], types["rows_ptr"] = keep, "*bf16"
    compile_pass(kernel, types, constants, config)


@pytest.mark.parametrize(("dtype", "hidden"), [("bf16", 7168), ("bf16", 2048), ("fp16", 72)])
def test_rows_ptx_gather(dtype, hidden):
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "index_ptr": "*i32", "sizes_ptr": "*i32"}
    sizes = kernels.row_pass((ROWS, hidden), np.zeros(GROUPS, np.int32), 1024, 4096)
    compile_pass(kernels._GATHER, types, {"S": sizes})


@pytest.mark.parametrize(("tokens", "experts", "counted"), [(4096, 256, True), (16384, 128, False), (1, 512, False)])
def test_moe_sort_ptx_kernel(tokens, experts, counted, monkeypatch):
    monkeypatch.setattr(moe_sort, "all_programs", lambda: 132)
    config, sizes = moe_sort.sort_sizes((tokens, 8), SortSizes(0, experts, 64))
    assert config.num_programs <= 132
    pointers = ["topk_idx_ptr", "assignments_ptr", "block_expert_ptr", "sizes_ptr", "num_rows_ptr"]
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(["weights_ptr", "row_weights_ptr"], "*fp32")
    types["num_tokens_ptr"] = "*i32" if counted else None
    compiled(moe_sort._SORT, types, {"S": sizes}, config, wide=False)


W, E, K, H = 4, 256, 8, 7168
BF16, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
PROGRAMS = 264  # Of an H200.
CASES = [(90, 1, False), (90, 1, True), (90, 128, False), (90, 128, True), (100, 128, True), (80, 128, False)]


def built(name, num_tokens, fp8, capability, max_tokens=None, top_k=K):
    max_tokens = max_tokens or num_tokens
    layout = Layout(W, E, max_tokens, top_k, E * max_tokens)
    wire, scales = (FP8, H // 128) if fp8 else (BF16, 0)
    sizes = low_latency.layout_sizes(layout, num_tokens, H)
    types = {"peers": Peers("*i32", "*i64")}
    parts = {"values_offset": num_tokens * H * wire.itemsize, "scales_offset": num_tokens * K * scales * 4}
    # The tuning for a CPU has fewer programs, and so another task order.
    lag = min(num_tokens, PROGRAMS // 4)
    if name == "dispatch":
        _, tile = low_latency.dispatch_tile(Schedule(), layout, num_tokens, H, BF16, wire, scales)
        types |= {"x": Rows("*bf16", "*bf16"), "topk_idx_ptr": "*i32", "num_tokens_ptr": "*i32"}
        types |= {"out": Rows("*fp8e4nv" if fp8 else "*bf16", "*fp32"), "plan": LowLatencyPlan(*["*i32"] * 7)}
        offsets, _ = low_latency.buffer_offsets(ids_offset=num_tokens * K * 4, **parts)
        sizes |= {"num_scales": scales, "scale_block": 128 if fp8 else 0, "has_num_tokens": True}
        given = LowLatencyDispatch(**sizes, **offsets, tile=dataclasses.replace(tile, lag=lag))
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
def test_low_latency_ptx_kernels(name, capability, num_tokens, fp8):
    ptx = built(name, num_tokens, fp8, capability)["ptx"]
    assert "ld.global.v4.b32" in ptx, "rows are not loaded 16 bytes at a time"
    assert re.search(r"(fence\.release|fence\.acq_rel|release)\.sys", ptx)


def test_low_latency_ptx_fewer_tokens_than_reserved():
    built("dispatch", 37, False, 90, max_tokens=40, top_k=6)
