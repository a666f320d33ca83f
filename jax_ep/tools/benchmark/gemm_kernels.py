"""The grouped GEMMs of Triton and Pallas, compared with cuBLAS and the portable loop; part of grouped_gemm.py.

All rates count the rows of the problem, not the extra rows of tiles. cuBLAS multiplies equal groups, which is the least
work, and runs in every round: ratios to it are taken within rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep.core.facts import GemmFacts
from jax_ep.ops import plan, registry
from jax_ep.pallas import grouped_gemm as pallas_gemm
from jax_ep.pallas.tiling import ForwardTiles as PallasForwardTiles
from jax_ep.pallas.tiling import Fp8Tiles
from jax_ep.pallas.tiling import WeightTiles as PallasWeightTiles
from jax_ep.tools.benchmark import harness, pytorch
from jax_ep.tools.benchmark.gemm_inputs import check, group_sizes, make_operands, make_sample
from jax_ep.tools.benchmark.harness import Report
from jax_ep.xla import grouped_gemm as xla_gemm

if TYPE_CHECKING:  # these import Triton
    from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles

PallasTiles = PallasForwardTiles | PallasWeightTiles

DIRECTIONS = ("forward", "input gradient", "weight gradient")
DISTRIBUTIONS = ("equal", "multinomial", "zipf")
# rows, K, N, groups: DeepSeek-V3 up and down, Qwen3-30B up (32 of its experts), Mixtral down (2 of its experts).
SHAPES = ((32768, 7168, 4096, 64), (32768, 2048, 7168, 64), (16384, 4096, 3072, 32), (16384, 14336, 4096, 2))
QUICK_SHAPES = ((72, 128, 24, 2),)
CUBLAS = "cuBLAS batched"
TRITON, PALLAS = "triton", "pallas"
GATHERED = {"left rows gathered": False, "right rows gathered": True}
"""Weight gradients whose tokens come through a list of rows: whether these are the right operand."""
FP8, PALLAS_FP8 = "triton, FP8", "pallas, FP8"
QUANTISED = "pallas, FP8, operands quantised in the same call"
FP8_ERROR, ERROR = 0.4, 0.1
"""Of single elements, in units of the root mean square; FP8 is off by 0.04 in the norm, others by two roundings."""
SAMPLE_S = 0.01  # of one timed sample, so that launches do not count

type Product = Callable[[Array, Array, Array], Array | pytorch.OnStream]


class Problem(NamedTuple):
    """One direction of one shape, its operands, and the expected results by distribution."""

    direction: str
    shape: tuple[int, int, int, int]
    operands: dict[str, tuple[Array, Array, Array]]
    expected: dict[str, Array]

    @property
    def tflop(self) -> float:
        return 2e-12 * self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def title(self) -> str:
        rows, k, n, groups = self.shape
        return f"{rows}x{k}x{n} in {groups}, {self.direction}"


# --- products -------------------------------------------------------------------------------------------------------


def triton(direction: str, tiles: Tiles | WeightTiles | None = None) -> Product:
    """Return the Triton kernel, with its default tiles or others."""
    from jax_ep.megakernels import grouped_gemm  # imports Triton

    if direction == "weight gradient":
        return jax.jit(partial(grouped_gemm.weight_gradient, out_dtype=jnp.bfloat16, tiles=tiles))
    transpose = direction == "input gradient"
    return jax.jit(partial(grouped_gemm.grouped_gemm, transpose_rhs=transpose, out_dtype=jnp.bfloat16, tiles=tiles))


def pallas(direction: str, tiles: PallasTiles | None = None) -> Product:
    """Return the Pallas kernel, with its default tiles or others."""
    if direction == "weight gradient":
        return jax.jit(partial(pallas_gemm.weight_gradient, out_dtype=jnp.bfloat16, tiles=tiles))
    transpose = direction == "input gradient"
    return jax.jit(partial(pallas_gemm.grouped_gemm, transpose_rhs=transpose, out_dtype=jnp.bfloat16, tiles=tiles))


def gathered_weights(a: Array, b: Array, sizes: Array, *, transpose: bool) -> Array:
    """Compute the weight gradient of gathered rows; the kernels do not know that the list is in order."""
    from jax_ep.megakernels.activation import gather_rows  # imports Triton

    tokens, rows = (b, a) if transpose else (a, b)
    index = jnp.arange(a.shape[0], dtype=jnp.int32)
    gathered = gather_rows(tokens, index, sizes)
    lhs, rhs = (rows, gathered) if transpose else (gathered, rows)
    facts = GemmFacts(lhs.dtype, *lhs.shape, rhs.shape[1], sizes.shape[0], lhs.dtype)
    run = plan.gemm(registry.options("weight_gradient"), facts).run
    return run.weight_gradient(lhs, rhs, sizes, out_dtype=jnp.bfloat16)


def in_fp8(problem: Problem, tiles: dict[str, Fp8Tiles] | None = None) -> dict[str, Product]:
    """Return the forward GEMMs in FP8: of quantized operands, and including the quantization.

    `tiles` are more variants of the Pallas kernel, by name.
    """
    from jax_ep.megakernels import activation, grouped_gemm  # imports Triton

    a, b, _ = problem.operands["equal"]

    def quantise(a: Array, b: Array, sizes: Array) -> tuple[Array, ...]:
        return *activation.quantize_rows(a, sizes), *activation.quantize_matrices(b)

    def product(run: Callable[..., Array], **keywords: Any) -> Callable[..., Array]:
        def multiply(sizes: Array, rows: Array, row_scales: Array, matrices: Array, scales: Array) -> Array:
            return run(rows, matrices, sizes, row_scales, scales, out_dtype=jnp.bfloat16, **keywords)

        return multiply

    operands = jax.jit(quantise)(a, b, jnp.full((1,), a.shape[0], jnp.int32))
    by_pallas = pallas_gemm.grouped_gemm_fp8
    runs = {FP8: product(grouped_gemm.grouped_gemm_fp8), PALLAS_FP8: product(by_pallas)}
    runs |= {f"{PALLAS_FP8}, {name}": product(by_pallas, tiles=some) for name, some in (tiles or {}).items()}
    found: dict[str, Product] = {}
    for name, run in runs.items():
        found[name] = partial(lambda run, _, __, sizes: run(sizes, *operands), jax.jit(run))
    found[QUANTISED] = jax.jit(lambda a, b, sizes: runs[PALLAS_FP8](sizes, *quantise(a, b, sizes)))
    return found


def weights_in_fp8(problem: Problem) -> dict[str, Product]:
    """Return the weight gradients in FP8 of operands that are quantized by columns."""
    from jax_ep.megakernels import activation, grouped_gemm  # imports Triton

    quantise = jax.jit(
        lambda a, b, sizes: (*activation.quantize_columns(a, sizes), *activation.quantize_columns(b, sizes))
    )
    kept = {id(operands[2]): (quantise(*operands), operands) for operands in problem.operands.values()}

    def product(run: Callable[..., Array]) -> Product:
        def multiply(sizes: Array, a: Array, a_scales: Array, b: Array, b_scales: Array) -> Array:
            return run(a, b, sizes, a_scales, b_scales, out_dtype=jnp.bfloat16)

        compiled = jax.jit(multiply)
        return lambda _, __, sizes: compiled(sizes, *kept[id(sizes)][0])

    return {FP8: product(grouped_gemm.weight_gradient_fp8), PALLAS_FP8: product(pallas_gemm.weight_gradient_fp8)}


def portable(direction: str) -> Product:
    """Return the loop over tiles in plain XLA."""
    if direction == "weight gradient":
        return partial(xla_gemm.weight_gradient, out_dtype=jnp.bfloat16)
    return partial(xla_gemm.grouped_gemm, transpose_rhs=direction == "input gradient", out_dtype=jnp.bfloat16)


def cublas(direction: str) -> Product:
    """Return the batched GEMM of equal groups, whose number divides the rows."""
    formula = {"forward": "gmk,gkn->gmn", "input gradient": "gmn,gkn->gmk", "weight gradient": "gmk,gmn->gkn"}

    def run(a: Array, b: Array, sizes: Array) -> Array:
        groups = sizes.shape[0]
        a = a.reshape(groups, -1, a.shape[1])
        if direction == "weight gradient":
            return jnp.einsum(formula[direction], a, b.reshape(groups, -1, b.shape[1]))
        out = jnp.einsum(formula[direction], a, b)
        return out.reshape(-1, out.shape[2])

    return jax.jit(run)


# --- inputs and checks ----------------------------------------------------------------------------------------------


def make_problems(shape: tuple[int, int, int, int], directions: Iterable[str]) -> Iterator[Problem]:
    """Make the problems of one shape; the portable loop gives the expected results, and some rows are checked."""
    rows, k, n, groups = shape
    lhs, rhs, _ = make_operands(rows, k, n, groups, jnp.bfloat16, "equal")
    cotangent = jax.random.normal(jax.random.key(1), (rows, n), jnp.bfloat16)
    for direction in directions:
        pair = {"forward": (lhs, rhs), "input gradient": (cotangent, rhs), "weight gradient": (lhs, cotangent)}
        operands = {name: (*pair[direction], group_sizes(name, rows, groups)) for name in DISTRIBUTIONS}
        expected = {name: portable(direction)(*arguments) for name, arguments in operands.items()}
        for name, (a, b, sizes) in operands.items():
            if direction == "weight gradient":
                check_matrix(f"portable loop, {name}", expected[name], a, b, sizes)
            else:
                matrices = jnp.swapaxes(b, 1, 2) if direction == "input gradient" else b
                check(f"portable loop, {name}", expected[name], make_sample(a, matrices, sizes))
        yield Problem(direction, shape, operands, expected)


def check_matrix(name: str, out: Array, lhs: Array, rhs: Array, sizes: Array) -> None:
    """Compare some rows of the largest group's gradient with a float32 GEMM."""
    group = int(jnp.argmax(sizes))
    end = int(sizes[: group + 1].sum())
    rows = slice(end - int(sizes[group]), end)
    expected = jnp.dot(
        lhs[rows, :16].astype(jnp.float32).T, rhs[rows].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    refuse_if_different(name, out[group, :16], expected)


@jax.jit
def _difference(out: Array, expected: Array) -> Array:
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    # Weight gradients are sums over their group, so their size and rounding depend on its rows.
    size = jnp.sqrt(jnp.mean(expected**2, axis=(-2, -1), keepdims=True))
    return jnp.max(jnp.abs(out - expected) / jnp.maximum(size, 1e-30))


def refuse_if_different(name: str, out: Array, expected: Array) -> float:
    """Return the largest difference of an element, in units of the root mean square of its matrix; raise if wrong.

    Large elements differ by two roundings to bfloat16, and in FP8 by those of the operands.
    """
    error, limit = float(_difference(out, expected)), FP8_ERROR if "FP8" in name else ERROR
    if not error < limit:  # also for NaN
        raise RuntimeError(f"{name} is wrong: error {error:.2g} of the root mean square, limit {limit}.")
    return error


# --- measuring ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A variant and its distribution of rows."""

    variant: str
    distribution: str


def measure(
    report: Report, rounds: int, settle_s: float, problem: Problem, products: dict[str, Product], **details: Any
) -> list[str]:
    """Measure GEMMs on all distributions and cuBLAS, and return a line for each; report failures and wrong results."""
    shape = dict(zip(("rows", "k", "n", "groups"), problem.shape, strict=True)) | {"dtype": "bfloat16"}
    details |= {"part": "kernels", "direction": problem.direction}
    lines, errors, timed = [], {}, {}
    for name, product in {CUBLAS: cublas(problem.direction), **products}.items():
        for distribution in DISTRIBUTIONS[: 1 if name == CUBLAS else None]:
            arguments = problem.operands[distribution]
            try:
                out = product(*arguments)
                out = out.array() if isinstance(out, pytorch.OnStream) else out
                error = refuse_if_different(name, out, problem.expected[distribution])
            except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as failure:
                reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
                report.failed(name, shape, reason, distribution=distribution, **details)
                lines.append(f"{problem.title}, {distribution}: {name}: {reason[:150]}")
                break
            errors[Run(name, distribution)] = error
            timed[Run(name, distribution)] = repeated(partial(product, *arguments))
    calls = {run: call for run, (call, _) in timed.items()}
    times = harness.measure_interleaved(calls, rounds, warmup=0, budget_s=4.0, settle_s=settle_s)
    times = {run: harness.Timing(tuple(s / timed[run][1] for s in timing.samples)) for run, timing in times.items()}
    baseline = times.get(Run(CUBLAS, "equal"))
    for run, timing in times.items():
        tflops = problem.tflop / timing.median
        ratio = {} if baseline is None else {"of_cublas": 1 / timing.ratio_to(baseline)}
        row = {"distribution": run.distribution, "tflops": tflops, "error": errors[run], **ratio, **details}
        report.add(run.variant, shape, timing, **row)
        share = f"{100 * ratio['of_cublas']:5.1f} % of cuBLAS" if ratio else ""
        lines.append(f"{problem.title}, {run.distribution:11}: {tflops:6.1f} TFLOP/s {share}  {run.variant}")
    return lines


def repeated(call: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """Return a function that repeats a call without waiting, so that launches do not count, and the repetitions."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = int(np.clip(SAMPLE_S / (time.perf_counter() - start), 0, 20)) + 1

    def run() -> Any:
        for _ in range(count - 1):
            call()
        return call()

    return run, count


def measure_kernels(report: Report, args: argparse.Namespace) -> None:
    """Measure TFLOP/s of the kernels with their default tiles."""
    with workers_on_cpu():
        for problem in problems(args):
            products = {TRITON: triton(problem.direction), PALLAS: pallas(problem.direction)}
            products["portable loop"] = portable(problem.direction)
            if problem.direction == "forward" and problem.shape[1] % 128 == 0:
                tiles = {f"{some.stages} stages, bands of {some.band}": some for some in args.fp8_tiles}
                products |= in_fp8(problem, tiles)
            if problem.direction == "forward" and pytorch.is_here():
                products |= pytorch.gemms(*problem.operands["equal"][:2])
            if problem.direction == "weight gradient":
                products |= weights_in_fp8(problem) if problem.shape[1] % 128 == problem.shape[2] % 128 == 0 else {}
                products |= {
                    name: jax.jit(partial(gathered_weights, transpose=side)) for name, side in GATHERED.items()
                }
            products = harness.chosen(products, args.only)
            print(*measure(report, args.rounds, args.settle, problem, products), sep="\n", flush=True)


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Make the problems of the command line, one at a time."""
    shapes = args.shapes or (QUICK_SHAPES if args.quick else SHAPES)
    for shape in shapes:
        yield from make_problems(shape, args.directions)


@contextlib.contextmanager
def workers_on_cpu() -> Iterator[None]:
    """Run kernels in the interpreter on CPU devices, to try the benchmark."""
    if jax.default_backend() == "cpu":
        jax_ep.init(transport="shared_memory")
    try:
        yield
    finally:
        jax_ep.finalize()
