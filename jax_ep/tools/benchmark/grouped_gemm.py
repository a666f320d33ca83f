"""Grouped GEMM over the number of groups, and on GPUs compared with cuBLAS.

    python benchmarks/grouped_gemm.py                     # the parts of this platform
    python benchmarks/grouped_gemm.py --sweep --shapes 32768,7168,4096,64 --directions forward

Parts:
  groups      (CPU) the same rows in 1 to 256 groups, forward and backward: the cost must follow the rows
  exchange    (CPU) dispatch + combine on 8 virtual devices with 8 to 512 experts: the cost must not follow the experts
  kernels     (GPU) TFLOP/s of the Triton and Pallas kernels on the shapes of large models, both gradients included,
              and in FP8, compared with cuBLAS and, if installed, PyTorch
  sweep       (GPU) the kernels with many tiles, to choose the defaults; it has a separate report
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import backend
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.pallas.requirements import INTERPRETER_THREADS
from jax_ep.pallas.tiling import Fp8Tiles
from jax_ep.tools.benchmark import gemm_kernels, gemm_sweep, harness, plots
from jax_ep.tools.benchmark.gemm_inputs import check, make_operands, make_sample
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Model, expert_mesh

type Gemm = Callable[[Array, Array, Array], Array]

MAX_RATIO = 1.5  # the highest ratio of 64 groups to 8 groups at the same rows
RAGGED_DOT_GROUPS = 32  # on the CPU ragged_dot multiplies all rows by all weights: more groups take seconds and GBs
FLAT_GROUPS = 64  # the flat loop computes one more tile per group
VARIANT = "jax_ep.grouped_gemm"
RANKS, TOKENS = 4, 4096  # of each rank, for the shapes of a model
NUM_DEVICES = 8


# --- part: groups ---------------------------------------------------------------------------------------------------


def flat_grouped_gemm(lhs: Array, rhs: Array, sizes: Array, tile_rows: int = 128) -> Array:
    """Compute `jax_ep.grouped_gemm` as one loop over equal tiles with a static trip count.

    At most `rows // tile_rows + groups` tiles are needed; the others are computed and not stored. The host need not
    know when such a loop ends.
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
        result = jnp.dot(rows, rhs[group[i]], preferred_element_type=jnp.float32).astype(lhs.dtype)
        row = start[i] + jnp.arange(tile_rows, dtype=jnp.int32)
        mask = ((row >= first[i]) & (row < end[i]))[:, None]
        new = jnp.where(mask, result, lax.dynamic_slice_in_dim(out, start[i], tile_rows))
        return lax.dynamic_update_slice_in_dim(out, new, start[i], axis=0)

    return lax.fori_loop(0, tile.shape[0], body, jnp.zeros((num_rows, rhs.shape[2]), lhs.dtype))


