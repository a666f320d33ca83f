"""The experts for decode-sized batches on one GPU: masked grouped GEMMs in FP8 and bfloat16, and the activation.

Part of low_latency.py. The rows are those of one of `--ranks` ranks with uniform routing. Times are differences of two
chains of calls. The group sizes of a call depend on the previous result through a small kernel, which is part of the
time and takes a microsecond or two.

The bound of the GEMMs is reading the weights of the experts that have rows. So the report has the rate at which these
bytes are read, and the rate at which XLA reads the same weights to sum them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_ep
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.quantization import quantize, quantize_fp8
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.chains import after
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.benchmark.inputs import Model, routing

LENGTHS, QUICK_LENGTHS = (4, 24), (1, 2)
TOKENS = [1, 8, 32, 128, 256]


class Matrices(NamedTuple):
    """The weights of the local experts, in the layout of the kernels."""

    gate_up: QuantizedWeights
    down: QuantizedWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of the local experts, with scales in FP8: operands of the GEMMs and of the activation.

    Attributes:
      values, scales: `[L, M, H]`.
      hidden: `[L, M, 2I]`, in place of the result of the first GEMM.
      inner, inner_scales: `[L, M, I]`, in place of the activated rows.
      sizes: `[L]` valid rows.
      expected: average number of rows of an expert.
    """

    values: Array
    scales: Array | None
    hidden: Array
    inner: Array
    inner_scales: Array | None
    sizes: Array
    expected: int = dataclasses.field(metadata={"static": True})

    @property
    def fp8(self) -> bool:
        return self.scales is not None


def make_matrices(model: Model, num_local: int, fp8: bool) -> Matrices:
    """Make random weights on the device."""

    @jax.jit
    def make(key: Array) -> Matrices:
        shapes = (num_local, model.hidden, 2 * model.intermediate), (num_local, model.intermediate, model.hidden)
        made = []
        for part, shape in zip(jax.random.split(key), shapes, strict=True):
            w = jax.random.normal(part, shape, jnp.bfloat16) * shape[1] ** -0.5
            made.append(quantize(w, "fp8", activations="fp8") if fp8 else quantize(w, None))
        return Matrices(*made)

    return make(jax.random.key(0))


def make_rows(model: Model, num_ranks: int, tokens: int, fp8: bool) -> Rows:
    """Make the rows of one rank after a dispatch of uniformly routed tokens."""
    rng = np.random.default_rng(tokens)
    num_tokens, num_local = num_ranks * tokens, model.experts // num_ranks
    sizes = np.bincount(routing("uniform", num_tokens, model, rng).ravel(), minlength=model.experts)[:num_local]
    arrays = []
    for i, columns in enumerate((model.hidden, model.intermediate)):
        x = jax.random.normal(jax.random.key(i), (num_local, num_tokens, columns), jnp.bfloat16)
        arrays += [*(jax.jit(quantize_fp8)(x) if fp8 else (x, None))]
    hidden = jax.random.normal(jax.random.key(2), (num_local, num_tokens, 2 * model.intermediate), jnp.bfloat16)
    expected = max(1, round(num_tokens * model.top_k / model.experts))
    return Rows(*arrays[:2], hidden, *arrays[2:], jnp.asarray(sizes, jnp.int32), expected)


Step = Callable[[Rows, Matrices], Array]  # any array that depends on all of the work


def product(values: Array, scales: Array | None, matrix: Any, rows: Rows, name: str | None) -> Array:
    """Compute a masked GEMM."""
    options = {"lhs_scales": scales, "expected_rows": rows.expected, "implementation": name}
    return jax_ep.masked_grouped_gemm(values, matrix, rows.sizes, **options)


def activation(hidden: Array, rows: Rows, name: str | None) -> tuple[Array, Array | None]:
    """Compute the activation between the GEMMs."""
    return jax_ep.ops.masked.masked_gated_activation(hidden, rows.sizes, quantize=rows.fp8, implementation=name)


def experts(name: str | None, rows: Rows, matrices: Matrices) -> Array:
    """Compute both GEMMs with the activation between them."""
    hidden = product(rows.values, rows.scales, matrices.gate_up, rows, name)
    return product(*activation(hidden, rows, name), matrices.down, rows, name)


def steps(name: str | None) -> dict[str, Step]:
    """Return the parts and the whole."""
    return {
        "gate_up": lambda rows, w: product(rows.values, rows.scales, w.gate_up, rows, name),
        "activation": lambda rows, w: activation(rows.hidden, rows, name)[0],
        "down": lambda rows, w: product(rows.inner, rows.inner_scales, w.down, rows, name),
        "experts": partial(experts, name),
    }


