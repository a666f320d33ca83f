"""Grouped GEMM against the number of groups, and on GPUs against cuBLAS and XLA's own `ragged_dot`.

    python benchmarks/grouped_gemm.py                     # what fits the platform
    python benchmarks/grouped_gemm.py --parts throughput --only flat einsum
    python benchmarks/grouped_gemm.py --sweep --shapes 32768,7168,4096,64 --directions forward

Parts:
  groups      (CPU) the same rows in 1 to 256 groups, forward and backward: the cost must follow the rows.
  exchange    (CPU) dispatch + combine on 8 virtual devices with 8 to 512 experts: the cost must not follow the experts.
  kernels     (GPU) TFLOP/s of the Triton and Pallas kernels on the shapes of large models, both gradients included,
              and in FP8, beside cuBLAS and, where it is installed, PyTorch.
  throughput  (GPU) TFLOP/s of formulations in plain XLA on such shapes; not run by default.
  sweep       (GPU) the kernels with many tiles, to choose the defaults; has a report of its own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import backend

import jax_ep
from jax_ep.pallas.requirements import INTERPRETER_THREADS
from jax_ep.pallas.tiling import Fp8Tiles
from lib import gemm_kernels, gemm_sweep, harness, plots
from lib.exchange_by_experts import NUM_DEVICES, measure_exchange
from lib.gemm_inputs import check, make_operands, make_sample
from lib.harness import Report, Timing
from lib.inputs import MODELS, Model

type Gemm = Callable[[Array, Array, Array], Array]

MAX_RATIO = 1.5  # required of 64 groups to 8 groups at the same rows
RAGGED_DOT_GROUPS = 32  # on the CPU ragged_dot multiplies all rows by every matrix: more groups take seconds and GBs
FLAT_GROUPS = 64  # and the flat loop computes a surplus tile for every group
VARIANT = "jax_ep.grouped_gemm"
RANKS, TOKENS = 4, 4096  # of each rank, where a model is measured


# --- formulations ---------------------------------------------------------------------------------------------------


def flat_grouped_gemm(lhs: Array, rhs: Array, sizes: Array, tile_rows: int) -> Array:
    """`jax_ep.grouped_gemm` as one loop over tiles of one size, with a static trip count.

    No more than `rows // tile_rows + groups` tiles are ever needed; the surplus ones are computed and thrown away.
    GPUs need no round trip to the host to know when such a loop ends.
    """
    num_rows, num_groups = lhs.shape[0], rhs.shape[0]
    tile_rows = min(tile_rows, num_rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    tiles = -(-sizes // tile_rows)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(num_rows // tile_rows + num_groups, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
    surplus, group = group == num_groups, jnp.minimum(group, num_groups - 1)
    first = (ends - sizes)[group] + (tile - (tile_ends - tiles)[group]) * tile_rows
    first, end = jnp.where(surplus, num_rows, first), ends[group]
    start = jnp.minimum(first, num_rows - tile_rows)

    def body(i: Array, out: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(lhs, start[i], tile_rows)
        product = jnp.dot(rows, rhs[group[i]], preferred_element_type=jnp.float32).astype(lhs.dtype)
        row = start[i] + jnp.arange(tile_rows, dtype=jnp.int32)
        mask = ((row >= first[i]) & (row < end[i]))[:, None]
        new = jnp.where(mask, product, lax.dynamic_slice_in_dim(out, start[i], tile_rows))
        return lax.dynamic_update_slice_in_dim(out, new, start[i], axis=0)

    return lax.fori_loop(0, tile.shape[0], body, jnp.zeros((num_rows, rhs.shape[2]), lhs.dtype))


@cache
def flat(tile_rows: int) -> Gemm:
    return lambda lhs, rhs, sizes: flat_grouped_gemm(lhs, rhs, sizes, tile_rows)


def grouped(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return jax_ep.grouped_gemm(lhs, rhs, sizes, implementation="xla")


def ragged_dot(lhs: Array, rhs: Array, sizes: Array) -> Array:
    return lax.ragged_dot(lhs, rhs, sizes)


def batched_einsum(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Equal groups only: one batched product, by cuBLAS on GPUs."""
    batches = lhs.reshape(rhs.shape[0], -1, lhs.shape[1])
    return jnp.einsum("gmk,gkn->gmn", batches, rhs).reshape(lhs.shape[0], rhs.shape[2])


