"""The masked kernels compile to PTX without a GPU: tensor cores, TMA, no spilled registers, memory that fits."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep import Experts, ffi
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import low_latency, masked, quantized_gemm
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels.exchange_structs import Peers
from jax_ep.megakernels.kernels.low_latency_structs import RowSources
from jax_ep.megakernels.launch import heap_of
from jax_ep.megakernels.masked import MaskedTiles
from jax_ep.quantization import quantize
from jax_ep.types import Layout
from oracle_experts import GPT_OSS

G, M, K, N, INNER = 64, 512, 7168, 4096, 2048
SHARED_BYTES = 227 << 10  # Of a multiprocessor.
# Tokens of one rank of four, and the expected rows per expert.
EXPECTED = {16: 4, 32: 16, 64: 32, 128: 64}


def compile_gemm(tiles: MaskedTiles, fp8: bool, out: str, capability: int) -> Any:
    element = "fp8e4nv" if fp8 else "bf16"
    types: dict[str, Any] = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "sizes_ptr": "*i32"}
    types["lhs"] = f"tensordesc<{element}[1,{tiles.block_m},{tiles.block_k}]>"
    types["rhs"] = f"tensordesc<{element}[1,{tiles.block_n},{tiles.block_k}]>"
    types["out_ptr"] = f"*{out}"
    constants = {"S": masked.gemm_sizes(G, M, N, K, fp8, tiles)}
    kernel = masked._GEMM
    return build(kernel.path.stem, kernel.name, types, constants, tiles.num_warps, tiles.num_stages, capability)


CASES = [(90, rows, fp8, out) for rows in EXPECTED for fp8 in (True, False) for out in ("bf16", "fp32")]
CASES += [(100, rows, fp8, "bf16") for rows in (64, 128) for fp8 in (True, False)]


@pytest.mark.parametrize(("capability", "block_m", "fp8", "out"), CASES)
@pytest.mark.slow(unless={"block_m": [16], "out": ["bf16"]})
def test_masked_ptx_gemm(capability: int, block_m: int, fp8: bool, out: str) -> None:
    tiles = masked.masked_tiles(M, EXPECTED[block_m], 1 if fp8 else 2, 2 if out == "bf16" else 4)
    assert tiles.block_m == block_m
    built = compile_gemm(tiles, fp8, out, capability)
    columns = block_m if block_m < 64 else tiles.block_n
    product = rf"wgmma\.mma_async\S*n{columns}k" if capability == 90 else r"tcgen05\.mma"
    assert re.search(product, built["ptx"]), "the tensor cores are not used"
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared", built["ptx"]), "not read by TMA"
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]), "results are not stored 16 bytes at a time"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert "serialized" not in built["report"], built["report"]
    assert built["scratch"] == 0
    assert tiles.programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024  # The driver needs 1 KB per program.
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert tiles.programs * tiles.num_warps * 32 * registers <= 65536
    assert tiles.num_stages >= 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("block_m", EXPECTED)
@pytest.mark.slow(unless={"block_m": [128], "bias": [True]})
def test_masked_ptx_gemm_combine(block_m: int, fp8: bool, bias: bool) -> None:
    """The epilogue that stores rows at their source ranks leaves registers free, and stores 16 bytes at a time."""
    num_ranks, tokens, top_k = 4, 128, 8
    tiles = masked.masked_tiles(num_ranks * tokens, EXPECTED[block_m], 1 if fp8 else 2, 2)
    element = "fp8e4nv" if fp8 else "bf16"
    types: dict[str, Any] = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "weights_ptr": "*fp32"}
    types["lhs"] = f"tensordesc<{element}[1,{tiles.block_m},{tiles.block_k}]>"
    types["rhs"] = f"tensordesc<{element}[1,{tiles.block_n},{tiles.block_k}]>"
    types |= {"sizes_ptr": "*i32", "sources": RowSources(*["*i32"] * 4)}
    types |= {"out_ptr": "*bf16", "peers": Peers("*i32", "*i64")}
    layout = Layout(num_ranks, num_ranks * G, tokens, top_k, num_ranks * G * tokens)
    product = masked.gemm_sizes(G, num_ranks * tokens, K, INNER, fp8, tiles)
    sizes = low_latency.gemm_combine_sizes(layout, tokens, K, product, 4352)
    heap = heap_of(HeapLayout(num_ranks), num_ranks, int(ffi.Operation.LOW_LATENCY_GEMM_COMBINE))
    kernel, shape = low_latency._GEMM_COMBINE, (tiles.num_warps, tiles.num_stages, 90)
    constants: dict[str, Any] = {"S": sizes, "HEAP": heap}
    if bias:
        types["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    built = build(kernel.path.stem, kernel.name, types, constants, *shape)
    assert "wgmma.mma_async" in built["ptx"] and "cp.async.bulk.tensor.3d.shared" in built["ptx"]
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]), "rows are not stored 16 bytes at a time"
    assert not re.search(r"st\.global\.b(8|16)\b", built["ptx"]), "short stores: an alignment hint was lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert "serialized" not in built["report"], built["report"]
    assert tiles.programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert tiles.programs * tiles.num_warps * 32 * registers <= 65536


@pytest.mark.parametrize("expert_format", ["mxfp4", "fp8_channel"])
@pytest.mark.parametrize("expected_rows", [8, 64])
@pytest.mark.parametrize("tokens_in", ["bf16", "fp8e4nv"])
@pytest.mark.slow(unless={"expert_format": ["mxfp4"], "expected_rows": [8], "tokens_in": ["fp8e4nv"]})
def test_masked_ptx_gemm_combine_quantized_weights(tokens_in: str, expected_rows: int, expert_format: str) -> None:
    num_ranks, tokens, top_k = 4, 128, 8
    activations = "fp8" if tokens_in == "fp8e4nv" else None
    run = partial(quantize, format=expert_format, activations=activations)
    w = jax.eval_shape(run, jax.ShapeDtypeStruct((G, INNER, K), jnp.bfloat16))
    rows = num_ranks * tokens
    tiles = quantized_gemm.quantized_tiles(expected_rows, activations)
    product = quantized_gemm.sizes_of(rows, w, tiles)
    layout = Layout(num_ranks, num_ranks * G, tokens, top_k, num_ranks * G * tokens)
    sizes = low_latency.gemm_combine_sizes(layout, tokens, K, product, 4352)
    heap = heap_of(HeapLayout(num_ranks), num_ranks, int(ffi.Operation.LOW_LATENCY_GEMM_COMBINE))
    stored, scales = ("u8", "*u8") if expert_format == "mxfp4" else ("fp8e4nv", "*fp32")
    types: dict[str, Any] = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": scales, "weights_ptr": "*fp32"}
    types["lhs"] = f"tensordesc<{tokens_in}[1,{tiles.block_m},128]>"
    types["rhs"] = f"tensordesc<{stored}[1,{tiles.block_n},{128 // product.values_per_byte}]>"
    types |= {"sizes_ptr": "*i32", "sources": RowSources(*["*i32"] * 4)}
    types |= {"out_ptr": "*bf16", "peers": Peers("*i32", "*i64")}
    constants: dict[str, Any] = {"S": sizes, "HEAP": heap, "bias_ptr": None}
    kernel = low_latency._GEMM_COMBINE
    built = build(kernel.path.stem, kernel.name, types, constants, tiles.num_warps, tiles.num_stages, 90)
    assert ("wgmma.mma_async" if activations or expected_rows > 48 else "mma.sync") in built["ptx"]
    assert "cp.async.bulk.tensor.3d.shared" in built["ptx"]
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]), "rows are not stored 16 bytes at a time"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert tiles.programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024


def test_masked_ptx_smallest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, rows in (("9.0", 16), ("10.0", 64)):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(masked.jax, "local_devices", lambda device=device: [device])
        assert masked.masked_tiles(M, 1, 1, 2).block_m == rows


def test_masked_ptx_loads_overlap_epilogue() -> None:
    """Tiles and K form one loop: its loads follow its matmuls, and there are no others."""
    ptx = compile_gemm(masked.masked_tiles(M, 4, 1, 2), True, "bf16", 90)["ptx"]
    loads, last = list(re.finditer(r"cp\.async\.bulk\.tensor", ptx)), ptx.rindex("wgmma.mma_async")
    assert len([load for load in loads if load.start() > last]) == 2
    assert len(re.findall(r"^\$L__BB\d+_\d+: +// =>This.*Loop Header", ptx, re.MULTILINE)) == 1


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gpt-oss"])
@pytest.mark.slow(unless={"activation": ["silu"]})
def test_masked_ptx_activation(
    monkeypatch: pytest.MonkeyPatch, activation: str, quantize: bool, capability: int
) -> None:
    types = {"hidden_ptr": "*bf16", "sizes_ptr": "*i32", "scales_ptr": "*fp32"}
    types["out_ptr"] = "*fp8e4nv" if quantize else "*bf16"
    experts = GPT_OSS if activation == "gpt-oss" else Experts(activation)
    constants = {"S": masked.activation_sizes(G, M, INNER, quantize), "KIND": kind_of(experts)}
    if experts is GPT_OSS:
        types["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    monkeypatch.setattr(masked, "num_programs", lambda *_: 1056)
    config = masked.activation_config(1056)
    launch = config.num_warps, config.num_stages, capability, config.max_registers
    built = build(masked._ACTIVATION.path.stem, masked._ACTIVATION.name, types, constants, *launch)
    assert "ld.global.v4.b32" in built["ptx"], "rows are not loaded 16 bytes at a time"
    assert re.search(r"st\.global\.v4\.b32" if not quantize else r"st\.global\.v[24]\.b32", built["ptx"])
    assert not re.search(r"(ld|st)\.global\.b(8|16)\b", built["ptx"]), "short accesses: an alignment hint was lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert masked.ACTIVATION_PROGRAMS * 32 * config.num_warps * registers <= 65536
