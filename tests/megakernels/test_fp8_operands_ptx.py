"""The FP8 quantization kernels compile to PTX without a GPU: 16-byte accesses, no spilled registers."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compiled

from jax_ep import Experts
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels import exchange
from jax_ep.megakernels.kernels.exchange_structs import Dispatch, Peers, Rows
from jax_ep.megakernels.kernels.gemm_structs import SplitWeights
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

pytest.importorskip("triton")

ROWS, HIDDEN, INNER, GROUPS, PROGRAMS = 32768, 7168, 2048, 64, 1056
FP8 = {"quantized": Rows("*fp8e4nv", "*fp32"), "sizes_ptr": "*i32"}


def check(kernel, types, constants, config, capability=90):
    ptx = compiled(kernel, types, constants, config, capability, wide=False)["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v[24]\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.b(8|16)\b", ptx), "short accesses: an alignment hint was lost"


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch):
    monkeypatch.setattr(kernels, "num_programs", lambda *_: PROGRAMS)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("hidden", [HIDDEN, 128])
@pytest.mark.parametrize("kernel", [kernels._QUANTIZE_ROWS, kernels._DEQUANTIZE_ROWS], ids=lambda k: k.name)
def test_fp8_operands_ptx_rows(kernel, hidden, capability):
    other = "x_ptr" if kernel is kernels._QUANTIZE_ROWS else "out_ptr"
    constants = {"S": kernels.sizes_of((ROWS, hidden), np.zeros(GROUPS, np.int32))}
    check(kernel, FP8 | {other: "*bf16"}, constants, kernels.pass_config(PROGRAMS), capability)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_fp8_operands_ptx_activation(activation, gated):
    sizes, kind = kernels.sizes_of((ROWS, INNER), np.zeros(GROUPS, np.int32)), Experts(activation, gated=gated)
    constants = {"S": sizes, "KIND": kernels.kind_of(kind)}
    types = FP8 | {"bias": None, "hidden_ptr": "*bf16", "weights_ptr": "*fp32"}
    check(kernels._ACTIVATE_QUANTIZED, types, constants, kernels.pass_config(PROGRAMS))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "results", [("transposed",), ("untransposed",), ("transposed", "untransposed")], ids=" and ".join
)
@pytest.mark.parametrize("num_home", [0, GROUPS - 2], ids=["one array", "two arrays"])
def test_fp8_operands_ptx_matrices(results, element, capability, num_home):
    num_tasks = GROUPS * (HIDDEN // 128) * (2 * INNER // 128)
    constants = {"K": HIDDEN, "N": 2 * INNER, "NUM_GROUPS": GROUPS, "HOME_GROUPS": num_home, "PADDED_GROUPS": 64}
    w = f"*{element}"
    types = {"w": SplitWeights(w, w) if num_home else w, "sizes_ptr": "*i32" if num_home else None}
    types |= {"transposed": None, "untransposed": None}
    types |= dict.fromkeys(results, Rows("*fp8e4nv", "*fp32"))
    config = kernels.matrices_config(num_tasks, jnp.float32 if element == "fp32" else jnp.bfloat16)
    check(kernels._QUANTIZE_MATRICES, types, constants, config, capability)


COLUMNS = {"sizes_ptr": "*i32", "columns": Rows("*fp8e4nv", "*fp32")}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("kind", ["bf16", "FP8", "both layouts"])
def test_fp8_operands_ptx_columns(kind, capability):
    sizes = kernels.column_sizes_of((ROWS, HIDDEN), np.zeros(GROUPS, np.int32), 128)
    types = COLUMNS | {"x_ptr": "*fp8e4nv" if kind == "FP8" else "*bf16"}
    types["scales_ptr"] = "*fp32" if kind == "FP8" else None
    types["rows"] = Rows("*fp8e4nv", "*fp32") if kind == "both layouts" else None
    config = kernels.columns_config(sizes, in_fp8=kind == "FP8")
    check(kernels._QUANTIZE_COLUMNS, types, {"S": sizes}, config, capability)


@pytest.mark.parametrize("experts", [Experts(), Experts(gated=False), Experts("gelu_exact")], ids=str)
def test_fp8_operands_ptx_activated_columns(experts):
    sizes = kernels.column_sizes_of((ROWS, INNER), np.zeros(GROUPS, np.int32), kernels._ACTIVATED_COLUMNS)
    constants = {"S": sizes, "KIND": kernels.kind_of(experts)}
    types = COLUMNS | {"bias": None, "hidden_ptr": "*bf16", "weights_ptr": "*fp32"}
    check(kernels._ACTIVATE_COLUMNS, types, constants, kernels.activated_columns_config(experts, sizes))


@pytest.mark.parametrize("capability", [90, 100])
def test_fp8_operands_ptx_dispatch(capability):
    layout = Layout(num_ranks=4, num_experts=256, num_tokens=4096, top_k=8, capacity=40960)
    wire = jnp.dtype(jnp.float8_e4m3fn)
    config, tile = exchange.dispatch_config(Schedule(), layout, HIDDEN, jnp.dtype(jnp.bfloat16), wire, clear=False)
    integers = ("topk_idx_ptr", "assignment_to_row_ptr", "row_to_assignment_ptr")
    types = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "out_scales_ptr": "*fp32"}
    types["peers"] = Peers("*i32", "*i64")
    types |= {"weights_ptr": "*fp32", "out_weights_ptr": "*fp32"}
    sizes = {"num_tokens": 4096, "top_k": 8, "hidden": HIDDEN, "num_local_experts": 64, "num_experts": 256}
    sizes |= {"num_rows": layout.capacity, "scales_offset": 1 << 29, "weights_offset": 1 << 30}
    options = {"fp8": True, "quantized": True, "clears_padding": False}
    constants = {"S": Dispatch(**sizes, **options, tile=tile), "HEAP": heap_of(HeapLayout(4), 4, 1)}
    check(exchange._DISPATCH, types | dict.fromkeys(integers, "*i32"), constants, config, capability)
