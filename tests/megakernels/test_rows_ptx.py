"""Kernels over rows, and the sort, compile to PTX without a GPU: 16-byte accesses, no spilled registers."""

import functools

import numpy as np
import pytest
from compiling import compiled

from jax_ep import Experts
from jax_ep.core.layout import SortSizes
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels import moe_sort
from jax_ep.megakernels.kernels.gemm_structs import RowBias
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
@pytest.mark.slow(unless={"name": ["gpt-oss"]})
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
@pytest.mark.slow(unless={"hidden": [7168]})
def test_rows_ptx_gather(dtype, hidden):
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "index_ptr": "*i32", "sizes_ptr": "*i32"}
    sizes = kernels.row_pass((ROWS, hidden), np.zeros(GROUPS, np.int32), 1024, 4096)
    compile_pass(kernels._GATHER, types, {"S": sizes})


@pytest.mark.parametrize(("tokens", "experts", "counted"), [(4096, 256, True), (16384, 128, False), (1, 512, False)])
@pytest.mark.slow(unless={"tokens": [4096]})
def test_moe_sort_ptx_kernel(tokens, experts, counted, monkeypatch):
    monkeypatch.setattr(moe_sort, "all_programs", lambda: 132)
    config, sizes = moe_sort.sort_sizes((tokens, 8), SortSizes(0, experts, 64))
    assert config.num_programs <= 132
    pointers = ["topk_idx_ptr", "assignments_ptr", "block_expert_ptr", "sizes_ptr", "num_rows_ptr"]
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(["weights_ptr", "row_weights_ptr"], "*fp32")
    types["num_tokens_ptr"] = "*i32" if counted else None
    compiled(moe_sort._SORT, types, {"S": sizes}, config, wide=False)
