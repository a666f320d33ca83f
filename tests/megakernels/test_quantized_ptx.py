"""GEMMs with quantized weights compile to PTX without a GPU: tensor cores, TMA, no spilled registers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import build

from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.kernel import element_type
from jax_ep.megakernels import quantized_gemm
from jax_ep.quantization import quantize, with_layout
from stored_experts import STORED

G, M, K, N = 128, 4096, 2048, 1536
SHARED_BYTES = 227 << 10  # Of a multiprocessor.


def matrices(stored: str, activations: str | None = None) -> QuantizedWeights:
    run = partial(quantize, format=stored.split()[0], activations=activations)
    found = jax.eval_shape(run, jax.ShapeDtypeStruct((G, K, N), jnp.float32))
    return jax.eval_shape(partial(with_layout, layout="prepacked"), found) if stored.endswith(" prepacked") else found


def compile_gemm(function: str, rhs: QuantizedWeights, rows: int) -> tuple[dict, quantized_gemm.QuantizedTiles]:
    tiles = quantized_gemm.quantized_tiles(rows, rhs.activations, prepacked=rhs.is_prepacked)
    sizes = quantized_gemm.sizes_of(M, rhs, tiles)
    types: dict[str, Any] = {"sizes_ptr": "*i32", "out_ptr": "*bf16"}
    constants: dict[str, Any] = {"S": sizes}
    if rhs.activations is None:
        constants["row_scales_ptr"] = None
    else:
        types["row_scales_ptr"] = "*fp32"
    rows_type = "bf16" if rhs.activations is None else "i8"
    types["scales_ptr"] = f"*{element_type(rhs.scales.dtype)}"
    for name, block in zip(("lhs", "rhs"), quantized_gemm.blocks_of(None, rhs, tiles), strict=True):
        kind = rows_type if name == "lhs" else element_type(rhs.values.dtype)
        types[name] = f"tensordesc<{kind}[{','.join(map(str, block.block_shape))}]>"
    return build("quantized_gemm", function, types, constants, tiles.num_warps, tiles.num_stages, 90), tiles


@pytest.mark.parametrize("rows", [4, 64])
def test_quantized_ptx_int8_rows(rows: int) -> None:
    built, _ = compile_gemm("quantized_grouped_gemm", matrices("int8", "int8"), rows)
    assert re.search(r"wgmma\.mma_async\S*\.s32\.s8\.s8", built["ptx"]), "integers are not multiplied as such"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [4, 16, 32, 64])
@pytest.mark.parametrize("function", ["quantized_grouped_gemm", "quantized_masked_grouped_gemm"])
@pytest.mark.slow(unless={"function": ["quantized_masked_grouped_gemm"], "stored": ["mxfp4", "mxfp4 prepacked"]})
def test_quantized_ptx_kernels(function: str, rows: int, stored: str) -> None:
    built, tiles = compile_gemm(function, matrices(stored), rows)
    # Tiles of 64 rows and more are for many rows; others use registers as operands, which takes fewer instructions.
    wide = rows > 48 or stored.endswith(" prepacked") or (stored.startswith("fp8") and rows > 8)
    assert ("wgmma.mma_async" if wide else "mma.sync") in built["ptx"], "the tensor cores are not used"
    assert "serialized" not in built["report"], built["report"]
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared", built["ptx"]), "not read by TMA"
    assert not re.search(r"mul\.ftz", built["ptx"]), "subnormal numbers, as those of e2m1 are on their way, are lost"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert tiles.programs * (built["shared"] + 1024) <= SHARED_BYTES + 1024  # The driver needs 1 KB per program.
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert tiles.programs * tiles.num_warps * 32 * registers <= 65536
