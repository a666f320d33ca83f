"""The fused kernels at model sizes: tensor cores, TMA, 16-byte rows, no spilled registers, memory that fits."""

import dataclasses
import re

import pytest
from compiling import TENSOR_CORES, compiled

import jax_ep
from jax_ep.core.kernel import Config
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import exchange_gemm
from jax_ep.megakernels.kernels import exchange_gemm_structs, exchange_structs, gemm_structs
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

pytest.importorskip("triton")

# Tokens per rank, hidden, columns of the first GEMM, K of the second.
DEEPSEEK, DEEPSEEK_LONG, MIXTRAL = (4096, 7168, 4096, 2048), (16384, 7168, 4096, 2048), (1024, 4096, 28672, 14336)
PEERS = {"peers": exchange_structs.Peers("*i32", "*i64")}
HANDLE = exchange_gemm_structs.HandleArrays(*["*i32"] * 4)
WEIGHTS = {"weights_ptr": "*fp32", "out_weights_ptr": "*fp32"}


def layout(tokens):
    return Layout(num_ranks=4, num_experts=256, num_tokens=tokens, top_k=8, capacity=8 * tokens + 1024)


def constants(sizes):
    return {"S": sizes, "HEAP": heap_of(HeapLayout(4), 4, 1)}


def matrices(product):
    tile = product.tile
    shape = (tile.block_n, tile.block_k) if product.transposed else (tile.block_k, tile.block_n)
    name = f"tensordesc<bf16[1, {shape[0]}, {shape[1]}]>"
    return gemm_structs.SplitWeights(name, name) if product.home_groups else name


def in_two_arrays(sizes):
    """Return the sizes of a kernel whose last two experts are copies in their own array."""
    return dataclasses.replace(sizes, gemm=dataclasses.replace(sizes.gemm, home_groups=sizes.gemm.num_groups - 2))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("shape", "transposed", "keep"), [(DEEPSEEK, False, True), (MIXTRAL, True, False)])
@pytest.mark.parametrize("splits", [False, True], ids=["one array", "two arrays"])
def test_fused_ptx_dispatch_gemm(shape, transposed, keep, splits, capability, on_h200):
    tokens, hidden, columns, _ = shape
    product = exchange_gemm._gemm_sizes(layout(tokens), hidden, columns, transposed)
    config, sizes = Config(1, 8, 4), exchange_gemm.dispatch_gemm_sizes(Schedule(), layout(tokens), product, keep)
    sizes = in_two_arrays(sizes) if splits else sizes
    types = {"handle": HANDLE, "order": exchange_gemm_structs.OrderedSends(*["*i32"] * 3)} | PEERS | WEIGHTS
    types |= {"b_desc": matrices(sizes.gemm)}
    types |= dict.fromkeys(["x_ptr", "out_ptr", "saved_ptr"], "*bf16")
    compiled(
        exchange_gemm._DISPATCH_GEMM, types, constants(sizes), config, capability, product=TENSOR_CORES[capability]
    )


@pytest.mark.parametrize("what", ["", "transposed", "two arrays", "activated", "saves tokens", "traced"])
def test_fused_ptx_dispatch_gemm_gluon(what, on_h200):
    tokens, hidden, columns, _ = DEEPSEEK
    experts = jax_ep.Experts() if what == "activated" else None
    options = {"transpose": what == "transposed", "experts": experts}
    product = exchange_gemm.gathered_gemm16(layout(tokens), (hidden, columns), 8, **options)
    sizes = exchange_gemm.dispatch_gemm_sizes(Schedule(), layout(tokens), product, what == "saves tokens")
    sizes = in_two_arrays(sizes) if what == "two arrays" else sizes
    box = (product.box_n, product.depth) if product.transposed else (product.depth, product.box_n)
    name = f"tensordesc<bf16[1, {box[0]}, {box[1]}]>"
    types = {"handle": HANDLE, "order": exchange_gemm_structs.OrderedSends(*["*i32"] * 3)} | PEERS | WEIGHTS
    types |= {"rhs": gemm_structs.SplitWeights(name, name) if what == "two arrays" else name}
    types |= {"out": f"tensordesc<bf16[1, 1, 64, {product.part_n}]>", "x_ptr": "*bf16", "saved_ptr": "*bf16"}
    heap = heap_of(HeapLayout(4), 4, 1, what == "traced")
    kernel = exchange_gemm._DISPATCH_GEMM16
    built = compiled(kernel, types, {"S": sizes, "HEAP": heap}, Config(1, 4), product=TENSOR_CORES[90])
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", built["ptx"]), (
        "rows are not gathered 16 bytes at a time"
    )


CASES = [(DEEPSEEK, False, True), (DEEPSEEK, True, False), (DEEPSEEK_LONG, False, False), (MIXTRAL, True, True)]
CASES = [(*case, capability, "") for case in CASES for capability in (90, 100)]
CASES += [(DEEPSEEK, False, True, 90, what) for what in ("bias", "float32")]
CASES += [(shape, transposed, True, 90, "two arrays") for shape in (DEEPSEEK, MIXTRAL) for transposed in (False, True)]


@pytest.mark.parametrize(("shape", "transposed", "drops", "capability", "what"), CASES)
def test_fused_ptx_gemm_combine(shape, transposed, drops, capability, what, on_h200):
    tokens, hidden, columns, features = shape
    depth = columns if what == "two arrays" and transposed else features
    config, sizes = exchange_gemm.gemm_combine_sizes(layout(tokens), depth, hidden, transposed)
    sizes = in_two_arrays(sizes) if what == "two arrays" else dataclasses.replace(sizes, may_drop=drops)
    options = {"bias": {"bias": True}, "float32": {"out": "*fp32"}}.get(what, {})
    build_gemm_combine(config, sizes, capability, **options)


def build_gemm_combine(config, sizes, capability, *, bias=False, out="*bf16"):
    types = {"handle": HANDLE, "sums": exchange_structs.Sums(out, "*i32")} | PEERS | WEIGHTS
    types |= {"b_desc": matrices(sizes.gemm)}
    types["h_desc"] = f"tensordesc<bf16[{sizes.gemm.tile.block_m}, {sizes.gemm.tile.block_k}]>"
    types["bias"] = gemm_structs.Bias("*bf16", "*fp32") if bias else None
    product = TENSOR_CORES[capability]
    built = compiled(exchange_gemm._GEMM_COMBINE, types, constants(sizes), config, capability, product=product)
    # Tiles and K form one loop: a tile can be stored while the next one is loaded.
    tile = sizes.gemm.tile
    loaded = 2 * config.num_stages * tile.block_k * (tile.block_m + tile.block_n)
    assert built["shared"] > loaded + (8 << 10)
    return built
