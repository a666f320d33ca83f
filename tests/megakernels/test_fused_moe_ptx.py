"""The expert layer in one launch compiles to PTX without a GPU: tensor cores, TMA, no spilled registers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiling import build

from jax_ep import Experts
from jax_ep.megakernels import fused_moe
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels.structs_serving import LayerTensors
from oracle_experts import GPT_OSS

SHARED_BYTES = 227 << 10  # of a multiprocessor
# Tokens, choices, and [E, I, H] of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-120b.
QWEN3, MIXTRAL, GPT = (8, (128, 768, 2048)), (2, (8, 14336, 4096)), (4, (128, 2880, 2880))
CASES = [(1, *QWEN3, Experts()), (128, *QWEN3, Experts()), (1, *MIXTRAL, Experts()), (32, *GPT, GPT_OSS)]


def compile_layer(tokens: int, top_k: int, w_down: tuple[int, ...], experts: Experts) -> tuple[dict, Any, Any]:
    config, sizes = fused_moe.fused_sizes(experts, (tokens, w_down[2]), top_k, w_down)
    tile, wide = sizes.tile, 2 if experts.interleaved else 1
    gate_up, down = f"bf16[1,{tile.BK},{wide * tile.BN}]", f"bf16[1,{tile.BK},{tile.BN2}]"
    tensors = LayerTensors("*bf16", f"tensordesc<{gate_up}>", f"tensordesc<{down}>", "*i32", "*fp32")
    types: dict[str, Any] = {"tensors": tensors, "counters_ptr": "*i32", "written_counters_ptr": "*i32"}
    types |= {"hidden_ptr": "*bf16", "rows_ptr": "*fp32", "out_ptr": "*bf16"}
    constants: dict[str, Any] = {"KIND": kind_of(experts), "S": sizes}
    biases = ("gate_up_bias_ptr", "down_bias_ptr")
    if experts is GPT_OSS:
        types |= dict.fromkeys(biases, "*bf16")
    else:
        constants |= dict.fromkeys(biases)
    return build("fused_moe", "fused_moe", types, constants, config.num_warps, config.num_stages, 90), config, sizes


@pytest.mark.parametrize(("tokens", "top_k", "w_down", "experts"), CASES)
@pytest.mark.slow(unless={"tokens": [1]})
def test_layer(
    tokens: int, top_k: int, w_down: tuple[int, ...], experts: Experts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    built, config, sizes = compile_layer(tokens, top_k, w_down, experts)
    assert re.search(r"mma\.sync|wgmma\.mma_async", built["ptx"]), "the tensor cores are not used"
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared", built["ptx"]), "matrices are not read by TMA"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    programs = config.num_programs // 132
    assert programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024  # 1 KB of each program is the driver's
    active = min(tokens * top_k, w_down[0])
    assert active * -(-w_down[1] // sizes.tile.BN) >= min(config.num_programs, active * w_down[1] // 16)
