"""The grouped GEMM in FP8 compiles to PTX without a GPU: tensor cores, TMA, no spilled registers, memory that fits."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from compiling import build

from jax_ep.core.fp8 import num_blocks
from jax_ep.megakernels import grouped_gemm
from jax_ep.megakernels.grouped_gemm import Fp8Tiles

pytest.importorskip("triton")

MULTIPROCESSOR = {"shared": 228 << 10, "registers": 65536}
# rows, K, N, groups
DEEPSEEK, FEW_ROWS, ODD = (32768, 7168, 4096, 64), (1024, 4096, 3072, 128), (4096, 1152, 515, 1000)


def compile_gemm(tiles: Fp8Tiles, size: tuple[int, int, int, int], out: str, capability: int) -> Any:
    rows, depth, columns, groups = size
    types = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "sizes_ptr": "*i32", "out_ptr": f"*{out}"}
    types["lhs"] = f"tensordesc<fp8e4nv[1,{tiles.block_m},128]>"
    types["rhs"] = f"tensordesc<fp8e4nv[1,{tiles.block_n},128]>"
    constants = {"S": grouped_gemm.fp8_sizes(rows, columns, depth, groups, tiles)}
    kernel = grouped_gemm._FP8
    return build(kernel.path.stem, kernel.name, types, constants, tiles.num_warps, tiles.num_stages, capability)


CASES = [(90, size, out) for size in (DEEPSEEK, FEW_ROWS) for out in ("bf16", "fp32")]
CASES += [(90, ODD, "bf16"), (100, DEEPSEEK, "bf16"), (100, FEW_ROWS, "bf16")]


@pytest.mark.parametrize(("capability", "size", "out"), CASES)
def test_gemm_fp8_ptx_gemm(monkeypatch: pytest.MonkeyPatch, capability: int, size: tuple[int, ...], out: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tiles = grouped_gemm.fp8_tiles(size[0], size[3], 2 if out == "bf16" else 4)
    built = compile_gemm(tiles, size, out, capability)
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]) or size == ODD, "results are not stored 16 bytes at a time"
    check(built, tiles, capability)


def check(built: Any, tiles: Any, capability: int) -> None:
    product = r"wgmma\.mma_async\S*n128k32\.f32\.e4m3\.e4m3" if capability == 90 else r"tcgen05\.mma"
    assert re.search(product, built["ptx"]), "the tensor cores do not multiply FP8"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", built["ptx"]), "not read by TMA"
    assert re.findall(r"(\d+) bytes spill stores", built["report"]) == ["0"], built["report"]
    assert "serialized" not in built["report"], built["report"]
    assert built["scratch"] == 0
    assert tiles.programs * (built["shared"] + 1024) <= MULTIPROCESSOR["shared"]  # 1 KB of each is the driver's
    registers = int(re.findall(r"Used (\d+) registers", built["report"])[0])
    assert tiles.programs * tiles.num_warps * 32 * registers <= MULTIPROCESSOR["registers"]


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize(("capability", "size"), [(90, DEEPSEEK), (90, ODD), (100, DEEPSEEK)])
@pytest.mark.slow(unless={"size": [DEEPSEEK], "capability": [90]})
def test_gemm_fp8_ptx_weight_gradient(
    monkeypatch: pytest.MonkeyPatch, capability: int, size: tuple[int, ...], out: str
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (rows, depth, columns, groups), tiles = size, grouped_gemm.fp8_weight_tiles()
    types = {"lhs_scales_ptr": "*fp32", "rhs_scales_ptr": "*fp32", "sizes_ptr": "*i32", "out": f"*{out}"}
    types["lhs"] = f"tensordesc<fp8e4nv[{tiles.block_m},128]>"
    types["rhs"] = f"tensordesc<fp8e4nv[{tiles.block_n},128]>"
    places = num_blocks(rows, groups) * 128
    constants = {"S": grouped_gemm.fp8_weight_sizes(places, columns, depth, groups, tiles)}
    kernel = grouped_gemm._FP8_WEIGHT_GRADIENT
    config = (tiles.num_warps, tiles.num_stages, capability)
    built = build(kernel.path.stem, kernel.name, types, constants, *config)
    check(built, tiles, capability)
    assert re.search(r"st\.global\.v4\.b32", built["ptx"]) or size == ODD, "results are not stored 16 bytes at a time"


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [DEEPSEEK, FEW_ROWS, ODD])
def test_gemm_fp8_ptx_gluon(size: tuple[int, int, int, int], out: str) -> None:
    """Two consumer warpgroups, and a producer in a warpgroup of its own, which owns registers that it does not need."""
    rows, depth, columns, groups = size
    types = {"lhs": "tensordesc<fp8e4nv[128, 128]>", "rhs": "tensordesc<fp8e4nv[256, 128]>"}
    types |= {"lhs_scales": "*fp32", "rhs_scales": "*fp32", "sizes": "*i32", "num_taken": "*i32"}
    types |= {"out": f"tensordesc<{out}[1, 1, 64, 128]>", "num_taken_after": "*i32"}
    kernel, itemsize = grouped_gemm._GLUON_FP8, 2 if out == "bf16" else 4
    constants = grouped_gemm.gluon_constants(rows, columns, depth, groups, itemsize, group_m=8)
    built = build(kernel.path.stem, kernel.name, types, constants, 4, 3, 90)
    check(built, Fp8Tiles(num_warps=12), 90)
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.global", built["ptx"]), "not stored by TMA"
    assert ".reqntid 384" in built["ptx"]


def test_gemm_fp8_ptx_loads_overlap_epilogue() -> None:
    """The loops over tiles and over K are one: its loads are behind its products, and no others are."""
    ptx = compile_gemm(Fp8Tiles(), DEEPSEEK, "bf16", 90)["ptx"]
    loads, last = list(re.finditer(r"cp\.async\.bulk\.tensor", ptx)), ptx.rindex("wgmma.mma_async")
    assert len([load for load in loads if load.start() > last]) == 2
