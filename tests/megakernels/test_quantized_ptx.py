"""GEMMs with quantized weights compile to PTX without a GPU: tensor cores, TMA, no spilled registers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from compiling import compiled

from jax_ep.core.kernel import element_type
from jax_ep.megakernels import quantized_gemm
from jax_ep.quantization import quantize, with_layout
from stored_experts import STORED

G, M, K, N = 128, 4096, 2048, 1536


def matrices(stored, activations=None):
    run = partial(quantize, format=stored.split()[0], activations=activations)
    found = jax.eval_shape(run, jax.ShapeDtypeStruct((G, K, N), jnp.float32))
    return jax.eval_shape(partial(with_layout, layout="prepacked"), found) if stored.endswith(" prepacked") else found


def compile_gemm(kernel, rhs, rows, product):
    tiles = quantized_gemm.quantized_tiles(rows, rhs.activations, prepacked=rhs.is_prepacked)
    sizes = quantized_gemm.sizes_of(M, rhs, tiles)
    types = {"sizes_ptr": "*i32", "out_ptr": "*bf16"}
    types["row_scales_ptr"] = None if rhs.activations is None else "*fp32"
    rows_type = "bf16" if rhs.activations is None else "i8"
    types["scales_ptr"] = f"*{element_type(rhs.scales.dtype)}"
    for name, block in zip(("lhs", "rhs"), quantized_gemm.blocks_of(None, rhs, tiles), strict=True):
        kind = rows_type if name == "lhs" else element_type(rhs.values.dtype)
        types[name] = f"tensordesc<{kind}[{','.join(map(str, block.block_shape))}]>"
    return compiled(kernel, types, {"S": sizes}, tiles, product=product, wide=False, programs=tiles.programs)


@pytest.mark.parametrize("rows", [4, 64])
def test_quantized_ptx_int8_rows(rows):
    compile_gemm(quantized_gemm._GROUPED, matrices("int8", "int8"), rows, r"wgmma\.mma_async\S*\.s32\.s8\.s8")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [4, 16, 32, 64])
@pytest.mark.parametrize("kernel", [quantized_gemm._GROUPED, quantized_gemm._MASKED], ids=lambda k: k.name)
def test_quantized_ptx_kernels(kernel, rows, stored):
    # Tiles of 64 rows and more are for many rows; others use registers as operands, which takes fewer instructions.
    wide = rows > 48 or stored.endswith(" prepacked") or (stored.startswith("fp8") and rows > 8)
    built = compile_gemm(kernel, matrices(stored), rows, r"wgmma\.mma_async" if wide else r"mma\.sync")
    assert "mul.ftz" not in built["ptx"], "subnormal numbers, as those of e2m1 are on their way, are lost"
