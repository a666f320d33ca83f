"""The grouped GEMM in FP8 compiles to PTX without a GPU: tensor cores, TMA, no spilled registers, memory that fits."""

import re

import jax
import pytest
from compiling import TENSOR_CORES, compiled, registers

from jax_ep.core.fp8 import num_blocks
from jax_ep.core.kernel import Config
from jax_ep.megakernels import compile, grouped_gemm
from jax_ep.megakernels.grouped_gemm import Fp8Tiles
from jax_ep.megakernels.kernels import gemm_structs

pytest.importorskip("triton")

# rows, K, N, groups
DEEPSEEK, FEW_ROWS, ODD = (32768, 7168, 4096, 64), (1024, 4096, 3072, 128), (4096, 1152, 515, 1000)
PRODUCT = r"wgmma\.mma_async\S*n128k32\.f32\.e4m3\.e4m3"
CASES = [(90, size, out) for size in (DEEPSEEK, FEW_ROWS) for out in ("bf16", "fp32")]
CASES += [(90, ODD, "bf16"), (100, DEEPSEEK, "bf16"), (100, FEW_ROWS, "bf16")]


def compile_fp8(kernel, sizes, tiles, out, size, capability, leading):
    types = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "sizes_ptr": "*i32"} | out
    types["lhs"] = f"tensordesc<fp8e4nv[{leading}{tiles.block_m},128]>"
    types["rhs"] = f"tensordesc<fp8e4nv[{leading}{tiles.block_n},128]>"
    product = PRODUCT if capability == 90 else TENSOR_CORES[100]
    options = {"product": product, "wide": size != ODD, "programs": tiles.programs}
    return compiled(kernel, types, {"S": sizes}, tiles, capability, **options)


def compile_gemm(tiles, size, out, capability):
    rows, depth, columns, groups = size
    sizes = grouped_gemm.fp8_sizes(rows, columns, depth, groups, tiles)
    return compile_fp8(grouped_gemm._FP8, sizes, tiles, {"out_ptr": f"*{out}"}, size, capability, "1,")


@pytest.mark.parametrize(("capability", "size", "out"), CASES)
def test_gemm_fp8_ptx_gemm(monkeypatch, capability, size, out):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compile, "device_capability", lambda: capability)
    compile_gemm(grouped_gemm.fp8_tiles(size[0], size[3], 2 if out == "bf16" else 4), size, out, capability)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize(("capability", "size"), [(90, DEEPSEEK), (90, ODD), (100, DEEPSEEK)])
def test_gemm_fp8_ptx_weight_gradient(monkeypatch, capability, size, out):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compile, "device_capability", lambda: capability)
    (rows, depth, columns, groups), tiles = size, grouped_gemm.fp8_weight_tiles()
    sizes = grouped_gemm.fp8_weight_sizes(num_blocks(rows, groups) * 128, columns, depth, groups, tiles)
    compile_fp8(grouped_gemm._FP8_WEIGHT_GRADIENT, sizes, tiles, {"out": f"*{out}"}, size, capability, "")


def compile_gluon(kernel, types, sizes, rank):
    """Two consumer warpgroups, and a producer in a third one, which owns registers that it does not need."""
    types |= {"sizes": "*i32", "num_taken": "*i32", "num_taken_after": "*i32"}
    types |= {name: f"tensordesc<fp8e4nv[{n}, 128]>" for name, n in (("lhs", sizes.tile_m), ("rhs", sizes.tile_n))}
    built = compiled(kernel, types, {"S": sizes}, Config(1, num_warps=4), product=PRODUCT, wide=False)
    ptx = built["ptx"]
    assert registers(built) * 32 * 12 <= 65536
    assert re.search(rf"cp\.async\.bulk\.tensor\.{rank}d\.global", ptx), "not stored by TMA"
    assert ".reqntid 384" in ptx


@pytest.mark.parametrize(("size", "out"), [(DEEPSEEK, "bf16"), (DEEPSEEK, "fp32"), (FEW_ROWS, "bf16"), (ODD, "bf16")])
def test_gemm_fp8_ptx_gluon(size, out):
    rows, depth, columns, groups = size
    types = {"lhs_scales": "*fp32", "rhs_scales": "*fp32", "out": f"tensordesc<{out}[1, 1, 64, 128]>"}
    sizes = grouped_gemm.gluon_sizes(rows, columns, depth, groups, 2 if out == "bf16" else 4, group_m=8)
    compile_gluon(grouped_gemm._GLUON_FP8, types, sizes, 4)


@pytest.mark.parametrize(
    ("size", "out", "num_home"),
    [(DEEPSEEK, "bf16", 0), (DEEPSEEK, "fp32", 0), (ODD, "bf16", 0), (DEEPSEEK, "fp32", 62)],
)
def test_gemm_fp8_ptx_gluon_weight_gradient(size, out, num_home):
    (rows, depth, columns, groups), itemsize = size, 2 if out == "bf16" else 4
    places = num_blocks(rows, groups) * 128
    sizes = grouped_gemm.gluon_gradient_sizes(depth, columns, places, groups, itemsize, 8, num_home)
    types = {"lhs_scales": "tensordesc<fp32[1, 256]>", "rhs_scales": "tensordesc<fp32[1, 128]>"}
    block = f"tensordesc<{out}[1, 64, 128]>"
    types |= {"out": gemm_structs.SplitWeights(block, block) if num_home else block}
    compile_gluon(grouped_gemm._GLUON_FP8_WEIGHT_GRADIENT, types, sizes, 3)


def test_gemm_fp8_ptx_loads_overlap_epilogue():
    """The loops over tiles and over K are one: its loads are behind its products, and no others are."""
    ptx = compile_gemm(Fp8Tiles(), DEEPSEEK, "bf16", 90)["ptx"]
    loads, last = list(re.finditer(r"cp\.async\.bulk\.tensor", ptx)), ptx.rindex("wgmma.mma_async")
    assert len([load for load in loads if load.start() > last]) == 2
