"""The FP8 quantization kernels compile to PTX without a GPU: 16-byte accesses, no spilled registers."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from compiling import build

from jax_ep import Experts
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels import exchange
from jax_ep.megakernels.kernels.exchange_structs import Dispatch, Peers, Rows
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

pytest.importorskip("triton")

ROWS, HIDDEN, INNER, GROUPS, PROGRAMS = 32768, 7168, 2048, 64, 1056
FP8 = {"quantized": Rows("*fp8e4nv", "*fp32"), "sizes_ptr": "*i32"}


def check(kernel: Any, types: dict[str, Any], constants: dict[str, Any], config: Any, capability: int = 90) -> int:
    """Return the registers per thread."""
    shape = (config.num_warps, config.num_stages, capability, config.max_registers)
    built = build(kernel.path.stem, kernel.name, types, constants, *shape)
    assert re.search(r"ld\.global\.v4\.b32", built["ptx"]) and re.search(r"st\.global\.v[24]\.b32", built["ptx"])
    assert not re.search(r"(ld|st)\.global\.b(8|16)\b", built["ptx"]), "short accesses: an alignment hint was lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    return int(re.findall(r"Used (\d+) registers", built["report"])[0])


@pytest.fixture
def pass_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernels, "num_programs", lambda *_: PROGRAMS)
    return kernels.pass_config(PROGRAMS)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("hidden", [HIDDEN, 128])
@pytest.mark.parametrize("kernel", [kernels._QUANTIZE_ROWS, kernels._DEQUANTIZE_ROWS], ids=lambda k: k.name)
@pytest.mark.slow(unless={"hidden": [HIDDEN]})
def test_fp8_operands_ptx_rows(pass_config: Any, kernel: Any, hidden: int, capability: int) -> None:
    other = "x_ptr" if kernel is kernels._QUANTIZE_ROWS else "out_ptr"
    constants = {"S": kernels.sizes_of((ROWS, hidden), np.zeros(GROUPS, np.int32))}
    check(kernel, FP8 | {other: "*bf16"}, constants, pass_config, capability)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.slow(unless={"activation": ["silu"]})
def test_fp8_operands_ptx_activation(pass_config: Any, activation: str, gated: bool) -> None:
    sizes, kind = kernels.sizes_of((ROWS, INNER), np.zeros(GROUPS, np.int32)), Experts(activation, gated=gated)
    constants = {"S": sizes, "KIND": kernels.kind_of(kind), "bias": None}
    types = FP8 | {"hidden_ptr": "*bf16", "weights_ptr": "*fp32"}
    check(kernels._ACTIVATE_QUANTIZED, types, constants, pass_config)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "results", [("transposed",), ("untransposed",), ("transposed", "untransposed")], ids=" and ".join
)
@pytest.mark.slow(unless={"capability": [90], "element": ["bf16"]})
def test_fp8_operands_ptx_matrices(
    monkeypatch: pytest.MonkeyPatch, results: tuple[str, ...], element: str, capability: int
) -> None:
    monkeypatch.setattr(kernels, "num_programs", lambda *_: PROGRAMS)
    num_tasks = GROUPS * (HIDDEN // 128) * (2 * INNER // 128)
    constants: dict[str, Any] = {
        "K": HIDDEN,
        "N": 2 * INNER,
        "NUM_GROUPS": GROUPS,
        "transposed": None,
        "untransposed": None,
    }
    types: dict[str, Any] = {"w_ptr": f"*{element}"} | dict.fromkeys(results, Rows("*fp8e4nv", "*fp32"))
    constants = {name: value for name, value in constants.items() if name not in results}
    config = kernels.matrices_config(num_tasks, jnp.float32 if element == "fp32" else jnp.bfloat16)
    check(kernels._QUANTIZE_MATRICES, types, constants, config, capability)


COLUMNS = {"sizes_ptr": "*i32", "columns": Rows("*fp8e4nv", "*fp32")}


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bf16", "FP8", "both layouts"])
def test_fp8_operands_ptx_columns(monkeypatch: pytest.MonkeyPatch, kind: str, capability: int) -> None:
    monkeypatch.setattr(kernels, "num_programs", lambda *_: PROGRAMS)
    sizes = kernels.column_sizes_of((ROWS, HIDDEN), np.zeros(GROUPS, np.int32), 128)
    types: dict[str, Any] = COLUMNS | {"x_ptr": "*fp8e4nv" if kind == "FP8" else "*bf16"}
    constants: dict[str, Any] = {"S": sizes}
    for name, given, type_name in (
        ("scales_ptr", kind == "FP8", "*fp32"),
        ("rows", kind == "both layouts", Rows("*fp8e4nv", "*fp32")),
    ):
        (types if given else constants)[name] = type_name if given else None
    config = kernels.columns_config(sizes, in_fp8=kind == "FP8")
    check(kernels._QUANTIZE_COLUMNS, types, constants, config, capability)


@pytest.mark.parametrize("experts", [Experts(), Experts(gated=False), Experts("gelu_exact")], ids=str)
def test_fp8_operands_ptx_activated_columns(monkeypatch: pytest.MonkeyPatch, experts: Experts) -> None:
    monkeypatch.setattr(kernels, "num_programs", lambda *_: PROGRAMS)
    sizes = kernels.column_sizes_of((ROWS, INNER), np.zeros(GROUPS, np.int32), kernels._ACTIVATED_COLUMNS)
    constants = {"S": sizes, "KIND": kernels.kind_of(experts), "bias": None}
    types = COLUMNS | {"hidden_ptr": "*bf16", "weights_ptr": "*fp32"}
    check(kernels._ACTIVATE_COLUMNS, types, constants, kernels.activated_columns_config(experts, sizes))


@pytest.mark.parametrize("capability", [90, 100])
def test_fp8_operands_ptx_dispatch(capability: int) -> None:
    layout = Layout(num_ranks=4, num_experts=256, num_tokens=4096, top_k=8, capacity=40960)
    wire = jnp.dtype(jnp.float8_e4m3fn)
    config, tile = exchange.dispatch_config(Schedule(), layout, HIDDEN, jnp.dtype(jnp.bfloat16), wire, clear=False)
    integers = ("topk_idx_ptr", "assignment_to_row_ptr", "row_to_assignment_ptr")
    types: dict[str, Any] = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "out_scales_ptr": "*fp32"}
    types["peers"] = Peers("*i32", "*i64")
    types |= {"weights_ptr": "*fp32", "out_weights_ptr": "*fp32"}
    sizes = {
        "num_tokens": 4096,
        "top_k": 8,
        "hidden": HIDDEN,
        "num_local_experts": 64,
        "num_experts": 256,
        "num_rows": layout.capacity,
        "scales_offset": 1 << 29,
    }
    options = {"weights_offset": 1 << 30, "fp8": True, "quantized": True, "clears_padding": False}
    constants = {"S": Dispatch(**sizes, **options, tile=tile), "HEAP": heap_of(HeapLayout(4), 4, 1)}
    check(exchange._DISPATCH, types | dict.fromkeys(integers, "*i32"), constants, config, capability)
