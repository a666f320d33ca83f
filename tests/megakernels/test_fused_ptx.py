"""The fused kernels at the sizes of models: tensor cores, TMA, 16-byte rows, no spilled registers, memory that fits."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import exchange_gemm, tuning
from jax_ep.megakernels.kernels.structs import Peers
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout

pytest.importorskip("triton")

SHARED_BYTES = 227 << 10
PRODUCTS = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
# tokens per rank, hidden, columns of the first product, depth of the second
DEEPSEEK, DEEPSEEK_LONG, MIXTRAL = (4096, 7168, 4096, 2048), (16384, 7168, 4096, 2048), (1024, 4096, 28672, 14336)
DEEPSEEK_SHORT, QWEN = (1024, 7168, 4096, 2048), (4096, 2048, 1536, 768)
COMMON = ["row_slot_ptr", "sizes_ptr", "ids_ptr"]
PEERS = {"peers": Peers("*i32", "*i64", "*i32")}


def layout(tokens: int) -> Layout:
    return Layout(num_ranks=4, num_experts=256, num_tokens=tokens, top_k=8, capacity=8 * tokens + 1024)


def sizes(lay: Layout) -> dict[str, Any]:
    heap = {"HEAP": heap_of(HeapLayout(4), 4, 1)}
    local = lay.num_local_experts
    return heap | {"T": lay.num_tokens, "K": 8, "L": local, "BLOCK_L": local, "R": lay.capacity}


def matrices(blocks: dict[str, int], transposed: bool) -> str:
    shape = (blocks["BN"], blocks["BK"]) if transposed else (blocks["BK"], blocks["BN"])
    return f"tensordesc<bf16[1, {shape[0]}, {shape[1]}]>"


def check(built: dict, capability: int) -> None:
    assert re.search(PRODUCTS[capability], built["ptx"]), "the tensor cores are not used"
    assert "cp.async.bulk.tensor" in built["ptx"], "matrices do not come by TMA"
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]), "rows are not stored 16 bytes at a time"
    assert not re.search(r"st\.global\.b16", built["ptx"]), "2-byte stores: an alignment hint was lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert built["shared"] <= SHARED_BYTES
    assert built["scratch"] == 0


def check_flat(built: dict, blocks: dict[str, int], num_stages: int) -> None:
    """One loop over tiles and their depth: a tile has memory to be stored through while the next one is loaded."""
    loaded = 2 * num_stages * blocks["BK"] * (blocks["BM"] + blocks["BN"])
    assert built["shared"] > loaded + (8 << 10)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("shape", "transposed", "keep"), [(DEEPSEEK, False, True), (MIXTRAL, True, False)])
@pytest.mark.slow(unless={"shape": [DEEPSEEK]})
def test_dispatch_gemm(shape: tuple[int, ...], transposed: bool, keep: bool, capability: int, on_h200: None) -> None:
    tokens, hidden, columns, _ = shape
    lay = layout(tokens)
    config, blocks = tuning.dispatch_gemm(hidden, columns)
    types = dict.fromkeys([*COMMON, "order_ptr", "num_sends_ptr", "num_needed_ptr"], "*i32") | PEERS
    types |= dict.fromkeys(["x_ptr", "out_ptr", "kept_ptr"], "*bf16") | {"b_desc": matrices(blocks, transposed)}
    constants = sizes(lay) | blocks | {"H": hidden, "N": columns, "TRANSPOSED": transposed, "KEEP": keep}
    built = build("dispatch_gemm", "dispatch_gemm", types, constants, config.num_warps, config.num_stages, capability)
    check(built, capability)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("shape", "transposed", "drops"),
    [(DEEPSEEK, False, True), (DEEPSEEK, True, False), (DEEPSEEK_LONG, False, False), (MIXTRAL, True, True)],
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK], "transposed": [False]})
def test_gemm_combine(shape: tuple[int, ...], transposed: bool, drops: bool, capability: int, on_h200: None) -> None:
    tokens, hidden, _, features = shape
    lay = layout(tokens)
    config, blocks = tuning.gemm_combine(lay, hidden)
    types = dict.fromkeys([*COMMON, "slot_row_ptr", "lists_ptr"], "*i32") | PEERS | {"out_ptr": "*bf16"}
    types |= {"h_desc": f"tensordesc<bf16[{blocks['BM']}, {blocks['BK']}]>", "b_desc": matrices(blocks, transposed)}
    constants = sizes(lay) | blocks | {"F": features, "H": hidden, "TRANSPOSED": transposed, "DROPS": drops}
    constants |= exchange_gemm._NO_GRADIENT
    built = build("gemm_combine", "gemm_combine", types, constants, config.num_warps, config.num_stages, capability)
    check(built, capability)
    check_flat(built, blocks, config.num_stages)


@pytest.mark.parametrize(
    ("capability", "shape", "transposed", "drops"),
    [
        (90, DEEPSEEK, True, False),
        (90, DEEPSEEK_LONG, True, True),
        (90, MIXTRAL, False, True),
        (100, DEEPSEEK, True, False),
    ],
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK]})
def test_gemm_combine_with_weights(
    capability: int, shape: tuple[int, ...], transposed: bool, drops: bool, on_h200: None
) -> None:
    tokens, hidden, features, _ = shape
    lay = layout(tokens)
    sides = (hidden, features) if transposed else (features, hidden)
    config, blocks = tuning.gemm_combine_products(lay, *sides, transpose_rhs=transposed)
    types = dict.fromkeys([*COMMON, "slot_row_ptr", "lists_ptr"], "*i32") | PEERS
    stored = f"1,{blocks['WEIGHT_M']},{blocks['WEIGHT_N'] // blocks['WEIGHT_PARTS']}"
    types |= {"out_ptr": "*bf16", "products": f"tensordesc<bf16[{stored}]>", "b_desc": matrices(blocks, transposed)}
    types["h_desc"] = f"tensordesc<bf16[{blocks['BM']}, {blocks['BK']}]>"
    for name, width in (("lhs", "WEIGHT_M"), ("rhs", "WEIGHT_N")):
        types[name] = f"tensordesc<bf16[1, 1, {blocks['WEIGHT_R']}, {blocks[width]}]>"
    constants = sizes(lay) | blocks | {"F": features, "H": hidden, "TRANSPOSED": transposed, "DROPS": drops}
    built = build("gemm_combine", "gemm_combine", types, constants, config.num_warps, config.num_stages, capability)
    check(built, capability)
    check_flat(built, blocks, config.num_stages)
    assert "serialized" not in built["report"], built["report"]  # products that do not overlap
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", built["ptx"]), "rows and tokens do not come by TMA"


@pytest.mark.parametrize(
    ("capability", "shape", "transposed"), [(90, DEEPSEEK, True), (90, DEEPSEEK_LONG, False), (100, MIXTRAL, True)]
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK]})
def test_combine_with_weights(capability: int, shape: tuple[int, ...], transposed: bool, on_h200: None) -> None:
    """Two programs fit on a multiprocessor."""
    tokens, hidden, features, _ = shape
    lay = layout(tokens)
    config, tile, blocks = tuning.combine_products(lay, hidden, jnp.dtype(jnp.bfloat16))
    types = dict.fromkeys([*COMMON[1:], "slot_row_ptr", "lists_ptr"], "*i32") | PEERS
    stored = f"1,{blocks['WEIGHT_M']},{blocks['WEIGHT_N'] // blocks['WEIGHT_PARTS']}"
    types |= {"y_ptr": "*bf16", "out_ptr": "*bf16", "products": f"tensordesc<bf16[{stored}]>"}
    for name, width in (("lhs", "WEIGHT_M"), ("rhs", "WEIGHT_N")):
        types[name] = f"tensordesc<bf16[1, 1, {blocks['WEIGHT_R']}, {blocks[width]}]>"
    sides = (hidden, features) if transposed else (features, hidden)
    constants = blocks | {"COMBINE": exchange_gemm.unquantized_sums(lay, hidden, tile)}
    constants |= {"ROWS": sides[0], "COLUMNS": sides[1]} | {name: sizes(lay)[name] for name in ("R", "BLOCK_L", "HEAP")}
    warps, stages = config.num_warps, config.num_stages
    built = build("combine_products", "combine_products", types, constants, warps, stages, capability)
    check(built, capability)
    assert "serialized" not in built["report"], built["report"]  # products that do not overlap
    assert capability != 90 or 2 * (built["shared"] + 1024) <= SHARED_BYTES + 1024
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", built["ptx"]), "rows and tokens do not come by TMA"


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("shape", "transposed"),
    [(DEEPSEEK, False), (DEEPSEEK, True), (DEEPSEEK_SHORT, False), (QWEN, False), (MIXTRAL, True)],
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK], "transposed": [False]})
def test_gemm_reduce(shape: tuple[int, ...], transposed: bool, capability: int, on_h200: None) -> None:
    tokens, hidden, _, features = shape
    lay = layout(tokens)
    config, blocks = tuning.gemm_reduce(lay, features, hidden)
    types = dict.fromkeys(["ids_ptr", "slot_row_ptr", "sizes_ptr"], "*i32")
    types |= PEERS | {"out_ptr": "*bf16", "y_ptr": "*bf16", "b_desc": matrices(blocks, transposed)}
    types |= {"h_desc": f"tensordesc<bf16[{blocks['BM']}, {blocks['BK']}]>"}
    constants = sizes(lay) | blocks | {"F": features, "H": hidden, "TRANSPOSED": transposed}
    built = build("gemm_reduce", "gemm_reduce", types, constants, config.num_warps, config.num_stages, capability)
    check(built, capability)
    check_flat(built, blocks, config.num_stages)
