"""GEMMs with quantized weights compile to PTX without a GPU: tensor cores, TMA, no spilled registers."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from compiling import compiled, registers

from jax_ep.core.kernel import Config, element_type
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


def loop_over_k(code):
    """Return the instructions of the smallest loop with products."""
    lines = [line.strip() for line in code.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    branches = [(i, labels[found[1]]) for i, x in enumerate(lines) if (found := re.search(r"BRA .*`\((\.L_\w+)\)", x))]
    loops = [lines[target : i + 1] for i, target in branches if target < i]
    return min((loop for loop in loops if any(re.search("HG?MMA", x) for x in loop)), key=len)


@pytest.mark.parametrize("stored", ["int4 prepacked", "mxfp4 prepacked"])
@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_quantized_ptx_gluon(rows, stored):
    """The loop over K spills nothing, has no barrier among the warps, and reads packed weights by matrix loads."""
    rhs, tiles = matrices(stored), quantized_gemm.gluon_tiles(rows)
    blocks = {"rows": f"bf16[{tiles.block_m}, 64]", "words": "u32[128, 16]"}
    blocks["scales"] = f"{element_type(rhs.scales.dtype)}[1, 128]"
    types = {name: f"tensordesc<{block}>" for name, block in blocks.items()}
    types |= {"sizes_ptr": "*i32", "num_taken": "*i32", "out_ptr": "*bf16", "num_taken_after": "*i32"}
    config = Config(1, num_warps=4, max_registers=quantized_gemm.gluon_registers(tiles.programs))
    constants = {"S": quantized_gemm.gluon_sizes((M, K), rhs, tiles)}
    # The producer spills when it begins: it leaves its registers to the consumer.
    few = tiles.block_m <= 16
    options = {"product": r"mma\.sync" if few else r"wgmma\.mma_async", "spills": 96, "programs": tiles.programs}
    built = compiled(quantized_gemm._GLUON, types, constants, config, **options)
    assert ".reqntid 256" in built["ptx"] and tiles.programs * 256 * registers(built) <= 65536
    loop = "\n".join(loop_over_k(built["code"]))
    assert not re.search(r"\b(STL|LDL|BAR)\b", loop)
    assert loop.count("HMMA" if few else "HGMMA") == (2 * tiles.block_m if few else 16) and "LDSM" in loop
    if few:
        limit = {"int4": 260, "mxfp4": 330}[rhs.format] + 3 * (tiles.block_m - 8)
        assert len(re.findall(r"/\*[0-9a-f]{4,}\*/", loop)) <= limit
