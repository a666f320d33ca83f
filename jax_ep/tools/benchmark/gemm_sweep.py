"""The grouped GEMMs with many tiles, to choose the defaults of Triton's and Pallas's; part of grouped_gemm.py."""

from __future__ import annotations

import argparse
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles
from jax_ep.pallas.tiling import ForwardTiles as PallasForwardTiles
from jax_ep.pallas.tiling import WeightTiles as PallasWeightTiles
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.gemm_kernels import (
    CUBLAS,
    DISTRIBUTIONS,
    PallasTiles,
    Problem,
    Product,
    measure,
    pallas,
    problems,
    triton,
    workers_on_cpu,
)
from jax_ep.tools.benchmark.harness import Report

type AnyTiles = Tiles | WeightTiles | PallasTiles

_BASE = Tiles()
_NARROW = dataclasses.replace(_BASE, block_n=128)
_LOW = dataclasses.replace(_BASE, block_m=64)
_WEIGHTS = WeightTiles()
# All of these compile for sm_90 without spilled registers and within 227 KB of shared memory.
FORWARD_SWEEP = (
    _BASE,
    dataclasses.replace(_BASE, num_stages=3),
    dataclasses.replace(_BASE, num_stages=3, tma_store=True),
    dataclasses.replace(_BASE, num_stages=3, tma_store=True, store_parts=2),
    dataclasses.replace(_BASE, tma_store=True, store_parts=2),
    dataclasses.replace(_BASE, tma_store=True, store_parts=4),
    dataclasses.replace(_BASE, group_m=4),
    dataclasses.replace(_BASE, group_m=16),
    dataclasses.replace(_NARROW, num_warps=4, num_stages=3, programs=2),
    dataclasses.replace(_NARROW, block_m=256),
    dataclasses.replace(_LOW, num_warps=4),
    _LOW,
    dataclasses.replace(_LOW, block_n=512, block_k=32, num_stages=5),
    dataclasses.replace(_LOW, block_n=128, num_warps=4, programs=2),
)
_BY_TMA = dataclasses.replace(_WEIGHTS, num_stages=3, tma_store=True)
_PAIRS = dataclasses.replace(_WEIGHTS, block_n=128, num_warps=4, num_stages=3, programs=2)
WEIGHT_SWEEP = (
    _WEIGHTS,
    dataclasses.replace(_WEIGHTS, num_stages=3),
    dataclasses.replace(_WEIGHTS, store_parts=2),
    dataclasses.replace(_WEIGHTS, store_parts=4),
    _BY_TMA,
    dataclasses.replace(_BY_TMA, store_parts=2),
    dataclasses.replace(_BY_TMA, num_stages=4, store_parts=2),
    dataclasses.replace(_BY_TMA, num_stages=4, store_parts=4),
    dataclasses.replace(_BY_TMA, group_m=1),
    dataclasses.replace(_BY_TMA, group_m=4),
    dataclasses.replace(_BY_TMA, group_m=16),
    dataclasses.replace(_BY_TMA, group_m=64),
    dataclasses.replace(_BY_TMA, block_r=32, num_stages=6),
    dataclasses.replace(_BY_TMA, block_r=128, num_stages=2, store_parts=2),
    dataclasses.replace(_BY_TMA, block_m=256, block_n=128),
    dataclasses.replace(_BY_TMA, block_m=256, block_n=128, num_stages=4, store_parts=2),
    _PAIRS,
    dataclasses.replace(_PAIRS, tma_store=True, store_parts=2),
    dataclasses.replace(_PAIRS, tma_store=True, store_parts=4),
    dataclasses.replace(_PAIRS, tma_store=True, store_parts=2, group_m=16),
    dataclasses.replace(_PAIRS, num_stages=2, tma_store=True),
)
PALLAS_WEIGHT_SWEEP = (
    *(PallasWeightTiles(256, 4, band) for band in (4, 8, 16)),
    PallasWeightTiles(128, 6),
)
_HEIGHTS = PallasForwardTiles().heights
PALLAS_SWEEP = (
    *(PallasForwardTiles(band=band) for band in (2, 4, 8, 16)),
    PallasForwardTiles(stages=3),
    PallasForwardTiles(_HEIGHTS[:4], stages=6),
    PallasForwardTiles(_HEIGHTS[:4], stages=6, band=8),
    PallasForwardTiles((16, *_HEIGHTS)),
)


