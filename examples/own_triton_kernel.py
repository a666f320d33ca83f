"""A custom Triton kernel as the expert function, called by `jax_ep.triton_call` between `dispatch` and `combine`.

python examples/own_triton_kernel.py    # after pip install '.[cuda13]'; without GPUs in Triton's interpreter

The example trains the layer. Its experts are gated, and each learns the slope of its activation. jax_ep does the GEMMs
and the communication. The activation and its gradient are the kernels of `own_kernels/learned_swish.py`, combined by
`jax.custom_vjp`.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.tools.command import run

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS, STEPS = 8, 2, 64, 96, 256, 20
Parameters = dict[str, jax.Array]


@jax.custom_vjp
def activate(hidden: jax.Array, slopes: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """Compute `weight * gate * sigmoid(slope * gate) * up` of each row.

    Args:
      hidden: `[R, 2 * I]`, gate in the first I columns and up in the last.
      slopes: `[L]` float32, one for each expert of this rank.
      weights: `[R]` float32 router weights.
      experts: `[R]` int32, the local expert of each row; -1 for padding, whose result is zero.

    Returns:
      `[R, I]`.
    """
    from own_kernels import learned_swish

    num_rows, inner = hidden.shape[0], hidden.shape[1] // 2
    result = jax.ShapeDtypeStruct((num_rows, inner), hidden.dtype)
    options = {"out_shape": result, "grid": num_rows, "INNER": inner, "BLOCK": 128}
    return jax_ep.triton_call(learned_swish.activate, hidden, slopes, weights, experts, **options)


def activate_forward(*arguments: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the result and the residuals, which are only the arguments."""
    return activate(*arguments), arguments


def activate_backward(saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    """Return cotangents of hidden, slopes and weights; `experts` are integers, which get no gradient."""
    from own_kernels import learned_swish

    hidden, slopes, weights, experts = saved
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weights, weights)]
    options = {"out_shape": results, "grid": hidden.shape[0], "INNER": hidden.shape[1] // 2, "BLOCK": 128}
    found = jax_ep.triton_call(learned_swish.activate_gradient, *saved, d_out, **options)
    d_hidden, d_slope_of_rows, d_weights = found
    # Sum rows here: atomic additions would depend on the order in which programs run.
    d_slopes = jax.ops.segment_sum(d_slope_of_rows, jnp.where(experts < 0, slopes.shape[0], experts), slopes.shape[0])
    return d_hidden, d_slopes, d_weights, None


activate.defvjp(activate_forward, activate_backward)


def expert_layer(p: Parameters, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
    """Run one rank's part: dispatch, the first GEMM, the kernel, the second GEMM, and combine."""
    d = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=EXPERTS)
    hidden = jax_ep.grouped_gemm(d.tokens, p["w_gate_up"], d.group_sizes)
    rows = activate(hidden, p["slopes"], d.weights, jax_ep.row_experts(d.handle))
    return jax_ep.combine(jax_ep.grouped_gemm(rows, p["w_down"], d.group_sizes), d.handle)


def dense_layer(p: Parameters, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
    """Compute the same layer in plain JAX: every expert computes every token."""
    gate, up = jnp.split(jnp.einsum("th,ehf->tef", x, p["w_gate_up"]), 2, axis=-1)
    every = jnp.einsum("tei,eih->teh", gate * jax.nn.sigmoid(p["slopes"][None, :, None] * gate) * up, p["w_down"])
    chosen = jnp.take_along_axis(every, topk_idx[:, :, None], axis=1)
    return jnp.einsum("tkh,tk->th", chosen, topk_weights)


def on_all_devices(mesh: jax.sharding.Mesh) -> Any:
    """Wrap `expert_layer` for global arrays, sharded over the mesh."""
    return jax.shard_map(expert_layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))


def make_inputs(key: jax.Array) -> tuple[Parameters, jax.Array, jax.Array, jax.Array]:
    """Create the parameters of all experts, tokens, and their routing."""
    keys = jax.random.split(key, 4)
    parameters = {
        "w_gate_up": jax.random.normal(keys[0], (EXPERTS, HIDDEN, 2 * INNER)) * HIDDEN**-0.5,
        "w_down": jax.random.normal(keys[1], (EXPERTS, INNER, HIDDEN)) * INNER**-0.5,
        "slopes": jnp.linspace(0.5, 2, EXPERTS),
    }
    routing = jax_ep.topk_router(jax.random.normal(keys[2], (TOKENS, EXPERTS)), TOP_K)
    return parameters, jax.random.normal(keys[3], (TOKENS, HIDDEN)), routing.topk_idx, routing.topk_weights


def compare(layer: Any, arguments: tuple[Any, ...]) -> float:
    """Return the largest difference of results and gradients from plain JAX, relative to the norm of each."""

    def outcome(fn: Any) -> Any:
        loss = lambda p, x, idx, weights: jnp.sum(jnp.square(fn(p, x, idx, weights)))  # noqa: E731
        run = jax.jit(lambda *args: (fn(*args), jax.grad(loss, argnums=(0, 1, 3))(*args)))
        return jax.tree.leaves(jax.device_get(run(*arguments)))

    pairs = zip(outcome(layer), outcome(dense_layer), strict=True)
    return max(float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) for got, want in pairs)


def train(layer: Any, arguments: tuple[Any, ...], steps: int) -> list[float]:
    """Train with gradient descent towards tokens with inverted signs; return the loss before each step."""
    p, x, idx, weights = arguments

    @jax.jit
    def step(p: Parameters) -> tuple[jax.Array, Parameters]:
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(jnp.square(layer(p, x, idx, weights) + x)))(p)
        return loss, jax.tree.map(lambda value, gradient: value - 2.0 * gradient, p, gradients)

    losses = []
    for _ in range(steps):
        loss, p = step(p)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Compare the layer with plain JAX on all devices, then train it."""
    if importlib.util.find_spec("triton") is None:
        sys.exit("own_triton_kernel.py: not installed: triton; pip install '.[cuda13]', or triton without a GPU.")
    jax.config.update("jax_default_matmul_precision", "highest")
    # Automatic axes: arguments are resharded to what the layer needs.
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    if jax.default_backend() == "cpu":
        jax_ep.init(mesh, transport="shared_memory")  # runs kernels in Triton's interpreter
    arguments = jax.device_put(make_inputs(jax.random.key(0)), jax.NamedSharding(mesh, P("expert")))
    layer = on_all_devices(mesh)
    error = compare(layer, arguments)
    print(f"{TOKENS} tokens on {mesh.size} devices: largest relative difference from plain JAX {error:.1e}")
    if error > 1e-4:
        sys.exit("the difference is too large: please report it, with the output of jax-ep doctor")
    losses = train(layer, arguments, STEPS)
    print(f"loss before training {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}")


if __name__ == "__main__":
    run("own_triton_kernel.py", main)
