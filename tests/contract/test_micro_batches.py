"""low_latency_moe in two micro-batches: what it is in one, for every kind of experts, number of tokens and count."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, F32, Shape, assert_close
from harness import compiled, run
from jax_ep.quantization import quantize_experts, quantize_fp8_weights
from layers import Layer
from oracle_experts import GPT_OSS

SHAPE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=128, intermediate=128)
TURNED = partial(jnp.swapaxes, axis1=1, axis2=2)
PREPARE = {
    "dense": TURNED,
    "fp8 pairs": quantize_fp8_weights,
    "int8": lambda w: quantize_experts(w, "int8"),
    "mxfp4": lambda w: quantize_experts(w, "mxfp4"),
    "fp8 tokens": lambda w: quantize_experts(w, "mxfp4", activations="fp8"),
}
KINDS = {
    "gates": (jax_ep.Experts(), False),
    "no gates, biases": (jax_ep.Experts("relu_squared", gated=False), True),
    "interleaved, limits, biases": (GPT_OSS, True),
    "weights on the input": (jax_ep.Experts("gelu", weight_on="input"), False),
    "function": (jax_ep.Experts(lambda hidden: jnp.maximum(hidden[..., :128], 0) * hidden[..., 128:]), False),
}


def call(implementation: str, num_micro_batches: int, prepare: Any, **options: Any) -> Any:
    def fn(x, ids, weights, w_gate_up, w_down, num_tokens=None, b_gate_up=None, b_down=None):
        return jax_ep.low_latency_moe(
            x,
            ids,
            weights,
            prepare(w_gate_up),
            prepare(w_down),
            num_experts=SHAPE.num_experts,
            b_gate_up=b_gate_up,
            b_down=b_down,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
            implementation=implementation,
            **options,
        )

    return fn


def in_one_and_two(implementation: str, mesh: Any, prepare: Any, args: Any, **options: Any) -> list[np.ndarray]:
    return [run(call(implementation, number, prepare, **options), mesh, *args) for number in (1, 2)]


@pytest.mark.parametrize("matrices", PREPARE)
@pytest.mark.slow(unless={"matrices": ["dense"]})
def test_kinds_of_matrices(implementation: str, matrices: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    layer = Layer(rng, "duplicates", 2, SHAPE, BF16)
    one, two = in_one_and_two(implementation, expert_mesh(2), PREPARE[matrices], layer.args)
    assert (two.dtype, two.shape) == (one.dtype, one.shape)
    assert_close(two, one.astype(np.float64), tolerance=1e-2)
    if matrices == "dense":
        assert_close(two, layer.oracle().forward(), tolerance=2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(unless={"kind": ["no gates, biases"]})
def test_kinds_of_experts(implementation: str, kind: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    experts, has_bias = KINDS[kind]
    layer = Layer(rng, "uniform", 2, SHAPE, BF16, gated=experts.gated)
    biases = {}
    if has_bias:
        columns = layer.w_gate_up.shape[2]
        biases = {"b_gate_up": rng.normal(size=(4, columns)), "b_down": rng.normal(size=(4, SHAPE.hidden))}
        biases = {name: jnp.asarray(bias, BF16) for name, bias in biases.items()}
    fns = [partial(call(implementation, n, TURNED, experts=experts), **biases) for n in (1, 2)]
    one, two = (run(fn, expert_mesh(2), *layer.args) for fn in fns)
    assert_close(two, one.astype(np.float64), tolerance=1e-2)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
@pytest.mark.slow
def test_few_tokens(implementation: str, num_tokens: int, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Of one token there are no halves, and of two each has one."""
    shape = Shape(**vars(SHAPE) | {"num_tokens": max(num_tokens, 1)})
    layer = Layer(rng, "uniform", 2, shape, BF16)
    x, ids, weights, *matrices = layer.args
    args = x[:, :num_tokens], ids[:, :num_tokens], weights[:, :num_tokens], *matrices
    got = run(call(implementation, 2, TURNED, max_tokens_per_rank=6), expert_mesh(2), *args)
    assert got.shape == (2, num_tokens, SHAPE.hidden)
    if num_tokens:
        assert_close(got, layer.oracle().forward(), tolerance=2e-2)


def test_counts(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Of which one ends in the first half, and one in the second: what comes after counts for nothing."""
    layer, counts = Layer(rng, "uniform", 2, SHAPE, BF16), np.array([2, 6], np.int32)
    two = compiled(call(implementation, 2, TURNED, max_tokens_per_rank=9), expert_mesh(2))
    got = two(*layer.args, counts)
    ignored = np.arange(SHAPE.num_tokens) >= counts[:, None]
    layer.topk_idx[ignored] = -1
    assert not got[ignored].any()
    assert_close(got, layer.oracle().forward(), tolerance=2e-2)
    np.testing.assert_array_equal(two(*layer.args, np.array([7, 2**31 - 1], np.int32)), got)
    assert not two(*layer.args, np.array([0, -(2**31)], np.int32)).any()


@pytest.mark.slow
def test_layers_in_a_scan(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Each is fed by the one before, as the layers of a model are; and replayed, the program gives the same bits."""
    layer = Layer(rng, "uniform", 2, SHAPE, BF16)

    def layers(number: int) -> Any:
        fn = call(implementation, number, TURNED)
        return lambda x, *rest: jax.lax.scan(lambda x, _: (x + 0.1 * fn(x, *rest), None), x, length=5)[0]

    one, two = (compiled(layers(number), expert_mesh(2)) for number in (1, 2))
    got = two(*layer.args)
    assert_close(got, one(*layer.args).astype(np.float64), tolerance=2e-2)
    np.testing.assert_array_equal(two(*layer.args), got)


@pytest.mark.slow
def test_results_of_another_dtype(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    layer = Layer(rng, "duplicates", 2, SHAPE, BF16)
    options = {"preferred_element_type": jnp.float32}
    one, two = in_one_and_two(implementation, expert_mesh(2), TURNED, layer.args, **options)
    assert two.dtype == F32
    assert_close(two, one.astype(np.float64), tolerance=1e-4)


def test_mistakes_and_no_gradient(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    args = [a[0] for a in layer.args]
    for number, error in ((3, ValueError), (0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"low_latency_moe: num_micro_batches.*expected"):
            call("xla", number, TURNED, axis_name=())(*args)
    for wanted in (0, 3):

        def loss(*args: Any) -> Any:
            return call(implementation, 2, TURNED)(*args).sum()

        with pytest.raises(TypeError, match="no gradient"):
            run(jax.grad(loss, wanted), expert_mesh(1), *layer.args)
