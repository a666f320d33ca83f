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
from jax_ep.tools.benchmark.inputs import AXIS, MODELS, expert_mesh, make_weights, on_ranks, routing

LENGTHS = (2, 8)
FP8 = jnp.float8_e4m3fn


class Operation(NamedTuple):
    """A function of one rank, and its arguments on all ranks."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def operations(mesh: jax.sharding.Mesh, name: str, tokens: int, decoded_tokens: int) -> dict[str, Operation]:
    """Return each public operation that has a separate kernel."""
    model, num_ranks = MODELS[name], mesh.size
    experts = {"num_experts": model.experts}
    w_gate_up, w_down = make_weights(mesh, model)
    x, ids, weights = _tokens(mesh, name, tokens, seed=2)
    layer = (x, ids, weights, w_gate_up, w_down)
    few = _tokens(mesh, name, decoded_tokens, seed=3)
    served = jax.jit(partial(serving_weights, format="fp8", activations="fp8"))(w_gate_up, w_down)

    num_local, rows = model.experts // num_ranks, tokens * model.top_k
    rng = np.random.default_rng(0)
    sizes = _on_all(mesh, rng.multinomial(rows, np.full(num_local, 1 / num_local)))
    lhs, masked = on_ranks(mesh, (rows, model.hidden), 4), (num_local, num_ranks * decoded_tokens)
    counts = _on_all(mesh, rng.binomial(masked[1], model.top_k / model.experts, num_local))
    hidden = on_ranks(mesh, (*masked, 2 * model.intermediate), 5)
    decoded_rows = on_ranks(mesh, (*masked, model.hidden), 6)

    def gemm_gradients(lhs: Array, rhs: Array, sizes: Array) -> Any:
        products, gradients = jax.vjp(lambda lhs, rhs: jax_ep.grouped_gemm(lhs, rhs, sizes), lhs, rhs)
        return gradients(products)

    def in_fp8(gemm: Callable[..., Array]) -> Callable[..., Array]:
        def step(lhs: Any, rhs: Any, sizes: Array) -> Array:
            return gemm(lhs[0], rhs, sizes, lhs_scales=lhs[1])

        return step

    def dispatch(x: Array, ids: Array, **options: Any) -> Any:
        return jax_ep.dispatch(x, ids, **experts, **options).tokens

    def round_trip(x: Array, ids: Array, **options: Any) -> Array:
        dispatched = jax_ep.dispatch(x, ids, **experts, **options)
        return jax_ep.combine(dispatched.tokens, dispatched.handle, **options)

    def fused(x: Array, ids: Array, weights: Array, w_gate_up: Array, w_down: Array) -> Array:
        d = jax_ep.dispatch_grouped_gemm(x, ids, weights, w_gate_up, **experts)
        return jax_ep.grouped_gemm_combine(d.hidden[:, : model.intermediate], w_down, d.handle)

    def moe(*arguments: Array, **options: Any) -> Array:
        return jax_ep.moe(*arguments, **experts, **options)

    def moe_gradients(x: Array, ids: Array, *others: Array, **options: Any) -> Any:
        y, gradients = jax.vjp(lambda x, *others: moe(x, ids, *others, **options), x, *others)
        return gradients(y)

    def low_latency(x: Array, ids: Array, weights: Array) -> Array:
        d = jax_ep.low_latency_dispatch(x, ids, **experts, max_tokens_per_rank=decoded_tokens)
        rows = d.tokens.astype(jnp.bfloat16)
        return jax_ep.low_latency_combine(rows, ids, weights, d.handle)

    def low_latency_moe(*arguments: Any) -> Array:
        return jax_ep.low_latency_moe(*arguments, **experts)

    def activation(hidden: Array, counts: Array) -> Any:
        return jax_ep.ops.masked.masked_gated_activation(hidden, counts)

    quantized = jax.jit(quantize_fp8), jax.jit(partial(quantize, format="fp8", activations="fp8"))
    found = {
        "grouped_gemm": Operation(jax_ep.grouped_gemm, (lhs, w_gate_up, sizes)),
        "grouped_gemm, gradients": Operation(gemm_gradients, (lhs, w_gate_up, sizes)),
        "grouped_gemm, FP8": Operation(
            in_fp8(jax_ep.grouped_gemm), (quantized[0](lhs), quantized[1](w_gate_up), sizes)
        ),
        "dispatch": Operation(dispatch, (x, ids)),
        "dispatch, combine": Operation(round_trip, (x, ids)),
        "dispatch, combine, FP8 wire": Operation(
            lambda *a: round_trip(*a, schedule=jax_ep.Schedule(wire_dtype=FP8)), (x, ids)
        ),
        "dispatch_grouped_gemm, grouped_gemm_combine": Operation(fused, layer),
        "moe": Operation(moe, layer),
        "moe, gradients": Operation(moe_gradients, layer),
        "moe, FP8, gradients": Operation(partial(moe_gradients, recipe="fp8"), layer),
        "low_latency_dispatch, low_latency_combine": Operation(low_latency, few),
        "low_latency_moe, FP8": Operation(low_latency_moe, (*few, served.w_gate_up, served.w_down)),
        "masked_grouped_gemm, FP8": Operation(
            in_fp8(jax_ep.masked_grouped_gemm), (quantized[0](decoded_rows), served.w_gate_up, counts)
        ),
        "masked_gated_activation": Operation(activation, (hidden, counts)),
    }
    return found | ({"fused_moe": Operation(jax_ep.fused_moe, layer)} if num_ranks == 1 else {})


def _tokens(mesh: jax.sharding.Mesh, name: str, tokens: int, seed: int) -> tuple[Array, Array, Array]:
    """Make tokens of all ranks, their uniformly routed ids, and weights."""
    model = MODELS[name]
    ids = routing("uniform", mesh.size * tokens, model, np.random.default_rng(seed))
    placed = jax.device_put(ids, jax.NamedSharding(mesh, jax.P(*AXIS)))
    weights = jax.jit(lambda ids: jnp.full(ids.shape, 1 / model.top_k, jnp.float32))(placed)
    return on_ranks(mesh, (tokens, model.hidden), seed), placed, weights


def _on_all(mesh: jax.sharding.Mesh, sizes: np.ndarray) -> Array:
    """Place the same sizes on every rank."""
    return jax.device_put(np.tile(sizes.astype(np.int32), mesh.size), jax.NamedSharding(mesh, jax.P(*AXIS)))


def main() -> None:
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