def grouped(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Compute it by the `xla` implementation."""
    return jax_ep.grouped_gemm(lhs, rhs, sizes, implementation="xla")


def ragged_dot(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Compute it by JAX's own operation."""
    return lax.ragged_dot(lhs, rhs, sizes)


def dense(lhs: Array, rhs: Array, sizes: Array) -> Array:
    """Multiply all rows by the first weights: the same FLOPs without groups."""
    return lhs @ rhs[0]


def backward(gemm: Gemm) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    """Return a function of both cotangents; XLA removes the forward pass, whose result is not needed."""
    return lambda lhs, rhs, sizes, out: jax.vjp(lambda a, b: gemm(a, b, sizes), lhs, rhs)[1](out)


class Case(NamedTuple):
    """A variant on rows that are distributed over a number of groups."""

    variant: str
    distribution: str
    groups: int


def group_cases(counts: Sequence[int]) -> dict[Case, Gemm]:
    """Return the package on all distributions, and the others on equal groups unless they take seconds."""
    cases: dict[Case, Gemm] = {Case("dense matmul", "equal", 1): dense}
    for distribution, count in itertools.product(("equal", "multinomial", "zipf"), counts):
        cases[Case(VARIANT, distribution, count)] = grouped
        if distribution == "equal" and count <= FLAT_GROUPS:
            cases[Case("flat loop, 128 rows", distribution, count)] = flat_grouped_gemm
        if distribution == "equal" and count <= RAGGED_DOT_GROUPS:
            cases[Case("lax.ragged_dot", distribution, count)] = ragged_dot
    return cases


def measure_groups(report: Report, args: argparse.Namespace) -> None:
    """Measure the time over the number of groups at the same rows."""
    rows, width = (512, 64) if args.quick else (4096, 512)
    cases = group_cases((8, 64) if args.quick else (1, 8, 16, 32, 64, 128, 256))
    shape = {"rows": rows, "k": width, "n": width, "dtype": "float32"}
    inputs = {
        case[1:]: make_operands(rows, width, width, case.groups, jnp.float32, case.distribution) for case in cases
    }
    cotangent = jax.random.normal(jax.random.key(1), (rows, width))
    for direction, gemms in (("forward", 1), ("backward", 2)):
        extra = (cotangent,) if direction == "backward" else ()
        jitted = {gemm: jax.jit(backward(gemm) if extra else gemm) for gemm in cases.values()}
        runs = {case: partial(jitted[gemm], *inputs[case[1:]], *extra) for case, gemm in cases.items()}
        errors = {}
        if direction == "forward":
            errors = {case: check(case.variant, run(), make_sample(*inputs[case[1:]])) for case, run in runs.items()}
        times = harness.measure_interleaved(runs, args.rounds, title=f"groups, {direction}", budget_s=5.0)
        for case, timing in times.items():
            details: dict[str, Any] = {"part": "groups", "direction": direction, "distribution": case.distribution}
            details["gflops"] = gemms * 2e-9 * rows * width * width / timing.median
            details |= {"error": errors[case]} if case in errors else {}
            report.add(case.variant, shape | {"groups": case.groups}, timing, **details)
        _show_groups(direction, times)
        # A round of all cases takes seconds, in which the machine changes. The ratios need short rounds.
        required = {case: run for case, run in runs.items() if case.variant == VARIANT and case.groups in (8, 64)}
        times_required = harness.measure_interleaved(required, 3 * args.rounds, title=f"64 to 8 groups, {direction}")
        summarise_ratios(report, direction, times_required)


def summarise_ratios(report: Report, direction: str, times: dict[Case, Timing]) -> None:
    """Report the ratios of 64 groups to 8; on a quiet machine the three estimates agree."""
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


def _show_groups(direction: str, times: dict[Case, Timing]) -> None:
    curves = dict.fromkeys((case.variant, case.distribution) for case in times)
    counts = sorted({case.groups for case in times})
    table = [
        [f"{variant}, {distribution}"]
        + [times[case].milliseconds() if (case := Case(variant, distribution, n)) in times else "" for n in counts]
        for variant, distribution in curves
    ]
    harness.show_table(f"{direction}: ms by number of groups, median [quartiles]", ["", *map(str, counts)], table)


# --- part: exchange -------------------------------------------------------------------------------------------------


def dispatch_combine(num_experts: int, mesh: jax.sharding.Mesh) -> Callable[[Array, Array, Array], Array]:
    """Return a function that sends tokens to their experts, weights them, and sends them back."""

    def layer(x: Array, idx: Array, weights: Array) -> Array:
        d = jax_ep.dispatch(x, idx, weights, num_experts=num_experts)
        return jax_ep.combine(d.tokens * d.weights[:, None], d.handle)

    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))


def measure_exchange(report: Report, args: argparse.Namespace) -> None:
    """Measure dispatch + combine over the number of experts with the same tokens."""
    counts = (8, 64) if args.quick else (8, 16, 32, 64, 128, 256, 512)
    tokens, hidden, top_k = (8, 16, 2) if args.quick else (128, 256, 8)
    mesh, num_tokens = expert_mesh(NUM_DEVICES), NUM_DEVICES * tokens
    rng, placed = np.random.default_rng(0), jax.NamedSharding(mesh, P("expert"))
    x = rng.standard_normal((num_tokens, hidden)).astype(np.float32)
    weights = np.full((num_tokens, top_k), 1 / top_k, np.float32)
    runs = {}
    for count in counts:
        idx = np.argsort(rng.random((num_tokens, count)), axis=1)[:, :top_k].astype(np.int32)
        runs[count] = partial(dispatch_combine(count, mesh), *jax.device_put((x, idx, weights), placed))
        # The experts are identities and the weights sum to 1.
        np.testing.assert_allclose(np.asarray(runs[count]()), x, rtol=1e-5, atol=1e-5)
    times = harness.measure_interleaved(runs, args.rounds, title="exchange")
    shape = {"ranks": NUM_DEVICES, "tokens_per_rank": tokens, "hidden": hidden, "top_k": top_k, "dtype": "float32"}
    for count, timing in times.items():
        report.add("jax_ep dispatch+combine", shape | {"experts": count}, timing, part="exchange", direction="forward")
    ratio = times[counts[-1]].ratio_to(times[counts[0]])
    report.summarise(**{f"exchange_ratio_{counts[-1]}_to_{counts[0]}_experts": ratio})
    title = f"dispatch + combine, {tokens} tokens/rank, top {top_k}, hidden {hidden}, {NUM_DEVICES} CPU devices"
    harness.show_table(f"{title}: ms", list(map(str, counts)), [[t.milliseconds() for t in times.values()]])
    print(f"{counts[-1]} experts to {counts[0]}: {ratio:.2f}")


