"""The masked kernels compile to PTX without a GPU: tensor cores, TMA, no spilled registers, memory that fits."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from compiling import TENSOR_CORES, compiled

from jax_ep import Experts, ffi
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import low_latency, masked, quantized_gemm
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels.exchange_structs import Peers
from jax_ep.megakernels.kernels.low_latency_structs import RowSources
from jax_ep.megakernels.launch import heap_of
from jax_ep.quantization import quantize
from jax_ep.types import Layout
from oracle_experts import GPT_OSS

G, M, K, N, INNER, RANKS, TOKENS = 64, 512, 7168, 4096, 2048, 4, 128
# Tokens of one rank of four, and the expected rows per expert.
EXPECTED = {16: 4, 32: 16, 64: 32, 128: 64}


def operands(tiles, fp8, out):
    element = "fp8e4nv" if fp8 else "bf16"
    types = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "sizes_ptr": "*i32"}
    types["lhs"] = f"tensordesc<{element}[1,{tiles.block_m},{tiles.block_k}]>"
    types["rhs"] = f"tensordesc<{element}[1,{tiles.block_n},{tiles.block_k}]>"
    return types | {"out_ptr": f"*{out}"}


def compile_gemm(tiles, fp8, out, capability):
    columns = tiles.block_m if tiles.block_m < 64 else tiles.block_n
    product = rf"wgmma\.mma_async\S*n{columns}k" if capability == 90 else TENSOR_CORES[100]
    constants, options = {"S": masked.gemm_sizes(G, M, N, K, fp8, tiles)}, {"programs": tiles.programs}
    return compiled(masked._GEMM, operands(tiles, fp8, out), constants, tiles, capability, product=product, **options)


CASES = [(90, rows, fp8, out) for rows in EXPECTED for fp8 in (True, False) for out in ("bf16", "fp32")]
CASES += [(100, rows, fp8, "bf16") for rows in (64, 128) for fp8 in (True, False)]


@pytest.mark.parametrize(("capability", "block_m", "fp8", "out"), CASES)
def test_masked_ptx_gemm(capability, block_m, fp8, out):
    tiles = masked.masked_tiles(M, EXPECTED[block_m], 1 if fp8 else 2, 2 if out == "bf16" else 4)
    assert tiles.block_m == block_m and tiles.num_stages >= 3
    compile_gemm(tiles, fp8, out, capability)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("block_m", EXPECTED)
def test_masked_ptx_gemm_combine(block_m, fp8, bias):
    """The epilogue that stores rows at their source ranks leaves registers free, and stores 16 bytes at a time."""
    tiles = masked.masked_tiles(RANKS * TOKENS, EXPECTED[block_m], 1 if fp8 else 2, 2)
    types = operands(tiles, fp8, "bf16") | {"bias_ptr": "*bf16" if bias else None}
    product = masked.gemm_sizes(G, RANKS * TOKENS, K, INNER, fp8, tiles)
    compile_combine(types, product, tiles, TENSOR_CORES[90], tiles.programs)


def compile_combine(types, product, tiles, instruction, programs):
    types |= {"weights_ptr": "*fp32", "sources": RowSources(*["*i32"] * 4), "peers": Peers("*i32", "*i64")}
    layout = Layout(RANKS, RANKS * G, TOKENS, 8, RANKS * G * TOKENS)
    heap = heap_of(HeapLayout(RANKS), RANKS, int(ffi.Operation.LOW_LATENCY_GEMM_COMBINE))
    constants = {"S": low_latency.gemm_combine_sizes(layout, TOKENS, K, product, 4352), "HEAP": heap}
    return compiled(low_latency._GEMM_COMBINE, types, constants, tiles, product=instruction, programs=programs)


@pytest.mark.parametrize("expert_format", ["mxfp4", "fp8_channel"])
@pytest.mark.parametrize("expected_rows", [8, 64])
@pytest.mark.parametrize("tokens_in", ["bf16", "fp8e4nv"])
def test_masked_ptx_gemm_combine_quantized_weights(tokens_in, expected_rows, expert_format):
    activations = "fp8" if tokens_in == "fp8e4nv" else None
    run = partial(quantize, format=expert_format, activations=activations)
    w = jax.eval_shape(run, jax.ShapeDtypeStruct((G, INNER, K), jnp.bfloat16))
    tiles = quantized_gemm.quantized_tiles(expected_rows, activations)
    product = quantized_gemm.sizes_of(RANKS * TOKENS, w, tiles)
    stored, scales = ("u8", "*u8") if expert_format == "mxfp4" else ("fp8e4nv", "*fp32")
    types = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": scales, "bias_ptr": None}
    types["lhs"] = f"tensordesc<{tokens_in}[1,{tiles.block_m},128]>"
    types["rhs"] = f"tensordesc<{stored}[1,{tiles.block_n},{128 // product.values_per_byte}]>"
    types |= {"sizes_ptr": "*i32", "out_ptr": "*bf16"}
    wgmma = activations or expected_rows > 48
    built = compile_combine(types, product, tiles, TENSOR_CORES[90] if wgmma else r"mma\.sync", 1)
    assert tiles.programs * (built["shared"] + 1024) <= 228 << 10


def test_masked_ptx_smallest_tiles(monkeypatch):
    for capability, rows in (("9.0", 16), ("10.0", 64)):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(masked.jax, "local_devices", lambda device=device: [device])
        assert masked.masked_tiles(M, 1, 1, 2).block_m == rows


def test_masked_ptx_loads_overlap_epilogue():
    """Tiles and K form one loop: its loads follow its matmuls, and there are no others."""
    ptx = compile_gemm(masked.masked_tiles(M, 4, 1, 2), True, "bf16", 90)["ptx"]
    loads, last = list(re.finditer(r"cp\.async\.bulk\.tensor", ptx)), ptx.rindex("wgmma.mma_async")
    assert len([load for load in loads if load.start() > last]) == 2
    assert len(re.findall(r"^\$L__BB\d+_\d+: +// =>This.*Loop Header", ptx, re.MULTILINE)) == 1


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gpt-oss"])
def test_masked_ptx_activation(monkeypatch, activation, quantize, capability):
    types = {"hidden_ptr": "*bf16", "sizes_ptr": "*i32", "scales_ptr": "*fp32"}
    types["out_ptr"] = "*fp8e4nv" if quantize else "*bf16"
    experts = GPT_OSS if activation == "gpt-oss" else Experts(activation)
    constants = {"S": masked.activation_sizes(G, M, INNER, quantize), "KIND": kind_of(experts)}
    types["bias_ptr"] = "*bf16" if experts is GPT_OSS else None
    monkeypatch.setattr(masked, "num_programs", lambda *_: 1056)
    config = masked.activation_config(1056)
    options = {"wide": not quantize, "programs": masked.ACTIVATION_PROGRAMS}
    ptx = compiled(masked._ACTIVATION, types, constants, config, capability, **options)["ptx"]
    assert "ld.global.v4.b32" in ptx, "rows are not loaded 16 bytes at a time"
    assert re.search(r"st\.global\.v[24]\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.b(8|16)\b", ptx), "short accesses: an alignment hint was lost"
