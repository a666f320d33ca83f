"""The fused kernels at model sizes: tensor cores, TMA, 16-byte rows, no spilled registers, memory that fits."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep.core.kernel import Config
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import exchange_gemm
from jax_ep.megakernels.kernels import exchange_gemm_structs, exchange_structs, gemm_structs
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

pytest.importorskip("triton")

SHARED_BYTES = 227 << 10
PRODUCTS = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
# Tokens per rank, hidden, columns of the first GEMM, K of the second.
DEEPSEEK, DEEPSEEK_LONG, MIXTRAL = (4096, 7168, 4096, 2048), (16384, 7168, 4096, 2048), (1024, 4096, 28672, 14336)
PEERS = {"peers": exchange_structs.Peers("*i32", "*i64")}
HANDLE = exchange_gemm_structs.HandleArrays(*["*i32"] * 4)
WEIGHTS = {"weights_ptr": "*fp32", "out_weights_ptr": "*fp32"}


def layout(tokens: int) -> Layout:
    return Layout(num_ranks=4, num_experts=256, num_tokens=tokens, top_k=8, capacity=8 * tokens + 1024)


def constants(sizes: Any) -> dict[str, Any]:
    return {"S": sizes, "HEAP": heap_of(HeapLayout(4), 4, 1)}


def matrices(product: gemm_structs.GroupedGemm) -> str:
    tile = product.tile
    shape = (tile.block_n, tile.block_k) if product.transposed else (tile.block_k, tile.block_n)
    return f"tensordesc<bf16[1, {shape[0]}, {shape[1]}]>"


def of_gradient(gradient: gemm_structs.WeightGradient) -> dict[str, Any]:
    """Return types of the operands of the weight gradient and of the gradient."""
    tile = gradient.tile
    factors = [f"tensordesc<bf16[1, 1, {tile.block_rows}, {width}]>" for width in (tile.block_m, tile.block_n)]
    stored = f"tensordesc<bf16[1,{tile.block_m},{tile.block_n // gradient.store_parts}]>"
    return {"factors": gemm_structs.WeightGradientOperands(*factors), "gradient": stored}


def check(built: dict, capability: int) -> None:
    assert re.search(PRODUCTS[capability], built["ptx"]), "the tensor cores are not used"
    assert "cp.async.bulk.tensor" in built["ptx"], "matrices do not come by TMA"
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]), "rows are not stored 16 bytes at a time"
    assert not re.search(r"st\.global\.b16", built["ptx"]), "2-byte stores: an alignment hint was lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert built["shared"] <= SHARED_BYTES
    assert built["scratch"] == 0


def check_flat(built: dict, product: gemm_structs.GroupedGemm, num_stages: int) -> None:
    """Tiles and K form one loop: a tile can be stored while the next one is loaded."""
    loaded = 2 * num_stages * product.tile.block_k * (product.tile.block_m + product.tile.block_n)
    assert built["shared"] > loaded + (8 << 10)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("shape", "transposed", "keep"), [(DEEPSEEK, False, True), (MIXTRAL, True, False)])
@pytest.mark.slow(unless={"shape": [DEEPSEEK]})
def test_fused_ptx_dispatch_gemm(
    shape: tuple[int, ...], transposed: bool, keep: bool, capability: int, on_h200: None
) -> None:
    tokens, hidden, columns, _ = shape
    config, sizes = exchange_gemm.dispatch_gemm_sizes(Schedule(), layout(tokens), (hidden, columns), transposed, keep)
    types = {"handle": HANDLE, "order": exchange_gemm_structs.OrderedSends(*["*i32"] * 3)} | PEERS | WEIGHTS
    types |= {"b_desc": matrices(sizes.gemm)}
    types |= dict.fromkeys(["x_ptr", "out_ptr", "saved_ptr"], "*bf16")
    options = config.num_warps, config.num_stages, capability
    built = build("exchange_gemm", "dispatch_gemm", types, constants(sizes), *options)
    check(built, capability)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("shape", "transposed", "drops"),
    [(DEEPSEEK, False, True), (DEEPSEEK, True, False), (DEEPSEEK_LONG, False, False), (MIXTRAL, True, True)],
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK], "transposed": [False]})
def test_fused_ptx_gemm_combine(
    shape: tuple[int, ...], transposed: bool, drops: bool, capability: int, on_h200: None
) -> None:
    tokens, hidden, _, features = shape
    config, sizes = exchange_gemm.gemm_combine_sizes(layout(tokens), features, hidden, transposed)
    built = build_gemm_combine(config, dataclasses.replace(sizes, may_drop=drops), capability)
    check(built, capability)
    check_flat(built, sizes.gemm, config.num_stages)


def test_fused_ptx_gemm_combine_bias(on_h200: None) -> None:
    tokens, hidden, _, features = DEEPSEEK
    config, sizes = exchange_gemm.gemm_combine_sizes(layout(tokens), features, hidden, False)
    built = build_gemm_combine(config, sizes, 90, bias=True)
    check(built, 90)
    check_flat(built, sizes.gemm, config.num_stages)


def test_fused_ptx_gemm_combine_float32(on_h200: None) -> None:
    tokens, hidden, _, features = DEEPSEEK
    config, sizes = exchange_gemm.gemm_combine_sizes(layout(tokens), features, hidden, False)
    built = build_gemm_combine(config, sizes, 90, out="*fp32")
    check(built, 90)
    check_flat(built, sizes.gemm, config.num_stages)


def build_gemm_combine(
    config: Config, sizes: exchange_gemm_structs.GemmCombine, capability: int, *, bias: bool = False, out: str = "*bf16"
) -> dict:
    types = {"handle": HANDLE, "sums": exchange_structs.Sums(out, "*i32")} | PEERS | WEIGHTS
    types |= {"b_desc": matrices(sizes.gemm)}
    types["h_desc"] = f"tensordesc<bf16[{sizes.gemm.tile.block_m}, {sizes.gemm.tile.block_k}]>"
    values = constants(sizes)
    if bias:
        types["bias"] = gemm_structs.Bias("*bf16", "*fp32")
    else:
        values["bias"] = None
    if sizes.gradient is None:
        values |= {"factors": None, "gradient": None}
    else:
        types |= of_gradient(sizes.gradient)
    return build("exchange_gemm", "gemm_combine", types, values, config.num_warps, config.num_stages, capability)


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
def test_fused_ptx_gemm_combine_weight_gradients(
    capability: int, shape: tuple[int, ...], transposed: bool, drops: bool, on_h200: None
) -> None:
    tokens, hidden, features, _ = shape
    widths = layout(tokens), features, hidden, transposed
    gradient = exchange_gemm.scattered_gradient_sizes(*widths)
    config, sizes = exchange_gemm.gemm_combine_sizes(*widths, gradient)
    built = build_gemm_combine(config, dataclasses.replace(sizes, may_drop=drops), capability)
    check(built, capability)
    check_flat(built, sizes.gemm, config.num_stages)
    assert "serialized" not in built["report"], built["report"]  # Matmuls that do not overlap.
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", built["ptx"]), "rows and tokens do not come by TMA"


@pytest.mark.parametrize(
    ("capability", "shape", "transposed"), [(90, DEEPSEEK, True), (90, DEEPSEEK_LONG, False), (100, MIXTRAL, True)]
)
@pytest.mark.slow(unless={"shape": [DEEPSEEK]})
def test_fused_ptx_combine_weight_gradients(
    capability: int, shape: tuple[int, ...], transposed: bool, on_h200: None
) -> None:
    """Two programs fit on a multiprocessor."""
    tokens, hidden, features, _ = shape
    config, sizes = exchange_gemm.combine_with_weight_gradient_sizes(
        Schedule(), layout(tokens), features, hidden, jnp.dtype(jnp.bfloat16), transposed
    )
    types = {"handle": HANDLE, "y_ptr": "*bf16", "sums": exchange_structs.Sums("*bf16", "*i32")} | PEERS | WEIGHTS
    types |= of_gradient(sizes.gradient)
    options = config.num_warps, config.num_stages, capability
    built = build("exchange_gemm", "combine_with_weight_gradient", types, constants(sizes), *options)
    check(built, capability)
    assert "serialized" not in built["report"], built["report"]  # Matmuls that do not overlap.
    assert capability != 90 or 2 * (built["shared"] + 1024) <= SHARED_BYTES + 1024
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared", built["ptx"]), "rows and tokens do not come by TMA"
