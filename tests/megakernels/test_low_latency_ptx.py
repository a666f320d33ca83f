"""The low-latency kernels compile to PTX without a GPU, for few tokens and for many: 16-byte accesses, no spills."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import low_latency
from jax_ep.megakernels.kernels.structs import Peers
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout

W, E, K, H = 4, 256, 8, 7168
BF16, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
PROGRAMS = 264  # of an H200
INTEGERS = {
    "dispatch": ["ids", "num_tokens", "sizes", "token", "start", "count", "slot_row", "own_ids", "invalid"],
    "combine": ["slot_row", "own_ids"],
}
CASES = [(90, 1, False), (90, 1, True), (90, 128, False), (90, 128, True), (100, 128, True), (80, 128, False)]


def built(name: str, num_tokens: int, fp8: bool, capability: int) -> Any:
    layout = Layout(W, E, num_tokens, K, E * num_tokens)
    wire, scales = (FP8, H // 128) if fp8 else (BF16, 0)
    sizes = {**low_latency._sizes(layout, num_tokens, H), "HEAP": heap_of(HeapLayout(W), W, 6)}
    if name == "dispatch":
        _, blocks = low_latency.dispatch(layout, num_tokens, H, BF16, wire, scales)
        types = {"x_ptr": "*bf16", "x_scales_ptr": "*bf16", "out_ptr": "*fp8e4nv" if fp8 else "*bf16"}
        types["out_scales_ptr"] = "*fp32"
        parts = {"IDS_AT": num_tokens * K * 4, "VALUES_AT": num_tokens * H * wire.itemsize}
        sizes |= {"G": scales, "GROUP": 128 if fp8 else 0, "COUNTED": True}
    else:
        _, blocks = low_latency.combine(layout, num_tokens, H, BF16)
        types = {"y_ptr": "*bf16", "out_ptr": "*bf16", "weights_ptr": "*fp32"}
        parts = {"WEIGHTS_AT": num_tokens * K * 4, "VALUES_AT": num_tokens * K * H * wire.itemsize}
        sizes |= {"FP8": fp8}
    places, _ = low_latency.low_latency_places(**parts, SCALES_AT=num_tokens * K * scales * 4)
    types |= {f"{integers}_ptr": "*i32" for integers in INTEGERS[name]} | {"peers": Peers("*i32", "*i64", "*i32")}
    # The tuning of a CPU has fewer programs, and so another order of tasks.
    constants = sizes | places | blocks | {"LAG": min(num_tokens, PROGRAMS // 4)}
    registers = 128 if num_tokens > 1 else None
    kernel = f"low_latency_{name}"
    return build(kernel, kernel, types, constants, 8, 3, capability, registers)


@pytest.mark.parametrize(("capability", "num_tokens", "fp8"), CASES)
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.slow(unless={"num_tokens": [128]})
def test_kernels(name: str, capability: int, num_tokens: int, fp8: bool) -> None:
    kernel = built(name, num_tokens, fp8, capability)
    assert re.search(r"ld\.global\.v4\.b32", kernel["ptx"]), "rows are not loaded 16 bytes at a time"
    assert re.search(r"st\.global\.v4\.b32", kernel["ptx"]), "rows are not stored 16 bytes at a time"
    assert not re.search(r"st\.global\.b(8|16)\b", kernel["ptx"]), "short stores: an alignment hint was lost"
    assert re.search(r"(fence\.release|fence\.acq_rel|release)\.sys", kernel["ptx"])
    assert re.findall(r"(\d+) bytes spill stores", kernel["report"]) == ["0"], kernel["report"]
    if num_tokens > 1:
        assert int(re.findall(r"Used (\d+) registers", kernel["report"])[0]) <= 128, "one program per multiprocessor"