def read(rows: Rows, matrices: Matrices) -> Array:
    """Read the first weights, with XLA."""
    values = matrices.gate_up.values
    words = lax.bitcast_convert_type(values.reshape(-1, 4 // values.dtype.itemsize), jnp.int32)
    return jnp.sum(words ^ rows.sizes[0])


def chain(step: Step, rows: Rows, matrices: Matrices, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of n steps, and its arguments."""

    def body(rows: Rows, matrices: Matrices) -> Array:
        for _ in range(n):
            rows = dataclasses.replace(rows, sizes=lax.optimization_barrier(after(rows.sizes, step(rows, matrices))))
        return rows.sizes

    return body, (rows, matrices)


def check(rows: Rows, matrices: Matrices, name: str | None) -> float:
    """Return the largest error of the first rows of every expert, relative to their root mean square."""
    count = min(4, rows.values.shape[1])
    got = jax.jit(partial(experts, name))(rows, matrices)[:, :count].astype(jnp.float32)
    few = jax.tree.map(lambda x: x[:, :count] if x.ndim == 3 else jnp.minimum(x, count), rows)
    want = jax.jit(partial(experts, "xla"))(few, matrices).astype(jnp.float32)
    real = (jnp.arange(count)[None, :] < rows.sizes[:, None])[:, :, None]
    error = float(jnp.max(jnp.where(real, jnp.abs(got - want), 0)))
    error /= float(jnp.sqrt(jnp.sum(jnp.where(real, want**2, 0)) / jnp.maximum(1, jnp.sum(real) * want.shape[2])))
    if not error < 0.3:
        raise RuntimeError(f"the experts are wrong by {error} of the root mean square")
    return error


def read_bytes(variant: str, rows: Rows, matrices: Matrices) -> int:
    """Return the bytes of the weights that a variant must read."""
    used, num_local = int(jnp.sum(rows.sizes > 0)), rows.sizes.shape[0]
    both = {"gate_up": matrices.gate_up.values.nbytes, "down": matrices.down.values.nbytes}
    parts = {"experts": sum(both.values()), "activation": 0, **both}
    if "all" in variant:
        return both["gate_up"]
    return parts[variant] * used // num_local


def measure(report: Report, args: argparse.Namespace, model: Model, num_ranks: int, tokens: list[int]) -> None:
    """Measure all dtypes for all numbers of tokens."""
    name = None if jax.default_backend() == "gpu" else "xla"
    for dtype in args.dtypes:
        fp8 = dtype == "fp8"
        matrices = make_matrices(model, model.experts // num_ranks, fp8)
        for count in tokens:
            rows = make_rows(model, num_ranks, count, fp8)
            error = check(rows, matrices, name)
            failures: dict[str, str] = {}
            variants = harness.chosen({**steps(name), "read all of gate_up": read}, args.only)
            times = harness.measure_chained(
                {label: partial(chain, step, rows, matrices) for label, step in variants.items()},
                args.rounds,
                lengths=QUICK_LENGTHS if args.quick else LENGTHS,
                title=f"{count} tokens",
                workers=harness.WORKERS,
                failures=failures,
                resolve=not args.quick,
            )
            shape = {"tokens_per_rank": count, "ranks": num_ranks, **model._asdict(), "dtype": dtype}
            show(report, shape, rows, matrices, times, failures, error)


def show(
    report: Report,
    shape: dict[str, Any],
    rows: Rows,
    matrices: Matrices,
    times: dict[str, harness.Timing],
    failures: dict[str, str],
    error: float,
) -> None:
    """Add one case to the report, and print it."""
    shape |= {"rows": int(jnp.sum(rows.sizes)), "experts_used": int(jnp.sum(rows.sizes > 0))}
    from jax_ep.megakernels.masked import masked_tiles  # imports Triton

    tiles = dataclasses.asdict(masked_tiles(rows.values.shape[1], rows.expected, rows.values.dtype.itemsize, 2))
    table = []
    for label, timing in sorted(times.items(), key=lambda item: item[1].median):
        num_bytes = read_bytes(label, rows, matrices)
        rate = num_bytes / timing.median
        report.add(label, shape, timing, matrix_bytes=num_bytes, bytes_per_s=rate, error=error, tiles=tiles)
        table.append([label, *timing.microseconds(1), f"{rate / 1e12:.2f}" if num_bytes else ""])
    for label, reason in failures.items():
        report.failed(label, shape, reason.splitlines()[0][:200])
    title = f"{shape['dtype']}, {shape['tokens_per_rank']} tokens/rank of {shape['ranks']}"
    columns = ["variant", "us", "quartiles", "TB/s of matrices"]
    harness.show_table(f"{title}: {shape['rows']} rows, error {error:.2g}", columns, table)
