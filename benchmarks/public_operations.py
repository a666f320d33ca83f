"""Time the public operations of the jax_ep on the path; compare.py runs this once per checkout and turn.

It uses only functions and keywords that exist since 0.1, so that it also runs older versions. It prints, as JSON, the
folder of the package and the seconds of each sample.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
import jax_ep.tools
from jax_ep.quantization import quantize, quantize_fp8
from jax_ep.serving import serving_weights

# The harness is that of this checkout, for both packages.
jax_ep.tools.__path__.insert(0, str(Path(__file__).resolve().parents[1] / "jax_ep" / "tools"))
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.chains import calls
from jax_ep.tools.benchmark.inputs import MODELS, expert_mesh, make_weights, on_ranks, place, routing

LENGTHS = (2, 8)
FP8 = jnp.float8_e4m3fn


class Operation(NamedTuple):
    """A function of one rank, and its arguments on all ranks."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def operations(mesh: jax.sharding.Mesh, name: str, tokens: int, decoded_tokens: int) -> dict[str, Operation]:
    """Return each public operation that has a separate kernel."""
    weights = make_weights(mesh, MODELS[name])
    return {
        **gemms(mesh, name, tokens, weights[0]),
        **of_training(mesh, name, tokens, weights),
        **of_decoding(mesh, name, decoded_tokens, weights),
    }


def in_fp8(gemm: Callable[..., Array]) -> Callable[..., Array]:
    """Return a GEMM of quantized rows."""

    def step(lhs: Any, rhs: Any, sizes: Array) -> Array:
        return gemm(lhs[0], rhs, sizes, lhs_scales=lhs[1])

    return step


def gemms(mesh: jax.sharding.Mesh, name: str, tokens: int, w: Array) -> dict[str, Operation]:
    """Return the grouped GEMM of training, with its gradients and in FP8."""
    model = MODELS[name]
    num_local, rows = model.experts // mesh.size, tokens * model.top_k
    sizes = _on_all(mesh, np.random.default_rng(0).multinomial(rows, np.full(num_local, 1 / num_local)))
    lhs = on_ranks(mesh, (rows, model.hidden), 4)
    quantized = jax.jit(quantize_fp8)(lhs), jax.jit(partial(quantize, format="fp8", activations="fp8"))(w)

    def gradients(lhs: Array, rhs: Array, sizes: Array) -> Any:
        products, pull = jax.vjp(lambda lhs, rhs: jax_ep.grouped_gemm(lhs, rhs, sizes), lhs, rhs)
        return pull(products)

    return {
        "grouped_gemm": Operation(jax_ep.grouped_gemm, (lhs, w, sizes)),
        "grouped_gemm, gradients": Operation(gradients, (lhs, w, sizes)),
        "grouped_gemm, FP8": Operation(in_fp8(jax_ep.grouped_gemm), (*quantized, sizes)),
    }


def of_training(mesh: jax.sharding.Mesh, name: str, tokens: int, weights: tuple[Array, Array]) -> dict[str, Operation]:
    """Return the operations of training."""
    model = MODELS[name]
    experts = {"num_experts": model.experts}
    layer = (*_tokens(mesh, name, tokens, seed=2), *weights)

    def dispatch(x: Array, ids: Array, **options: Any) -> Any:
        return jax_ep.dispatch(x, ids, **experts, **options).tokens

    def round_trip(x: Array, ids: Array, **options: Any) -> Array:
        dispatched = jax_ep.dispatch(x, ids, **experts, **options)
        return jax_ep.combine(dispatched.tokens, dispatched.handle, **options)

    def fused(x: Array, ids: Array, weights: Array, w_gate_up: Array, w_down: Array) -> Array:
        d = jax_ep.dispatch_grouped_gemm(x, ids, weights, w_gate_up, **experts)
        return jax_ep.grouped_gemm_combine(d.hidden[:, : model.intermediate], w_down, d.handle)

    moe = partial(jax_ep.moe, **experts)

    def gradients(x: Array, ids: Array, *others: Array, **options: Any) -> Any:
        y, pull = jax.vjp(lambda x, *others: moe(x, ids, *others, **options), x, *others)
        return pull(y)

    in_fp8 = partial(round_trip, schedule=jax_ep.Schedule(wire_dtype=FP8))
    found = {
        "dispatch": Operation(dispatch, layer[:2]),
        "dispatch, combine": Operation(round_trip, layer[:2]),
        "dispatch, combine, FP8 wire": Operation(in_fp8, layer[:2]),
        "dispatch_grouped_gemm, grouped_gemm_combine": Operation(fused, layer),
        "moe": Operation(moe, layer),
        "moe, gradients": Operation(gradients, layer),
        "moe, FP8, gradients": Operation(partial(gradients, recipe="fp8"), layer),
    }
    return found | ({"fused_moe": Operation(jax_ep.fused_moe, layer)} if mesh.size == 1 else {})


