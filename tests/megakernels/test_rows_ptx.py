"""Kernels over the rows in use compile to PTX without a GPU: 16-byte accesses, no spilled registers."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from compiling import build

from jax_ep import Experts
from jax_ep.megakernels import activation as kernels
from jax_ep.megakernels import activation as rows
from jax_ep.megakernels.kernels.gemm_structs import RowBias
from oracle_experts import GPT_OSS

ROWS, INNER, GROUPS = 32768, 2048, 64


def compile_pass(monkeypatch, kernel, types, constants, config=None):
    monkeypatch.setattr(rows, "num_programs", lambda *_: 1056)
    config = config or rows.pass_config(1056)
    built = build(
        kernel.path.stem, kernel.name, types, constants, config.num_warps, config.num_stages, 90, config.max_registers
    )
    assert re.search(r"ld\.global\.v4\.b32", built["ptx"]) and re.search(r"st\.global\.v4\.b32", built["ptx"])
    assert not re.search(r"(ld|st)\.global\.b16", built["ptx"])
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_exact", "relu", "relu_squared", "gpt-oss", "llama 4"])
@pytest.mark.parametrize(
    ("kernel", "keep"),
    [(kernels._ACTIVATE, False), (kernels._GRADIENT, False), (kernels._GRADIENT, True)],
    ids=["rows", "gradient", "gradient and rows"],
)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.slow(unless={"name": ["gpt-oss"]})
def test_rows_ptx_activation(monkeypatch, kernel, keep, name, gated):
    """The experts of gpt-oss have gates and biases."""
    experts = {"llama 4": Experts(gated=gated, weight_on="input"), "gpt-oss": GPT_OSS}.get(name)
    if experts is None:
        experts = Experts(name, gated=gated)
    elif experts.gated != gated:
        return
    types = dict.fromkeys(["hidden_ptr", "out_ptr", "d_rows_ptr", "d_hidden_ptr"], "*bf16")
    types |= {"sizes_ptr": "*i32", "weights_ptr": "*fp32", "d_weights_ptr": "*fp32"}
    sizes = kernels.sizes_of if kernel is kernels._ACTIVATE else functools.partial(kernels.gradient_sizes_of, experts)
    constants = {"S": sizes((ROWS, INNER), np.zeros(GROUPS, np.int32)), "KIND": kernels.kind_of(experts)}
    if experts is GPT_OSS:
        types["bias"] = RowBias("*bf16", "*i32")
    else:
        constants["bias"] = None
    config = None
    if kernel is kernels._GRADIENT:
        config = kernels.gradient_config(experts, constants["S"], keep)
        constants["KEEP"], types["rows_ptr"] = keep, "*bf16"
    compile_pass(monkeypatch, kernel, types, constants, config)


@pytest.mark.parametrize(("dtype", "hidden"), [("bf16", 7168), ("bf16", 2048), ("fp16", 72)])
@pytest.mark.slow(unless={"hidden": [7168]})
def test_rows_ptx_gather(monkeypatch, dtype, hidden):
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "index_ptr": "*i32", "sizes_ptr": "*i32"}
    sizes = rows.row_pass((ROWS, hidden), np.zeros(GROUPS, np.int32), 1024, 4096)
    compile_pass(monkeypatch, rows._GATHER, types, {"S": sizes})
