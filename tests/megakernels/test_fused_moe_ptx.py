"""The single-launch expert layer compiles to PTX without a GPU: tensor cores, TMA, no spilled registers."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import compiled, registers

from jax_ep import Experts, Router
from jax_ep.core.kernel import Config, element_type
from jax_ep.megakernels import fused_moe
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels import gluon_fused_moe
from jax_ep.megakernels.kernels.fused_moe_structs import (
    LayerScratch,
    LayerTensors,
    RoutedLayerTensors,
    SortedLayerTensors,
)
from jax_ep.quantization import quantize, with_layout
from oracle_experts import GPT_OSS

# top_k, and [E, I, H] of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-120b.
QWEN3, MIXTRAL, GPT = (8, (128, 768, 2048)), (2, (8, 14336, 4096)), (4, (128, 2880, 2880))
STORED = [  # Numbers of tokens by format.
    (QWEN3, Experts(), {None: (1, 4096), "fp8": (1, 512), "int8": (16,), "mxfp4": (512,)}),
    (QWEN3, Experts(), {"int4": (512,), "mxfp4_tokens": (1,), "fp8_tokens": (16, 4096)}),
    (QWEN3, Experts(), {"mxfp4_prepacked": (1, 4096), "int4_prepacked": (1,)}),
    (QWEN3, Experts(interleaved=True), {"fp8_tokens": (16,)}),
    (MIXTRAL, Experts(), {None: (1,), "int4": (160,), "fp8": (4,), "fp8_channel": (256,)}),
    (MIXTRAL, Experts(), {"mxfp4": (64,), "int8": (128,), "mxfp4_tokens": (16,), "int4_tokens": (16,)}),
    (MIXTRAL, Experts(), {"mxfp4_prepacked": (16, 64), "int4_prepacked": (64,)}),
    (MIXTRAL, Experts(interleaved=True), {"int4": (16,), "mxfp4": (16,), "fp8": (256,)}),
    (GPT, GPT_OSS, {None: (32,), "mxfp4": (32,), "mxfp4_prepacked": (32,)}),
]
CASES = [
    (tokens, *model, experts, expert_format)
    for model, experts, by_format in STORED
    for expert_format, numbers in by_format.items()
    for tokens in numbers
]


def matrices_of(w_down, expert_format):
    num_experts, intermediate, hidden = w_down
    shapes = (num_experts, hidden, 2 * intermediate), w_down
    matrices = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if expert_format:
        name = expert_format.removesuffix("_tokens").removesuffix("_prepacked")
        options = {"format": name, "activations": "fp8" if expert_format.endswith("_tokens") else None}
        matrices = [jax.eval_shape(partial(quantize, **options), w) for w in matrices]
        if expert_format.endswith("_prepacked"):
            matrices = [jax.eval_shape(partial(with_layout, layout="prepacked"), w) for w in matrices]
    return matrices


def router_of(top_k, num_experts):
    """Return the sizes of a router with all that it may have."""
    return fused_moe.router_sizes(Router("sigmoid", scale=2.5), top_k, num_experts, has_bias=True, has_mask=True)


ROUTED = "*fp32", "*fp32", "*i1"  # logits, bias and mask


def compile_layer(tokens, top_k, w_down, experts, expert_format, *, routed=False):
    hidden, matrices = w_down[2], matrices_of(w_down, expert_format)
    in_fp8 = expert_format is not None and expert_format.endswith("_tokens")
    router = router_of(top_k, w_down[0]) if routed else None
    config, sizes = fused_moe.fused_sizes(experts, (tokens, hidden), top_k, *matrices, router)
    described, types, constants = [], dict[str, Any](), {"KIND": kind_of(experts), "S": sizes}
    for name, w, product in zip(("gate_up", "down"), matrices, (sizes.gate_up, sizes.down), strict=True):
        block_shape = []

        def operands(w, product=product, block_shape=block_shape):
            descriptor, scales = fused_moe._operands(w, product)
            block_shape += descriptor.block_shape
            return descriptor.array, scales

        array, scales = jax.eval_shape(operands, w)
        block = ",".join(map(str, block_shape))
        described.append(f"tensordesc<{element_type(array.dtype)}[{block}]>")
        types[f"{name}_scales_ptr"] = None if scales is None else f"*{element_type(scales.dtype)}"
    rows = "*fp8e4nv" if in_fp8 else "*bf16"
    tensors = LayerTensors(rows, "*fp32", *described, "*i32", "*fp32")
    types["tensors"] = SortedLayerTensors(*tensors, *["*i32"] * 3) if sizes.presorted else tensors
    if routed:
        types["tensors"] = RoutedLayerTensors(*tensors[:4], *ROUTED)
    types |= {"counters_ptr": "*i32", "written_counters_ptr": "*i32"}
    types |= {"scratch": LayerScratch(rows, "*fp32", "*fp32", *["*i32"] * 3, "*fp32"), "out_ptr": "*bf16"}
    types |= dict.fromkeys(("gate_up_bias_ptr", "down_bias_ptr"), "*bf16" if experts is GPT_OSS else None)
    options = {
        "spills": allowed_spills(expert_format, config, sizes) + 16 * routed,
        "programs": config.num_programs // 132 or 1,
    }
    return compiled(fused_moe._FUSED, types, constants, config, wide=False, **options), config, sizes


def allowed_spills(expert_format, config, sizes):
    if expert_format in ("fp8", "fp8_channel") and sizes.down.tile.swap_ab:
        return 96
    # Spills of values used after a loop: these tiles are the fastest even so.
    if expert_format == "int4" and sizes.down.tile.block_m == 32:
        return 24
    # Three programs per multiprocessor with some spills are faster than two without.
    return 64 if config.max_registers and sizes.down.values_per_byte == 2 else 0


def steps_of(code):
    """Return the machine code of the loops over K: innermost loops with tensor core instructions."""
    labels, lines, loops = dict[str, int](), code.splitlines(), list[tuple[int, int]]()
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        elif (branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) and branch[1] in labels:
            loops.append((labels[branch[1]], i))
    found = [lines[a:z] for a, z in loops if not any(a < b and y < z for b, y in loops)]
    found = [step for step in found if any("MMA" in line for line in step)]
    assert found, "no loop multiplies"
    return [line for step in found for line in step]


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("expert_format", ["int4_prepacked", "mxfp4_prepacked"])
@pytest.mark.parametrize(
    ("tokens", "model", "experts", "programs"),
    [
        (1, QWEN3, Experts(), 1),
        (1, GPT, GPT_OSS, 1),
        (4, QWEN3, Experts(), 2),
        (16, QWEN3, Experts(), 3),
        (64, QWEN3, Experts(), 4),
        (64, GPT, GPT_OSS, 4),
        (32, MIXTRAL, Experts(), 4),
        (64, MIXTRAL, Experts(), 3),
    ],
)
def test_fused_moe_ptx_gluon(tokens, model, experts, programs, expert_format, routed, monkeypatch):
    """The loop over K spills nothing, has no barrier among the warps, and reads packed weights by matrix loads."""
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    top_k, w_down = model
    if expert_format == "int4_prepacked" and w_down[1] % 128:
        pytest.skip("blocks of 128")
    down = matrices_of(w_down, expert_format)[1]
    tiles = fused_moe.gluon_tiles(tokens * top_k, down)
    programs = programs if expert_format == "mxfp4_prepacked" else min(programs, 3)
    assert tiles.programs == programs
    blocks = "tensordesc<u32[64, 16]>", f"tensordesc<{element_type(down.scales.dtype)}[1, 64]>"
    types = dict.fromkeys(("gate_up", "down"), gluon_fused_moe.Weights(*blocks))
    inputs = (
        gluon_fused_moe.RoutedInputs("*bf16", *ROUTED) if routed else gluon_fused_moe.Inputs("*bf16", "*i32", "*fp32")
    )
    types |= {"inputs": inputs}
    types |= {"outputs": gluon_fused_moe.Outputs("*bf16", "*fp32", "*bf16", "*i32", "*fp32")}
    types |= dict.fromkeys(("gate_up_bias_ptr", "down_bias_ptr"), "*bf16" if experts is GPT_OSS else None)
    types |= dict.fromkeys(("counters_ptr", "written_counters_ptr"), "*i32")
    router = router_of(top_k, w_down[0]) if routed else None
    sizes = fused_moe.gluon_sizes((tokens, w_down[2]), top_k, down, tiles, router)
    config = Config(1, 4, max_registers=fused_moe.gluon_registers(tiles.programs, tiles.consumers))
    constants = {"KIND": kind_of(experts), "S": sizes}
    # The producer spills when it lists assignments: it leaves its registers to the consumer.
    few = sizes.tile_m <= 16
    options = {"product": r"mma\.sync" if few else r"wgmma\.mma_async", "spills": 96, "programs": programs}
    built = compiled(fused_moe._GLUON, types, constants, config, **options)
    threads = 128 * (1 + tiles.consumers)
    assert f".reqntid {threads}" in built["ptx"] and programs * threads * registers(built) <= 65536
    loop = steps_of(built["code"])
    assert not any(re.search(r"\b(STL|LDL|BAR)\b", line) for line in loop)
    products = sum(("HMMA" if few else "HGMMA") in line for line in loop)
    assert products == tiles.consumers * (2 * sizes.tile_m if few else 16) and any("LDSM" in line for line in loop)
    if few:
        count = sum(bool(re.search(r"/\*[0-9a-f]{4,}\*/", line)) for line in loop)
        limit = {"int4_prepacked": 260, "mxfp4_prepacked": 330}[expert_format]
        assert count <= tiles.consumers * (limit + 3 * (sizes.tile_m - 8))


@pytest.mark.parametrize(("tokens", "top_k", "w_down", "experts", "expert_format"), CASES)
def test_fused_moe_ptx_layer(tokens, top_k, w_down, experts, expert_format, monkeypatch):
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    built, config, sizes = compile_layer(tokens, top_k, w_down, experts, expert_format)
    assert re.search(r"mma\.sync|wgmma\.mma_async", built["ptx"]), "the tensor cores are not used"
    dimensions = 4 if sizes.gate_up.split_halves else 3
    assert re.search(rf"cp\.async\.bulk\.tensor\.{dimensions}d\.shared", built["ptx"]), "matrices are not read by TMA"
    swapped_fp8 = expert_format in ("fp8", "fp8_channel") and sizes.down.tile.swap_ab
    if prepacked := expert_format is not None and expert_format.endswith("_prepacked"):
        assert "serialized" not in built["report"], "each product is waited for"
    if prepacked or swapped_fp8 or not config.max_registers:
        assert not any(re.search(r"\b(STL|LDL)\b", line) for line in steps_of(built["code"])), "spills in each step"
    active = min(tokens * top_k, w_down[0])
    tasks = active * sizes.down.k_splits * -(-w_down[2] // sizes.down.tile.block_n)
    assert tasks >= 128, "multiprocessors without a task of the second product"


@pytest.mark.parametrize(
    ("tokens", "expert_format"),
    [(1, None), (16, "fp8"), (1, "mxfp4_prepacked"), (8, "mxfp4_prepacked"), (8, "fp8_tokens")],
)
def test_fused_moe_ptx_routed(tokens, expert_format, monkeypatch):
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    built, *_ = compile_layer(tokens, 8, (256, 512, 2048), Experts(), expert_format, routed=True)
    assert re.search(r"mma\.sync|wgmma\.mma_async", built["ptx"]), "the tensor cores are not used"


@pytest.mark.parametrize("expert_format", ["fp8", "mxfp4", "int4"])
def test_fused_moe_ptx_fp8_tokens(expert_format):
    """Nothing is converted to 16-bit floats: tensor cores take FP8, and eight 4-bit values are converted at once."""
    built, _, sizes = compile_layer(16, *QWEN3, Experts(), f"{expert_format}_tokens")
    assert "QGMMA.64x16x32.F32.E4M3.E4M3" in built["code"]
    assert "HMMA" not in built["code"]
    assert "HGMMA" not in built["code"]
    assert sizes.down.tile.swap_ab
    if expert_format != "fp8":
        # 32 elements per thread fill 8 registers: each needs one permutation for magnitudes and one or two for signs.
        permutations = {"mxfp4": 2, "int4": 3}[expert_format]
        elements = sum(t.block_n * t.block_k for t in (sizes.gate_up.tile, sizes.gate_up.tile, sizes.down.tile)) // 128
        assert built["code"].count("PRMT") <= permutations * elements // 4 + 128


def test_fused_moe_ptx_int4_pairs():
    """MXFP4 converts two elements at a time; single conversions would take longer than the memory accesses."""
    built, _, sizes = compile_layer(16, *QWEN3, Experts(), "mxfp4")
    loop = built["code"].count("HMUL2.BF16"), built["code"].count("HMMA.16816.F32.BF16")
    # One multiplication per pair, with 2**126 and the scale combined; a tensor core instruction takes two per thread.
    assert 0 < loop[0] <= 2 * loop[1] + 16
    assert "I2F" not in built["code"].replace("I2FP", ""), "integers are converted one by one"
    assert sizes.gate_up.values_per_byte == 2


def test_fused_moe_ptx_int4_scales():
    """Scales of 128 elements multiply their sums; elements are not converted to float32 and scaled."""
    built, _, _ = compile_layer(16, *QWEN3, Experts(), "int4")
    products = built["code"].count("HMMA.16816.F32.BF16")
    assert products
    assert built["code"].count("FFMA") <= products + 64
    assert built["code"].count("HADD2.BF16") <= 2 * products + 16


@pytest.mark.parametrize("expert_format", ["mxfp4", "int4"])
def test_fused_moe_ptx_prepacked_weights_in_registers(expert_format, monkeypatch):
    """Prepacked elements are in the registers of the thread that multiplies them, with few instructions per byte."""
    monkeypatch.setattr(fused_moe, "all_programs", lambda programs: 132 * programs)
    counts = dict[str, int]()
    for stored in (expert_format, f"{expert_format}_prepacked"):
        built, _, sizes = compile_layer(16, *QWEN3, Experts(), stored)
        steps = steps_of(built["code"])
        elements = 2 * sizes.gate_up.tile.block_n if stored == expert_format else sizes.gate_up.tile.block_n
        assert elements == sizes.down.tile.block_n == 128
        instructions = [line for line in steps if re.search(r"^\s+(/\*\w+\*/)?\s*(@!?U?P\w+ )?[A-Z]", line)]
        counts[stored] = len(instructions)
    assert len([line for line in steps if "HGMMA" in line]) == 32
    # The stores in the loops are scales, which threads pass to others through shared memory.
    assert len([line for line in steps if re.search(r"\bSTS", line)]) <= 8
    assert counts[stored] < {"mxfp4": 0.82, "int4": 0.9}[expert_format] * counts[expert_format], counts
