"""The sort compiles to PTX without a GPU, for as many programs as an H200 has: no spilled registers."""

from __future__ import annotations

import re

import pytest
from compiling import build

from jax_ep.megakernels import moe_sort


@pytest.mark.parametrize(("tokens", "experts", "counted"), [(4096, 256, True), (16384, 128, False), (1, 512, False)])
@pytest.mark.slow(unless={"tokens": [4096]})
def test_moe_sort_ptx_kernel(tokens: int, experts: int, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_sort, "all_programs", lambda: 132)
    config, sizes = moe_sort.sort_sizes((tokens, 8), 0, experts, 64)
    assert config.num_programs <= 132
    pointers = ["topk_idx_ptr", "assignments_ptr", "block_expert_ptr", "sizes_ptr", "num_rows_ptr"]
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(["weights_ptr", "row_weights_ptr"], "*fp32")
    constants = {"S": sizes}
    if counted:
        types["num_tokens_ptr"] = "*i32"
    else:
        constants["num_tokens_ptr"] = None
    built = build("moe_sort", "moe_sort", types, constants, config.num_warps, config.num_stages, 90)
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert built["scratch"] == 0
