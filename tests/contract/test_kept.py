"""Residuals of the layer for the backward pass, in bytes; recomputation changes no bit."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import facts_of
import jax_ep
from cases import BF16, F32, Shape, assert_same_bits, reals, relative_error
from harness import compiled, per_rank
from jax_ep.types import Layout
from layers import Layer
from oracle_experts import GPT_OSS

SHAPE = Shape(num_tokens=21, top_k=2, num_experts=8, hidden=40, intermediate=24)
T, K, H, INNER = SHAPE.num_tokens, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate


def own_activation(hidden):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.tanh(gate) * up


EXPERTS = {
    "silu": (jax_ep.Experts(), False),
    "gpt-oss, biases": (GPT_OSS, True),
    "own activation, biases": (jax_ep.Experts(own_activation), True),
    "weights and biases on the input": (jax_ep.Experts("gelu", weight_on="input"), True),
}


def inputs(rng, num_ranks, bias, dtype=BF16):
    """Return x, ids, router weights, weights and biases by rank; and ids alone."""
    layer = Layer(rng, "uniform", num_ranks, SHAPE, dtype)
    local = SHAPE.num_experts // num_ranks
    biases = [reals(rng, num_ranks, local, columns, dtype=dtype) for columns in (2 * INNER, H)]
    x, topk_idx, *others = layer.args
    return (x, *others, *(biases if bias else (None, None))), topk_idx


def layer(implementation, experts, keep, **options):
    schedule = jax_ep.Schedule(keep_tokens=keep, **options.pop("schedule", {}))
    common = {"num_experts": SHAPE.num_experts, "implementation": implementation, "schedule": schedule}

    def call(x, topk_idx, topk_weights, w_gate_up, w_down, b_gate_up, b_down):
        given = {"experts": experts, "biases": (b_gate_up, b_down), **common, **options}
        return jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, **given)

    return call


def kept_bytes(call, arrays, topk_idx, mesh):
    """Return the bytes per rank that `jax.vjp` saves in addition to parameters."""

    def pulled(*arrays):
        def of(x, *others):
            return per_rank(call, mesh)(x, topk_idx, *others)

        return jax.vjp(of, *arrays)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pulled, *arrays))
    parameters = sum(array.nbytes for array in arrays[2:] if array is not None)
    return (sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) - parameters) / len(topk_idx)


CASES = [(name, BF16, num_ranks) for name in EXPERTS for num_ranks in (1, 4)] + [("silu", F32, 4)]


@pytest.mark.parametrize(("name", "dtype", "num_ranks"), CASES)
def test_residuals_bytes_match_formula(implementation, name, dtype, num_ranks, expert_mesh, rng):
    """Residuals are x, hidden rows, and some numbers per assignment; with `keep_tokens` also tokens."""
    (experts, bias), mesh, rows = EXPERTS[name], expert_mesh(num_ranks), T * K
    arrays, topk_idx = inputs(rng, num_ranks, bias, dtype)
    capacity = rows if num_ranks > 1 else None
    again, kept = (
        kept_bytes(layer(implementation, experts, keep, capacity=capacity), arrays, topk_idx, mesh)
        for keep in (None, True)
    )
    size = np.dtype(dtype).itemsize
    formula = size * (T * H + 2 * rows * INNER)
    # Row numbers, weights (twice if biases have them), ids, groups, ranks and counters.
    routing = 4 * ((3 if bias else 2) * rows + 2 * num_ranks * T * K + SHAPE.num_experts + num_ranks + 3)
    assert formula < again <= formula + routing
    layout = Layout(num_ranks, SHAPE.num_experts, T, K, rows)
    if facts_of.fuses(implementation, layout, dtype, H, 2 * INNER):
        tokens = rows if num_ranks == 1 else min(num_ranks * T, rows)
    else:
        tokens = rows - T  # These replace x.
    assert kept - again == size * tokens * H


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.slow(unless={"name": ["silu"]})
def test_residuals_no_gemm_recomputed(implementation, name, rng):
    """As many GEMMs as forward and two gradients need; the third program saves nothing and computes one GEMM twice."""
    if implementation != "xla" or jax.default_backend() != "cpu":
        pytest.skip("counts the products of XLA as it writes them for the CPU")
    arrays, topk_idx = inputs(rng, 1, bias=EXPERTS[name][1])
    x, *others = (None if a is None else a[0] for a in arrays)

    def loss(x, *others, policy=jax.checkpoint_policies.everything_saveable):
        whole = layer(implementation, EXPERTS[name][0], None, axis_name=())
        call = jax.checkpoint(lambda x, *others: whole(x, topk_idx[0], *others), policy=policy)
        return jnp.sum(call(x, *others).astype(jnp.float32) ** 2)

    def products(run):
        return jax.jit(run).lower(x, *others).compile().as_text().count(" dot(")

    forward, both = products(loss), products(jax.value_and_grad(loss, (0, 1, 2, 3)))
    # Router weights that scale biases get gradients from a GEMM with one column.
    of_bias = 1 if EXPERTS[name][1] and EXPERTS[name][0].weight_on == "output" else 0
    assert forward > 0 and both == 3 * forward + of_bias
    policies = jax.checkpoint_policies.save_only_these_names("jax_ep.hidden"), jax.checkpoint_policies.nothing_saveable
    for policy, again in zip(policies, (0, forward // 2), strict=True):
        run = jax.value_and_grad(functools.partial(loss, policy=policy), (0, 1, 2, 3))
        assert products(run) == 3 * forward + of_bias + again


@pytest.mark.slow
def test_residuals_no_launch_repeated(implementation, expert_mesh, rng):
    """A policy that saves hidden rows runs no kernel and no collective again in the backward pass."""
    arrays, topk_idx = inputs(rng, 4, bias=False)
    call = per_rank(layer(implementation, jax_ep.Experts(), None), expert_mesh(4))

    def loss(policy, x, *others):
        run = jax.checkpoint(lambda x, *others: call(x, topk_idx, *others), policy=policy)
        return jnp.sum(run(x, *others).astype(jnp.float32) ** 2)

    def launches(policy):
        gradient = jax.grad(functools.partial(loss, policy), (0, 1, 2, 3))
        text = jax.jit(gradient).lower(*arrays).compile().as_text()
        return len(re.findall(r" (?:custom-call|all-to-all|ragged-all-to-all|all-gather)(?:-start)?\(", text))

    policies = jax.checkpoint_policies
    assert launches(policies.save_only_these_names("jax_ep.hidden")) == launches(policies.everything_saveable) > 0


WAYS = {
    "fp8 on the wire": {"schedule": {"wire_dtype": jnp.float8_e4m3fn}},
    "scatter": {"schedule": {"combine_mode": "scatter"}},
}


@pytest.mark.parametrize(("name", "way"), [*((name, None) for name in EXPERTS), *(("silu", way) for way in WAYS)])
@pytest.mark.slow(unless={"way": ["fp8 on the wire"]})
def test_residuals_gradients_same_bits(implementation, name, way, expert_mesh, rng):
    """Compare saving tokens with sending them again, also with tokens without an expert or a row."""
    shape = Shape(T, K, 8, hidden=128 if way == "fp8 on the wire" else H, intermediate=INNER)
    (experts, bias), options = EXPERTS[name], dict(WAYS.get(way, {}))
    # Otherwise the residuals decide the number of launches, which decides the kernel of the GEMMs.
    options["schedule"] = {"dispatch_mode": "serial"} | options.get("schedule", {})
    of = Layer(rng, "some_without_expert", 2, shape, BF16)
    biases = [reals(rng, 2, 4, columns, dtype=BF16) if bias else None for columns in (2 * INNER, shape.hidden)]
    x, topk_idx, *others = of.args
    d_out = reals(rng, *x.shape, dtype=BF16)

    def gradients(keep, x, topk_idx, d_out, *others):
        call = layer(implementation, experts, keep, capacity=T, **options)
        return jax.vjp(lambda x, *others: call(x, topk_idx, *others), x, *others)[1](d_out)

    mesh, arrays = expert_mesh(2), (x, topk_idx, d_out, *others, *biases)
    again, kept = (compiled(functools.partial(gradients, keep), mesh)(*arrays) for keep in (False, True))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(kept), strict=True):
        assert_same_bits(one, other)
        assert np.abs(one.astype(np.float32)).max() > 0


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.slow
def test_residuals_second_derivatives(implementation, name, expert_mesh, rng):
    """On one rank: all-to-alls of a second derivative are independent; tests/contract/test_fused.py has two ranks."""
    experts, bias = EXPERTS[name]
    arrays, topk_idx = inputs(rng, 1, bias)

    def fn(implementation, keep, topk_idx, x, weights, w_gate_up, w_down, *biases):
        def loss(parameters):
            call = layer(implementation, experts, keep)
            return jnp.sum(call(parameters[0], topk_idx, *parameters[1:]).astype(jnp.float32) ** 2)

        def slope(parameters):  # To which each gradient adds equally.
            return sum(jnp.linalg.norm(d.astype(jnp.float32)) for d in jax.tree.leaves(jax.grad(loss)(parameters)))

        return jax.grad(slope)((x, weights, w_gate_up, w_down, *biases))

    mesh, wide = expert_mesh(1), [None if a is None else a.astype(F32) for a in arrays]
    got = compiled(functools.partial(fn, implementation, False), mesh)(topk_idx, *arrays)
    wanted = compiled(functools.partial(fn, "xla", True), mesh)(topk_idx, *wide)
    for i, (one, other) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)):
        assert relative_error(one, other) < 0.05, f"parameter {i}"