# --- command line ---------------------------------------------------------------------------------------------------

PARTS = {
    "groups": measure_groups,
    "exchange": measure_exchange,
    "kernels": gemm_kernels.measure_kernels,
    "sweep": gemm_sweep.measure_sweep,
}


def numbers(text: str, wanted: str) -> tuple[int, ...]:
    """Parse positive integers that are separated by commas, as many as the words of `wanted`."""
    words = text.split(",")
    if len(words) != len(wanted.split(",")) or not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {wanted}")
    return tuple(map(int, words))


def shape(text: str) -> tuple[int, ...]:
    """Parse the sizes of a grouped GEMM."""
    sizes = numbers(text, "rows,K,N,groups")
    if sizes[0] % sizes[3]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows,K,N,groups, whose groups divide the rows")
    return sizes


def shapes_of(model: Model) -> list[tuple[int, ...]]:
    """Return both GEMMs of one rank, as rows,K,N,groups."""
    groups = max(1, model.experts // RANKS)
    rows = TOKENS * model.top_k // groups * groups
    return [(rows, model.hidden, 2 * model.intermediate, groups), (rows, model.intermediate, model.hidden, groups)]


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "grouped_gemm", prog=prog, rounds=15)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="default: those of the platform")
    add("--only", nargs="+", help="kernels, sweep: variants whose names contain one of these")
    add("--sweep", action="store_true", help="the same as --parts sweep")
    add("--shapes", nargs="+", type=shape, help="kernels, sweep: rows,K,N,groups of each shape")
    add("--model", choices=MODELS, help=f"kernels, sweep: the shapes of a rank of {RANKS} GPUs instead")
    directions = gemm_kernels.DIRECTIONS
    add("--directions", nargs="+", choices=directions, default=directions, help="kernels, sweep")
    tiles = "kernels: columns,stages,band of more variants in FP8, see Fp8Tiles of jax_ep/pallas/tiling.py"
    fp8_tiles = lambda text: Fp8Tiles(*numbers(text, "columns,stages,band"))  # noqa: E731
    add("--fp8-tiles", nargs="+", type=fp8_tiles, default=(), help=tiles)
    settle = "kernels, sweep: seconds that a variant runs before each sample; with 0 the report has another name"
    add("--settle", type=float, default=0.1, help=settle)
    add("--budget", type=float, default=480.0, help="sweep: seconds after which no variant starts")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the parts, each with the devices it needs."""
    args = harness.parse(options(prog), arguments)
    args.parts = ["sweep"] if args.sweep else args.parts
    if args.model:
        args.shapes = [*(args.shapes or []), *shapes_of(MODELS[args.model])]
    platform = jax.default_backend()
    name = f"grouped_gemm_{'sweep_' if args.parts == ['sweep'] else ''}{platform}"
    args.settle = args.settle if platform == "gpu" else 0.0
    name += "_short_samples" if platform == "gpu" and args.settle == 0 else ""
    report = Report(name, args, {"settle_s": args.settle})
    for part in args.parts or (["kernels"] if platform == "gpu" else ["groups", "exchange"]):
        if platform == "cpu":
            # Virtual devices share the cores and slow each other down, so each part gets only what it needs: ranks, or
            # for Mosaic's interpreter one of XLA's threads per warpgroup.
            backend.clear_backends()
            needed = {"exchange": NUM_DEVICES, "kernels": INTERPRETER_THREADS, "sweep": INTERPRETER_THREADS}
            jax.config.update("jax_num_cpu_devices", needed.get(part, 1))
        PARTS[part](report, args)
    print(report.path)
    if image := plots.draw(report.path):
        print(image)