def of_decoding(mesh: jax.sharding.Mesh, name: str, tokens: int, weights: tuple[Array, Array]) -> dict[str, Operation]:
    """Return the operations of decoding."""
    model = MODELS[name]
    experts = {"num_experts": model.experts}
    few = _tokens(mesh, name, tokens, seed=3)
    served = jax.jit(partial(serving_weights, format="fp8", activations="fp8"))(*weights)
    masked = (model.experts // mesh.size, mesh.size * tokens)
    counts = _on_all(mesh, np.random.default_rng(0).binomial(masked[1], model.top_k / model.experts, masked[0]))
    rows = jax.jit(quantize_fp8)(on_ranks(mesh, (*masked, model.hidden), 6))

    def round_trip(x: Array, ids: Array, weights: Array) -> Array:
        d = jax_ep.low_latency_dispatch(x, ids, **experts, max_tokens_per_rank=tokens)
        return jax_ep.low_latency_combine(d.tokens.astype(jnp.bfloat16), ids, weights, d.handle)

    layer = partial(jax_ep.low_latency_moe, **experts)
    gemm = in_fp8(jax_ep.masked_grouped_gemm)
    return {
        "low_latency_dispatch, low_latency_combine": Operation(round_trip, few),
        "low_latency_moe, FP8": Operation(layer, (*few, served.w_gate_up, served.w_down)),
        "masked_grouped_gemm, FP8": Operation(gemm, (rows, served.w_gate_up, counts)),
    }


def _tokens(mesh: jax.sharding.Mesh, name: str, tokens: int, seed: int) -> tuple[Array, Array, Array]:
    """Make tokens of all ranks, their uniformly routed ids, and weights."""
    model = MODELS[name]
    ids = routing("uniform", mesh.size * tokens, model, np.random.default_rng(seed))
    placed = place(mesh, ids)
    weights = jax.jit(lambda ids: jnp.full(ids.shape, 1 / model.top_k, jnp.float32))(placed)
    return on_ranks(mesh, (tokens, model.hidden), seed), placed, weights


def _on_all(mesh: jax.sharding.Mesh, sizes: np.ndarray) -> Array:
    """Place the same sizes on every rank."""
    return place(mesh, np.tile(sizes.astype(np.int32), mesh.size))


def main() -> None:
    """Print the samples of the operations of the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--tokens", type=int, required=True)
    options.add_argument("--decoded-tokens", type=int, required=True)
    options.add_argument("--rounds", type=int, required=True)
    args = options.parse_args()
    mesh = expert_mesh(jax.device_count())
    if jax.default_backend() == "gpu":
        jax_ep.init(mesh)
    chosen = operations(mesh, args.model, args.tokens, args.decoded_tokens)
    factories = {name: partial(calls, mesh, *operation) for name, operation in chosen.items()}
    times = harness.measure_chained(factories, args.rounds, lengths=LENGTHS)
    samples = {name: timing.samples for name, timing in times.items()}
    print(json.dumps({"package": str(Path(jax_ep.__file__).parents[1]), "samples": samples}))


if __name__ == "__main__":
    main()
