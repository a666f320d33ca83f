"""Grouped GEMMs of Triton and Pallas and their gradients in TFLOP/s, compared with cuBLAS and PyTorch.

    python benchmarks/grouped_gemm.py
    python benchmarks/grouped_gemm.py --shapes 32768,7168,4096,64 --directions forward --suffix _one

Writes results/grouped_gemm_gpu.json. All rates count the rows of the problem, not the extra rows of tiles. cuBLAS
multiplies equal groups, which is the least work, and runs in every round: ratios to it are taken within rounds. Results
are compared with those of the loop over tiles in plain XLA ("portable loop"). "forward, activated" is the first GEMM of
gated experts with its activation, in separate kernels or in one; XLA activates after cuBLAS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep.core.activations import HiddenRows, activate
from jax_ep.megakernels.grouped_gemm import gemm_activation
from jax_ep.ops import registry
from jax_ep.pallas.requirements import INTERPRETER_THREADS
from jax_ep.tools.benchmark import harness, pytorch
from jax_ep.tools.benchmark.fused_moe import with_setting
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Model, group_sizes, initialize
from jax_ep.tools.command import Default, count
from jax_ep.types import Experts, Quantized

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ACTIVATED = DIRECTIONS = (
    *("forward", "input gradient", "weight gradient"),
    "forward, activated",
)
DISTRIBUTIONS = ("equal", "multinomial", "zipf")
# rows, K, N, groups: DeepSeek-V3 up and down, Qwen3-30B up (32 of its experts), Mixtral down (2 of its experts).
SHAPES = Default(
    [(32768, 7168, 4096, 64), (32768, 2048, 7168, 64), (16384, 4096, 3072, 32), (16384, 14336, 4096, 2)],
    [(72, 128, 24, 2)],
)
RANKS, TOKENS = 4, 4096  # of each rank, for the shapes of a model
CUBLAS = "cuBLAS batched"
NAMES = {"pallas": "pallas", "portable loop": "xla"}
WAYS = {"": False, ", Gluon": True}  # ends of the names of kernels of `triton`
FP8_ERROR, ERROR = 0.4, 0.1
"""Of single elements, in units of the root mean square; FP8 is off by 0.04 in the norm, others by two roundings."""
SAMPLE_S = 0.01  # of one timed sample, so that launches do not count
BF16 = jnp.dtype(jnp.bfloat16)

type Operands = Mapping[str, tuple[Any, ...]]
"""Arguments of a GEMM by distribution."""
type Product = Callable[[str], Array | pytorch.OnStream]
"""The GEMM of the operands of a distribution."""


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


def of(run: Callable[..., Array], operands: Operands) -> Product:
    """Return the GEMM of these operands."""
    return lambda distribution: run(*operands[distribution])


def product(name: str, direction: str) -> Callable[..., Array]:
    """Return the GEMM of an implementation."""
    run = registry.GROUPED_GEMM.by(name)
    if direction == ACTIVATED:
        activation = registry.ACTIVATION.by("triton" if name == "triton" else "xla")

        def in_turn(a: Array, b: Array, sizes: Array) -> Array:
            hidden = run.grouped_gemm(a, b, sizes, transpose=False, out_dtype=BF16)
            return activation.activate(Experts(), HiddenRows(hidden, jnp.ones(a.shape[0]), None, sizes))

        return in_turn
    if direction == WEIGHT_GRADIENT:
        return partial(run.weight_gradient, out_dtype=BF16)
    return partial(run.grouped_gemm, transpose=direction == INPUT_GRADIENT, out_dtype=BF16)


def in_fp8(problem: Problem) -> dict[str, Product]:
    """Return the forward GEMMs, or the weight gradients, in FP8 of quantized operands."""
    activation, gemm = registry.ACTIVATION.by("triton"), registry.FP8_GEMM.by("triton")
    is_gradient = problem.direction == WEIGHT_GRADIENT
    operation = "weight_gradient_fp8" if is_gradient else "grouped_gemm_fp8"

    @jax.jit
    def quantize(a: Array, b: Array, sizes: Array) -> tuple[Quantized, Quantized]:
        if is_gradient:
            return activation.quantize_columns(a, sizes), activation.quantize_columns(b, sizes)
        return activation.quantize_rows(a, sizes), activation.quantize_matrices(b)

    quantized = {name: (*quantize(*arrays), arrays[2]) for name, arrays in problem.operands.items()}
    run = partial(getattr(gemm, operation), out_dtype=BF16)
    return {
        f"triton, FP8{end}": of(jax.jit(partial(with_setting, operation, {"gluon": gluon}, run)), quantized)
        for end, gluon in WAYS.items()
    }


def cublas(direction: str) -> Callable[..., Array]:
    """Return the batched GEMM of equal groups, whose number divides the rows."""
    formula = {INPUT_GRADIENT: "gmn,gkn->gmk", WEIGHT_GRADIENT: "gmk,gmn->gkn"}.get(direction, "gmk,gkn->gmn")

    def run(a: Array, b: Array, sizes: Array) -> Array:
        groups = sizes.shape[0]
        a = a.reshape(groups, -1, a.shape[1])
        if direction == WEIGHT_GRADIENT:
            return jnp.einsum(formula, a, b.reshape(groups, -1, b.shape[1]))
        out = jnp.einsum(formula, a, b)
        out = activate(Experts(), out) if direction == ACTIVATED else out
        return out.reshape(-1, out.shape[2])

    return jax.jit(run)


def products(problem: Problem) -> dict[str, Product]:
    """Return all variants of a problem but cuBLAS."""
    direction, (_, k, n, _) = problem.direction, problem.shape
    found = {label: of(jax.jit(product(name, direction)), problem.operands) for label, name in NAMES.items()}
    operation = "weight_gradient" if direction == WEIGHT_GRADIENT else "grouped_gemm"
    for end, gluon in WAYS.items():
        run = partial(with_setting, operation, {"gluon": gluon}, product("triton", direction))
        found[f"triton{end}"] = of(jax.jit(run), problem.operands)
    if direction == ACTIVATED:
        weights = jnp.ones(problem.shape[0])
        found["triton, Gluon, one kernel"] = of(
            lambda *arrays: gemm_activation(*arrays, weights, experts=Experts()), problem.operands
        )
    if (direction == FORWARD and k % 128 == 0) or (direction == WEIGHT_GRADIENT and k % 128 == n % 128 == 0):
        found |= in_fp8(problem)
    if direction == FORWARD and pytorch.is_here():
        found |= pytorch.gemms(problem.operands)
    return found


# --- measuring ------------------------------------------------------------------------------------------------------


def make_problems(shape: tuple[int, int, int, int], directions: Iterable[str]) -> Iterator[Problem]:
    """Make the problems of one shape, with random numbers, because zeros draw less power."""
    rows, k, n, groups = shape
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, cotangent = (jax.random.normal(keys[i], (rows, width), BF16) for i, width in enumerate((k, n)))
    rhs = jax.jit(lambda key: jax.random.normal(key, (groups, k, n), BF16) / np.sqrt(k).astype(BF16))(keys[2])
    pairs = {INPUT_GRADIENT: (cotangent, rhs), WEIGHT_GRADIENT: (lhs, cotangent)}
    for direction in directions:
        operands = {
            name: (*pairs.get(direction, (lhs, rhs)), group_sizes(name, rows, groups)) for name in DISTRIBUTIONS
        }
        run = jax.jit(product("xla", direction))
        yield Problem(direction, shape, operands, {name: run(*arrays) for name, arrays in operands.items()})


@jax.jit
def _difference(out: Array, expected: Array) -> Array:
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    # Weight gradients are sums over their group, so their size and rounding depend on its rows.
    size = jnp.sqrt(jnp.mean(expected**2, axis=(-2, -1), keepdims=True))
    return jnp.max(jnp.abs(out - expected) / jnp.maximum(size, 1e-30))


def check(name: str, out: Array, expected: Array, direction: str = FORWARD) -> float:
    """Return the largest difference of an element, in units of the root mean square of its matrix; raise if wrong.

    Large elements differ by two roundings to bfloat16, with activation by more, and in FP8 by those of the operands.
    """
    wide = "FP8" in name or direction == ACTIVATED
    error, limit = float(_difference(out, expected)), FP8_ERROR if wide else ERROR
    if not error < limit:  # also for NaN
        raise RuntimeError(f"{name} is wrong: error {error:.2g} of the root mean square, limit {limit}.")
    return error


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


def measure(report: Report, args: argparse.Namespace, problem: Problem, chosen: Mapping[str, Product]) -> None:
    """Measure GEMMs on all distributions, and cuBLAS; report failures and wrong results."""
    shape = dict(zip(("rows", "k", "n", "groups"), problem.shape, strict=True)) | {"dtype": "bfloat16"}
    errors, timed, failures = {}, {}, dict[str, str]()
    for name, run in {CUBLAS: of(cublas(problem.direction), problem.operands), **chosen}.items():
        for distribution in DISTRIBUTIONS[: 1 if name == CUBLAS else None]:
            call = partial(run, distribution)
            try:
                out = call()
                out = out.array() if isinstance(out, pytorch.OnStream) else out
                errors[distribution, name] = check(name, out, problem.expected[distribution], problem.direction)
            except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
                failures[name] = str(error).strip() or type(error).__name__
                break
            timed[distribution, name] = repeated(call)
    calls = {key: call for key, (call, _) in timed.items()}
    times = harness.measure_interleaved(calls, args.rounds, warmup=0, budget_s=4.0, settle_s=args.settle)
    times = {key: Timing(tuple(s / timed[key][1] for s in timing.samples)) for key, timing in times.items()}
    baseline = times.get(("equal", CUBLAS))
    for distribution in DISTRIBUTIONS:

        def details(name: str, timing: Timing, distribution: str = distribution) -> dict[str, float]:
            ratio = {} if baseline is None else {"of_cublas": 1 / timing.ratio_to(baseline)}
            return {"tflops": problem.tflop / timing.median, "error": errors[distribution, name], **ratio}

        common = {"distribution": distribution, "direction": problem.direction, "part": "kernels"}
        own = {name: timing for (kind, name), timing in times.items() if kind == distribution}
        title = f"{problem.title}, {distribution}"
        report.record(title, shape, own, failures if distribution == "equal" else {}, details, **common)


# --- command line ---------------------------------------------------------------------------------------------------


def shape(text: str) -> tuple[int, ...]:
    """Parse the sizes of a grouped GEMM."""
    sizes = tuple(map(count, text.split(",")))
    if len(sizes) != 4 or sizes[0] % sizes[3]:
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
    add("--only", nargs="+", help="variants whose names contain one of these")
    add("--shapes", nargs="+", type=shape, default=SHAPES, help="rows,K,N,groups of each shape")
    add("--model", choices=MODELS, help=f"the shapes of a rank of {RANKS} GPUs instead")
    add("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    add("--settle", type=float, default=0.1, help="seconds that a variant runs before each sample")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure all directions of all shapes."""
    # Mosaic's interpreter takes a device per warpgroup.
    args = harness.start(options(prog), arguments, num_devices=1, cpu_devices=INTERPRETER_THREADS)
    if args.model:
        args.shapes = shapes_of(MODELS[args.model])
    platform = jax.default_backend()
    args.settle = args.settle if platform == "gpu" else 0.0
    report = Report(f"grouped_gemm_{platform}", args, {"settle_s": args.settle})
    if platform == "cpu":
        initialize()
    for sizes in args.shapes:
        for problem in make_problems(sizes, args.directions):
            measure(report, args, problem, harness.chosen(products(problem), args.only))
    jax_ep.finalize()