def dense(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """All rows times the first matrix: the same FLOPs without groups."""
    return lhs @ rhs[0]


def backward(gemm: Gemm) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    """Both cotangents; XLA removes the forward pass, of which they need no result."""
    return lambda lhs, rhs, sizes, out: jax.vjp(lambda a, b: gemm(a, b, sizes), lhs, rhs)[1](out)


# --- part: groups ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What is timed: a variant on rows that are distributed over a number of groups."""

    variant: str
    distribution: str
    groups: int


def group_cases(counts: Sequence[int]) -> dict[Case, Gemm]:
    """The package on all distributions, the others on equal groups, as long as they do not take seconds."""
    cases: dict[Case, Gemm] = {Case("dense matmul", "equal", 1): dense}
    for distribution, count in itertools.product(("equal", "multinomial", "zipf"), counts):
        cases[Case(VARIANT, distribution, count)] = grouped
        if distribution == "equal" and count <= FLAT_GROUPS:
            cases[Case("flat loop, 128 rows", distribution, count)] = flat(128)
        if distribution == "equal" and count <= RAGGED_DOT_GROUPS:
            cases[Case("lax.ragged_dot", distribution, count)] = ragged_dot
    return cases


def measure_groups(report: Report, args: argparse.Namespace) -> None:
    """Time against the number of groups at the same rows."""
    rows, width = (512, 64) if args.quick else (4096, 512)
    cases = group_cases((8, 64) if args.quick else (1, 8, 16, 32, 64, 128, 256))
    shape = {"rows": rows, "k": width, "n": width, "dtype": "float32"}
    inputs = {
        case[1:]: make_operands(rows, width, width, case.groups, jnp.float32, case.distribution) for case in cases
    }
    cotangent = jax.random.normal(jax.random.key(1), (rows, width))
    for direction, products in (("forward", 1), ("backward", 2)):
        extra = (cotangent,) if direction == "backward" else ()
        jitted = {gemm: jax.jit(backward(gemm) if extra else gemm) for gemm in cases.values()}
        runs = {case: partial(jitted[gemm], *inputs[case[1:]], *extra) for case, gemm in cases.items()}
        errors = {}
        if direction == "forward":
            errors = {case: check(case.variant, run(), make_sample(*inputs[case[1:]])) for case, run in runs.items()}
        times = harness.measure_interleaved(runs, args.rounds, title=f"groups, {direction}", budget_s=5.0)
        for case, timing in times.items():
            details = {"part": "groups", "direction": direction, "distribution": case.distribution}
            details |= {"gflops": products * 2e-9 * rows * width * width / timing.median}
            details |= {"error": errors[case]} if case in errors else {}
            report.add(case.variant, shape | {"groups": case.groups}, timing, **details)
        show_groups(direction, times)
        # A round of all cases takes seconds, in which the machine changes: what is required gets short rounds.
        required = {case: run for case, run in runs.items() if case.variant == VARIANT and case.groups in (8, 64)}
        times_required = harness.measure_interleaved(required, 3 * args.rounds, title=f"64 to 8 groups, {direction}")
        summarise_ratios(report, direction, times_required)


def summarise_ratios(report: Report, direction: str, times: dict[Case, Timing]) -> None:
    """Ratios of 64 groups to 8; on a quiet machine the three estimates agree."""
    ratios = {}
    for distribution in dict.fromkeys(case.distribution for case in times):
        many, few = (times[Case(VARIANT, distribution, groups)] for groups in (64, 8))
        ratios[distribution] = {
            "within_rounds": many.ratio_to(few),
            "of_medians": many.median / few.median,
            "of_minima": min(many.samples) / min(few.samples),
            "rounds": len(many.samples),
        }
    report.summarise(**{f"{direction}_ratio_64_to_8_groups": ratios, "max_ratio": MAX_RATIO})
    table = [(name, *(f"{value:.3g}" for value in ratio.values())) for name, ratio in ratios.items()]
    columns = ["", "within rounds", "of medians", "of minima", "rounds"]
    harness.show_table(f"{direction}: 64 groups to 8, at most {MAX_RATIO} is required", columns, table)


def show_groups(direction: str, times: dict[Case, Timing]) -> None:
    curves = dict.fromkeys((case.variant, case.distribution) for case in times)
    counts = sorted({case.groups for case in times})
    table = [
        [f"{variant}, {distribution}"]
        + [times[case].milliseconds() if (case := Case(variant, distribution, n)) in times else "" for n in counts]
        for variant, distribution in curves
    ]
    harness.show_table(f"{direction}: ms by number of groups, median [quartiles]", ["", *map(str, counts)], table)


# --- part: throughput -----------------------------------------------------------------------------------------------


@cache
def chain(gemm: Gemm, length: int) -> Gemm:
    """A product that is computed `length` times, each time from operands that depend on the result before."""

    def after(lhs: Array, value: Array) -> Array:
        """`lhs` again, but XLA cannot know that, nor look through the barrier for the one element that is used."""
        first = jnp.where(jnp.isfinite(value), lhs[0, 0], jnp.zeros_like(lhs[0, 0]))
        return lax.optimization_barrier(lhs.at[0, 0].set(first))

    def fn(lhs: Array, rhs: Array, sizes: Array) -> Array:
        out = lhs  # the copy that the first update in place needs is thus part of a chain of any length
        for _ in range(length):
            lhs = after(lhs, out[-1, -1])
            out = lax.optimization_barrier(gemm(lhs, rhs, sizes))
        return out

    return fn


def measure_throughput(report: Report, args: argparse.Namespace) -> None:
    """TFLOP/s of all formulations on the shapes of large models."""
    shapes = ((65536, 7168, 4096, 32), (32768, 2048, 7168, 64), (16384, 4096, 3072, 32))
    tiles: tuple[int, ...] = (128, 256, 512)
    if args.quick:
        shapes, tiles = ((1024, 256, 256, 4),), (128,)
    gemms = {VARIANT: grouped} | {f"flat loop, {t} rows": flat(t) for t in tiles}
    gemms |= {"lax.ragged_dot": ragged_dot, "batched einsum": batched_einsum}
    gemms = harness.chosen(gemms, args.only)
    table: list[tuple[str, ...]] = []
    for shape, distribution in itertools.product(shapes, ("equal", "multinomial")):
        chosen = {n: gemm for n, gemm in gemms.items() if distribution == "equal" or gemm is not batched_einsum}
        table += throughput_rows(report, args.rounds, shape, distribution, chosen)
    harness.show_table("grouped GEMM, bf16", ["shape", "variant", "ms [quartiles]", "TFLOP/s"], table)


def throughput_rows(
    report: Report, rounds: int, sizes: tuple[int, int, int, int], distribution: str, gemms: dict[str, Gemm]
) -> list[tuple[str, ...]]:
    """Measures one shape; what a variant raises is reported, and does not end the others."""
    rows, k, n, groups = sizes
    shape = {"rows": rows, "k": k, "n": n, "groups": groups, "dtype": "bfloat16"}
    title = f"{rows}x{k}x{n} in {groups} {distribution}"
    details = {"part": "throughput", "direction": "forward", "distribution": distribution}
    operands = make_operands(rows, k, n, groups, jnp.bfloat16, distribution)
    sample = make_sample(*operands)
    errors, factories = {}, {}
    for name, gemm in gemms.items():
        try:
            errors[name] = check(name, jax.jit(chain(gemm, 1))(*operands), sample)
        except jax.errors.JaxRuntimeError as error:  # out of memory, no algorithm
            report.failed(name, shape, str(error).splitlines()[0], **details)
            continue
        factories[name] = lambda length, gemm=gemm: (chain(gemm, length), operands)
    table = []
    for name, timing in harness.measure_chained(factories, rounds, budget_s=5.0, title=title).items():
        tflops = 2e-12 * rows * k * n / timing.median
        report.add(name, shape, timing, tflops=tflops, error=errors[name], **details)
        table.append((title, name, timing.milliseconds(), f"{tflops:.3g}"))
    return table


# --- command line ---------------------------------------------------------------------------------------------------

PARTS = {
    "groups": measure_groups,
    "exchange": measure_exchange,
    "throughput": measure_throughput,
    "kernels": gemm_kernels.measure_kernels,
    "sweep": gemm_sweep.measure_sweep,
}


def shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1 or sizes[0] % sizes[3]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows,K,N,groups, whose groups divide the rows")
    return sizes


def fp8_tiles(text: str) -> Fp8Tiles:
    numbers = [int(part) for part in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected columns,stages,band")
    return Fp8Tiles(*numbers)


def shapes_of(model: Model) -> list[tuple[int, ...]]:
    """Both products of one rank of several, rows,K,N,groups, of 4096 tokens per rank."""
    groups = max(1, model.experts // RANKS)
    rows = TOKENS * model.top_k // groups * groups
    return [(rows, model.hidden, 2 * model.intermediate, groups), (rows, model.intermediate, model.hidden, groups)]


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: those of the platform; --quick: all")
    parser.add_argument("--only", nargs="+", help="throughput, kernels, sweep: variants whose names hold one of these")
    parser.add_argument("--sweep", action="store_true", help="the same as --parts sweep")
    parser.add_argument("--shapes", nargs="+", type=shape, help="kernels, sweep: rows,K,N,groups of each shape")
    parser.add_argument("--model", choices=MODELS, help=f"kernels, sweep: the shapes of {RANKS} GPUs' rank instead")
    directions = gemm_kernels.DIRECTIONS
    parser.add_argument("--directions", nargs="+", choices=directions, default=directions, help="kernels, sweep")
    tiles = "kernels: columns,stages,band of more variants in FP8, see Fp8Tiles of jax_ep/pallas/tiling.py"
    parser.add_argument("--fp8-tiles", nargs="+", type=fp8_tiles, default=(), help=tiles)
    settle = "kernels, sweep: seconds for which a variant runs before each sample; 0 has a report of its own"
    parser.add_argument("--settle", type=float, default=0.1, help=settle)
    parser.add_argument("--budget", type=float, default=480.0, help="sweep: seconds after which none is begun")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts, each with the devices it needs."""
    args = harness.parse(options(), arguments)
    args.parts = ["sweep"] if args.sweep else args.parts
    if args.model:
        args.shapes = [*(args.shapes or []), *shapes_of(MODELS[args.model])]
    platform = jax.default_backend()
    default = ["kernels"] if platform == "gpu" else ["groups", "exchange", *(["throughput"] if args.quick else [])]
    name = f"grouped_gemm_{'sweep_' if args.parts == ['sweep'] else ''}{platform}"
    args.settle = args.settle if platform == "gpu" else 0.0
    name += ("_short_samples" if platform == "gpu" and args.settle == 0 else "") + args.suffix
    report = Report(name, args.out, {"rounds": args.rounds, "quick": args.quick, "settle_s": args.settle})
    for part in args.parts or default:
        if platform == "cpu":
            # Virtual devices share the cores, and slow down what runs on one of them: make them where they are needed,
            # which is for exchanges, and for Mosaic's interpreter, whose warpgroups take as many threads of XLA's.
            backend.clear_backends()
            needed = {"exchange": NUM_DEVICES, "kernels": INTERPRETER_THREADS, "sweep": INTERPRETER_THREADS}
            jax.config.update("jax_num_cpu_devices", needed.get(part, 1))
        PARTS[part](report, args)
    print(report.path)
    if image := plots.draw(report.path):
        print(image)


if __name__ == "__main__":
    harness.run(main)
