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
from jax_ep.tools.benchmark.chains import Program, after, passed_on
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.benchmark.inputs import Model, expert_mesh, routing

LENGTHS, QUICK_LENGTHS = (4, 24), (1, 2)
READ = "read all of gate_up"


class Weights(NamedTuple):
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
      expected: average number of rows of an expert.
    """

    values: Array
    scales: Array | None
    hidden: Array
    inner: Array
    inner_scales: Array | None
    expected: int = dataclasses.field(metadata={"static": True})


Step = Callable[[Array, Rows, Weights], Array]  # sizes, rows and weights to any array that depends on all of the work


def make_weights(model: Model, num_local: int, fp8: bool) -> Weights:
    """Make random weights on the device."""

    @jax.jit
    def make(key: Array) -> Weights:
        shapes = (num_local, model.hidden, 2 * model.intermediate), (num_local, model.intermediate, model.hidden)
        made = []
        for part, shape in zip(jax.random.split(key), shapes, strict=True):
            w = jax.random.normal(part, shape, jnp.bfloat16) * shape[1] ** -0.5
            made.append(quantize(w, "fp8", activations="fp8") if fp8 else quantize(w, None))
        return Weights(*made)

    return make(jax.random.key(0))


def make_rows(model: Model, num_ranks: int, tokens: int, fp8: bool) -> tuple[Array, Rows]:
    """Make the rows of one rank after a dispatch of uniformly routed tokens; `[L]` valid ones, and the rows."""
    rng = np.random.default_rng(tokens)
    num_tokens, num_local = num_ranks * tokens, model.experts // num_ranks
    sizes = np.bincount(routing("uniform", num_tokens, model, rng).ravel(), minlength=model.experts)[:num_local]
    widths = (model.hidden, 2 * model.intermediate, model.intermediate)
    x, hidden, inner = (
        jax.random.normal(jax.random.key(i), (num_local, num_tokens, width), jnp.bfloat16)
        for i, width in enumerate(widths)
    )
    (values, scales), (inner, inner_scales) = (jax.jit(quantize_fp8)(a) if fp8 else (a, None) for a in (x, inner))
    expected = max(1, round(num_tokens * model.top_k / model.experts))
    return jnp.asarray(sizes, jnp.int32), Rows(values, scales, hidden, inner, inner_scales, expected)


def multiply(
    name: str | None, expected: int, sizes: Array, values: Array, scales: Array | None, weights: QuantizedWeights
) -> Array:
    """Compute a masked GEMM."""
    options = {"lhs_scales": scales, "expected_rows": expected, "implementation": name}
    return jax_ep.masked_grouped_gemm(values, weights, sizes, preferred_element_type=jnp.bfloat16, **options)


def activation(name: str | None, sizes: Array, hidden: Array, *, quantize: bool) -> tuple[Array, Array | None]:
    """Compute the activation between the GEMMs."""
    return jax_ep.ops.masked.masked_gated_activation(hidden, sizes, quantize=quantize, implementation=name)


def steps(name: str | None) -> dict[str, Step]:
    """Return the parts, the whole, and a read of the first weights by XLA."""

    def gate_up(sizes: Array, rows: Rows, w: Weights) -> Array:
        return multiply(name, rows.expected, sizes, rows.values, rows.scales, w.gate_up)

    def down(sizes: Array, rows: Rows, w: Weights) -> Array:
        return multiply(name, rows.expected, sizes, rows.inner, rows.inner_scales, w.down)

    def activated(sizes: Array, rows: Rows, w: Weights) -> Array:
        return activation(name, sizes, rows.hidden, quantize=rows.scales is not None)[0]

    def experts(sizes: Array, rows: Rows, w: Weights) -> Array:
        found = activation(name, sizes, gate_up(sizes, rows, w), quantize=rows.scales is not None)
        return multiply(name, rows.expected, sizes, *found, w.down)

    def read(sizes: Array, rows: Rows, w: Weights) -> Array:
        words = lax.bitcast_convert_type(w.gate_up.values.reshape(-1, 4 // w.gate_up.values.dtype.itemsize), jnp.int32)
        return jnp.sum(words ^ sizes[0])

    return {"gate_up": gate_up, "activation": activated, "down": down, "experts": experts, READ: read}


def program(step: Step, sizes: Array, rows: Rows, weights: Weights, length: int) -> Program:
    """Return a chain of steps."""

    def once(sizes: Array, rows: Rows, weights: Weights) -> Array:
        return lax.optimization_barrier(after(sizes, step(sizes, rows, weights)))

    return passed_on(expert_mesh(1), once, (sizes, rows, weights), length)


def check(sizes: Array, rows: Rows, weights: Weights, name: str | None) -> float:
    """Return the error of the first rows of every expert, relative to their norm."""
    count = min(4, rows.values.shape[1])
    got = jax.jit(steps(name)["experts"])(sizes, rows, weights)[:, :count]
    few = jax.tree.map(lambda x: x[:, :count], rows)
    want = jax.jit(steps("xla")["experts"])(jnp.minimum(sizes, count), few, weights)
    real = (jnp.arange(count)[None, :] < sizes[:, None])[:, :, None]
    error = harness.norm_of_difference(jnp.where(real, got, 0), jnp.where(real, want, 0))
    if not error < 0.1:
        raise RuntimeError(f"the experts are wrong by {error} of the norm")
    return error


def read_bytes(variant: str, sizes: Array, weights: Weights) -> int:
    """Return the bytes of the weights that a variant must read."""
    used, num_local = int(jnp.sum(sizes > 0)), sizes.shape[0]
    both = {"gate_up": weights.gate_up.values.nbytes, "down": weights.down.values.nbytes}
    parts = {"experts": sum(both.values()), "activation": 0, **both}
    return both["gate_up"] if variant == READ else parts[variant] * used // num_local


def measure(report: Report, args: argparse.Namespace, model: Model, num_ranks: int, tokens: list[int]) -> None:
    """Measure all dtypes for all numbers of tokens."""
    name = None if jax.default_backend() == "gpu" else "xla"
    for dtype in args.dtypes:
        weights = make_weights(model, model.experts // num_ranks, dtype == "fp8")
        for count in tokens:
            sizes, rows = make_rows(model, num_ranks, count, dtype == "fp8")
            error = check(sizes, rows, weights, name)
            shape: dict[str, Any] = {"tokens_per_rank": count, "ranks": num_ranks, **model._asdict(), "dtype": dtype}
            shape |= {"rows": int(jnp.sum(sizes)), "experts_used": int(jnp.sum(sizes > 0))}
            chosen, failures = harness.chosen(steps(name), args.only), dict[str, str]()
            title = f"{dtype}, {count} tokens/rank of {num_ranks}: {shape['rows']} rows"
            times = harness.measure_chained(
                {label: partial(program, step, sizes, rows, weights) for label, step in chosen.items()},
                args.rounds,
                lengths=QUICK_LENGTHS if args.quick else LENGTHS,
                title=title,
                failures=failures,
                resolve=not args.quick,
            )
            read = {label: read_bytes(label, sizes, weights) for label in times}

            def details(label: str, timing: harness.Timing, read: dict[str, int] = read) -> dict[str, float]:
                return {"matrix_bytes": read[label], "bytes_per_s": read[label] / timing.median}

            report.record(title, shape, times, failures, details, error=error)
