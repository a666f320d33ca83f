"""The grouped GEMMs with many tiles, to choose the defaults of Triton and Pallas; part of grouped_gemm.py."""

from __future__ import annotations

import argparse
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

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
from jax_ep.tools.benchmark.tiles import variations

if TYPE_CHECKING:  # these import Triton
    from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles

type AnyTiles = Tiles | WeightTiles | PallasTiles


def measure_sweep(report: Report, args: argparse.Namespace) -> None:
    """Measure TFLOP/s of many tiles, each interleaved with cuBLAS, until the time is up."""
    deadline = time.perf_counter() + args.budget
    with workers_on_cpu():
        for problem in problems(args):
            chosen = harness.chosen(sweep(problem.direction, args.quick), args.only)
            first = len(report.rows)
            for name, (product, reason) in compile_all(problem, chosen, deadline).items():
                if reason is not None or time.perf_counter() > deadline:
                    print(f"{problem.title}: {name}: {reason or f'left out after {args.budget:g} s'}", flush=True)
                    continue
                settings = dataclasses.asdict(chosen[name])
                lines = measure(report, args.rounds, args.settle, problem, {name: product}, tiles=settings)
                print(*(line for line in lines if CUBLAS not in line), sep="\n", flush=True)
            show_best(problem, report.rows[first:])


def compile_all(
    problem: Problem, tiles: dict[str, AnyTiles], deadline: float
) -> dict[str, tuple[Product, None] | tuple[None, str]]:
    """Compile in several threads; return programs by name, or the reason why there is none."""

    def compile_one(one: AnyTiles) -> tuple[Product, None] | tuple[None, str]:
        if time.perf_counter() > deadline:
            return None, "left out, the time is over"
        try:
            made: Any = (pallas if isinstance(one, PallasTiles) else triton)(problem.direction, one)
            return made.lower(*problem.operands["equal"]).compile(), None
        except Exception as error:  # compilers raise errors of any type
            return None, (str(error).strip().splitlines() or [type(error).__name__])[0][:150]

    with ThreadPoolExecutor(harness.WORKERS) as executor:
        return dict(zip(tiles, executor.map(compile_one, tiles.values()), strict=True))


def show_best(problem: Problem, rows: list[dict[str, Any]]) -> None:
    """Print the five best tiles of a problem, by distribution."""
    for distribution in DISTRIBUTIONS:
        measured = [row for row in rows if row["distribution"] == distribution and "of_cublas" in row]
        found = sorted((row["of_cublas"], row["variant"]) for row in measured if row["variant"] != CUBLAS)[:-6:-1]
        table = [(name, f"{100 * share:.1f}") for share, name in found]
        harness.show_table(f"{problem.title}, {distribution}: best", ["tiles", "% of cuBLAS"], table)


def sweep(direction: str, quick: bool) -> dict[str, AnyTiles]:
    """Return the tiles to measure, by name; with `quick` small ones, which the interpreter runs fast."""
    from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles  # imports Triton

    of_weights = direction == "weight gradient"
    if quick:
        small = WeightTiles(block_r=16, block_n=32) if of_weights else Tiles(block_k=16, block_n=32)
        return {"triton, small": small}
    by_pallas = PallasWeightTiles(256, 4) if of_weights else PallasForwardTiles()
    found = {f"triton, {name}": tiles for name, tiles in variations(WeightTiles() if of_weights else Tiles()).items()}
    return found | {f"pallas, {name}": tiles for name, tiles in variations(by_pallas).items()}