def measure_sweep(report: Report, args: argparse.Namespace) -> None:
    """TFLOP/s of many tiles, one after another, each in turns with cuBLAS; ends when the time is up."""
    deadline = time.perf_counter() + args.budget
    with workers_on_cpu():
        for problem in problems(args):
            chosen = harness.chosen(sweep(problem.direction, args.quick), args.only)
            first = len(report.rows)
            for name, (product, reason) in compile_all(problem, chosen, deadline).items():
                if reason is not None or time.perf_counter() > deadline:
                    print(f"{problem.title}: {name}: {reason or f'left out, {args.budget:g} s are over'}", flush=True)
                    continue
                settings = dataclasses.asdict(chosen[name])
                lines = measure(report, args.rounds, args.settle, problem, {name: product}, tiles=settings)
                print(*(line for line in lines if CUBLAS not in line), sep="\n", flush=True)
            show_best(problem, report.rows[first:])


def compile_all(
    problem: Problem, tiles: dict[str, AnyTiles], deadline: float
) -> dict[str, tuple[Product, None] | tuple[None, str]]:
    """Programs by name, or the reasons why there is none; compilers run in several threads."""

    def compile_one(item: tuple[str, AnyTiles]) -> tuple[Product, None] | tuple[None, str]:
        if time.perf_counter() > deadline:
            return None, "left out, the time is over"
        try:
            made = (pallas if isinstance(item[1], PallasTiles) else triton)(problem.direction, item[1])
            return made.lower(*problem.operands["equal"]).compile(), None
        except Exception as error:  # whatever a compiler says
            return None, (str(error).strip().splitlines() or [type(error).__name__])[0][:150]

    with ThreadPoolExecutor(8) as executor:
        return dict(zip(tiles, executor.map(compile_one, tiles.items()), strict=True))


def show_best(problem: Problem, rows: list[dict[str, Any]]) -> None:
    """The five best tiles of a problem, by distribution."""
    for distribution in DISTRIBUTIONS:
        measured = [row for row in rows if row["distribution"] == distribution and "of_cublas" in row]
        best = sorted(
            ((row["of_cublas"], row["variant"]) for row in measured if row["variant"] != CUBLAS), reverse=True
        )[:5]
        table = [(name, f"{100 * share:.1f}") for share, name in best]
        harness.show_table(f"{problem.title}, {distribution}: best", ["tiles", "% of cuBLAS"], table)


def sweep(direction: str, quick: bool) -> dict[str, AnyTiles]:
    """What to try, by name; with `quick` small tiles, of the kind that the interpreter runs fast."""
    base, tried = (_WEIGHTS, WEIGHT_SWEEP) if direction == "weight gradient" else (_BASE, FORWARD_SWEEP)
    if quick:
        small = {"block_r": 16, "block_n": 32} if direction == "weight gradient" else {"block_k": 16, "block_n": 32}
        base = dataclasses.replace(base, **small)
        tried = (base,)
    by_pallas = PALLAS_WEIGHT_SWEEP if direction == "weight gradient" else PALLAS_SWEEP
    return {label(tiles): tiles for tiles in (*tried, *(() if quick else by_pallas))}


def label(tiles: AnyTiles) -> str:
    """A short name of all that decides about the kernel."""
    if isinstance(tiles, PallasForwardTiles):
        heights = f"{len(tiles.heights)} heights to {tiles.heights[-1]}"
        return f"pallas, {heights}, s{tiles.stages} b{tiles.band}"
    if isinstance(tiles, PallasWeightTiles):
        return f"pallas 128x{tiles.columns} s{tiles.stages} b{tiles.band}"
    t = dataclasses.asdict(tiles)
    size = f"{t['block_m']}x{t['block_n']}x{t.get('block_k') or t['block_r']}"
    words = [size, f"w{t['num_warps']}", f"s{t['num_stages']}", f"g{t['group_m']}"]
    words += [f"{t['programs']} per SM"] if t["programs"] > 1 else []
    words += ["tma store"] if t["tma_store"] else []
    words += [f"in {t['store_parts']}"] if t["store_parts"] > 1 else []
    return ", ".join(words)
