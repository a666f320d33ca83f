"""The expert layer in one launch compiles to PTX without a GPU: tensor cores, TMA, no spilled registers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep import Experts
from jax_ep.core.kernel import element_type
from jax_ep.megakernels import fused_moe
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels.structs_serving import LayerTensors, SortedLayerTensors
from jax_ep.quantization import quantize_experts
from oracle_experts import GPT_OSS

SHARED_BYTES = 227 << 10  # of a multiprocessor
# Choices, and [E, I, H] of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-120b.
QWEN3, MIXTRAL, GPT = (8, (128, 768, 2048)), (2, (8, 14336, 4096)), (4, (128, 2880, 2880))
CASES = [
    (1, *QWEN3, Experts(), None),
    (16, *QWEN3, Experts(), "fp8"),
    (16, *QWEN3, Experts(), "int8"),
    (16, *QWEN3, Experts(), "int4"),
    (32, *GPT, GPT_OSS, "mxfp4"),
    (128, *QWEN3, Experts(), None),
    (1, *MIXTRAL, Experts(), None),
    (64, *MIXTRAL, Experts(), "fp8_channel"),
    (32, *GPT, GPT_OSS, None),
    (4096, *QWEN3, Experts(), None),
    (4096, *QWEN3, Experts(), "fp8"),
]


def compile_layer(
    tokens: int, top_k: int, w_down: tuple[int, int, int], experts: Experts, expert_format: str | None
) -> tuple[dict, Any, Any]:
    num_experts, intermediate, hidden = w_down
    shapes = (num_experts, hidden, 2 * intermediate), w_down
    matrices: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if expert_format:
        matrices = [jax.eval_shape(partial(quantize_experts, format=expert_format), w) for w in matrices]
    config, sizes = fused_moe.fused_sizes(experts, (tokens, hidden), top_k, *matrices)
    described, types, constants = [], dict[str, Any](), {"KIND": kind_of(experts), "S": sizes}
    for name, w, product in zip(("gate_up", "down"), matrices, (sizes.gate_up, sizes.down), strict=True):
        descriptor, scales = fused_moe._operands(w, product)
        block = ",".join(map(str, descriptor.block_shape))
        described.append(f"tensordesc<{element_type(descriptor.array.dtype)}[{block}]>")
        (constants if scales is None else types)[f"{name}_scales_ptr"] = (
            None if scales is None else f"*{element_type(scales.dtype)}"
        )
    tensors: Any = LayerTensors("*bf16", *described, "*i32", "*fp32")
    types["tensors"] = SortedLayerTensors(*tensors, *["*i32"] * 3) if sizes.SORTED else tensors
    types |= {"counters_ptr": "*i32", "written_counters_ptr": "*i32"}
    types |= {"hidden_ptr": "*bf16", "rows_ptr": "*fp32", "out_ptr": "*bf16"}
    biases = ("gate_up_bias_ptr", "down_bias_ptr")
    if experts is GPT_OSS:
        types |= dict.fromkeys(biases, "*bf16")
    else:
        constants |= dict.fromkeys(biases)
    return build("fused_moe", "fused_moe", types, constants, config.num_warps, config.num_stages, 90), config, sizes


@pytest.mark.parametrize(("tokens", "top_k", "w_down", "experts", "expert_format"), CASES)
@pytest.mark.slow(unless={"expert_format": [None, "mxfp4"], "tokens": [1, 32, 4096]})
def test_layer(
    tokens: int,
    top_k: int,
    w_down: tuple[int, int, int],
    experts: Experts,
    expert_format: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    built, config, sizes = compile_layer(tokens, top_k, w_down, experts, expert_format)
    assert re.search(r"mma\.sync|wgmma\.mma_async", built["ptx"]), "the tensor cores are not used"
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared", built["ptx"]), "matrices are not read by TMA"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    programs = config.num_programs // 132
    assert programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024  # 1 KB of each program is the driver's
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert programs * config.num_warps * 32 * registers <= 65536
    active = min(tokens * top_k, w_down[0])
    tasks = active * sizes.down.SPLITS * -(-w_down[2] // sizes.down.tile.BN)
    assert tasks >= 132, "multiprocessors without a task of the second product"


def test_pairs_of_four_bits() -> None:
    """Of MXFP4 two elements are made at a time; one by one, their instructions would take longer than the memory."""
    built, _, sizes = compile_layer(16, *QWEN3, Experts(), "mxfp4")
    loop = built["code"].count("HMUL2.BF16"), built["code"].count("HMMA.16816.F32.BF16")
    # Two products for each pair, with 2**126 and with the scale; an instruction of tensor cores takes two of a thread.
    assert 0 < loop[0] <= 4 * loop[1] + 16
    assert "I2F" not in built["code"].replace("I2FP", ""), "integers are converted one by one"
    assert sizes.gate_up.PER_BYTE == 2
