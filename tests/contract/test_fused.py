"""The layer in 16-bit floats with rows of whole 16-byte words: what implementations may run as fused kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F16, FEW_ROUTINGS, ROUTINGS, Shape, assert_close, assert_same_bits, probabilities, reals
from harness import compiled, run
from jax.sharding import Mesh

import jax_ep
from jax_ep.megakernels import tuning

# Groups end within tiles, chunks of columns are uneven, and T is no multiple of a block.
SHAPE = Shape(num_tokens=37, top_k=3, num_experts=8, hidden=88, intermediate=40)
# Two products deep, each with its own rounding of what it reads and writes.
TOLERANCE = 4e-2


@pytest.fixture(autouse=True)
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be faster at these sizes: GEMM and combine in one launch."""
    monkeypatch.setattr(tuning, "scatters", lambda *_: True)


def inputs(rng: np.random.Generator, routing: str, num_ranks: int, shape: Shape = SHAPE, dtype: Any = BF16) -> Any:
    """x, topk_idx, topk_weights and the stacked matrices of all experts."""
    topk_idx = ROUTINGS[routing](rng, num_ranks, shape)
    x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=dtype)
    w_gate_up = rng.standard_normal((shape.num_experts, shape.hidden, 2 * shape.intermediate)) / shape.hidden**0.5
    w_down = rng.standard_normal((shape.num_experts, shape.intermediate, shape.hidden)) / shape.intermediate**0.5
    return x, topk_idx, probabilities(rng, *topk_idx.shape), w_gate_up.astype(dtype), w_down.astype(dtype)


def split(w: np.ndarray, num_ranks: int) -> np.ndarray:
    return w.reshape(num_ranks, -1, *w.shape[1:])


def layer(shape: Shape, implementation: str, **options: Any) -> Any:
    return functools.partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, **options)


def layer_and_gradients(shape: Shape, implementation: str, **options: Any) -> Any:
    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        call = layer(shape, implementation, **options)
        primal, pull = jax.vjp(lambda x, s, w, v: call(x, topk_idx, s, w, v), x, topk_weights, w_gate_up, w_down)
        return primal, *pull(d_out)

    return fn


def check(got: Any, args: Any, d_out: np.ndarray, lay: oracle.Layout) -> None:
    x, _, topk_weights, w_gate_up, w_down = args
    reference = oracle.MoE(x, topk_weights, w_gate_up, w_down, lay)
    wanted = (reference.forward(), *reference.gradients(d_out.astype(np.float64)))
    for name, g, w in zip(("y", "dx", "d_weights", "d_gate_up", "d_down"), got, wanted, strict=True):
        assert_close(g.reshape(w.shape), w, name, tolerance=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_forward_and_gradients(implementation: str, num_ranks: int, expert_mesh: Any, rng: Any, subtests: Any) -> None:
    call = compiled(layer_and_gradients(SHAPE, implementation), expert_mesh(num_ranks))
    for routing in ROUTINGS if num_ranks == 2 else FEW_ROUTINGS:
        with subtests.test(routing):
            args = inputs(rng, routing, num_ranks)
            d_out = reals(rng, *args[0].shape, dtype=BF16)
            got = call(*args[:3], *(split(w, num_ranks) for w in args[3:]), d_out)
            check(got, args, d_out, oracle.layout(args[1], SHAPE.num_experts))


@pytest.mark.parametrize("capacity", [1, 24, 60])
def test_capacity(implementation: str, capacity: int, expert_mesh: Any, rng: np.random.Generator) -> None:
    """Slots that find no row add nothing, whatever the heap holds from earlier calls."""
    call = compiled(layer_and_gradients(SHAPE, implementation, capacity=capacity), expert_mesh(2))
    for _ in range(2):
        args = inputs(rng, "zipf", 2)
        d_out = reals(rng, *args[0].shape, dtype=BF16)
        got = call(*args[:3], *(split(w, 2) for w in args[3:]), d_out)
        check(got, args, d_out, oracle.layout(args[1], SHAPE.num_experts, capacity=capacity))


def test_float16(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    args = inputs(rng, "uniform", 2, dtype=F16)
    got = run(layer(SHAPE, implementation), expert_mesh(2), *args[:3], *(split(w, 2) for w in args[3:]))
    assert got.dtype == F16
    x, topk_idx, topk_weights, w_gate_up, w_down = args
    lay = oracle.layout(topk_idx, SHAPE.num_experts)
    assert_close(got, oracle.MoE(x, topk_weights, w_gate_up, w_down, lay).forward(), "moe", tolerance=1e-2)


@pytest.mark.parametrize(("alignment", "scatters"), [(1, True), (16, True), (16, False)])
def test_halves(
    implementation: str, alignment: int, scatters: bool, mesh: Mesh, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """Row for row what dispatch and grouped_gemm give, and zero in padding."""
    monkeypatch.setattr(tuning, "scatters", lambda *_: scatters)
    x, topk_idx, _, w_gate_up, w_down = inputs(rng, "some_without_expert", mesh.size)

    def fn(x, topk_idx, w_gate_up, w_down):
        options = {"num_experts": SHAPE.num_experts, "implementation": implementation, "alignment": alignment}
        d = jax_ep.dispatch_grouped_gemm(x, topk_idx, None, w_gate_up, **options)
        y = jax_ep.grouped_gemm_combine(
            d.hidden[:, : SHAPE.intermediate], w_down, d.handle, implementation=implementation
        )
        return d.hidden, y

    args = (x, topk_idx, split(w_gate_up, mesh.size), split(w_down, mesh.size))
    call = compiled(fn, mesh)
    hidden, y = call(*args)
    lay = oracle.layout(topk_idx, SHAPE.num_experts, alignment=alignment)
    rows = oracle.gather(x.astype(np.float64), lay)
    products = np.stack(
        [
            oracle.grouped_gemm(rows[rank], split(w_gate_up, mesh.size)[rank].astype(np.float64), lay.group_sizes[rank])
            for rank in range(mesh.size)
        ]
    )
    assert_close(hidden, products, "hidden")
    assert not hidden[lay.is_padding].any()
    down = np.stack(
        [
            oracle.grouped_gemm(
                hidden[rank, :, : SHAPE.intermediate].astype(np.float64),
                split(w_down, mesh.size)[rank].astype(np.float64),
                lay.group_sizes[rank],
            )
            for rank in range(mesh.size)
        ]
    )
    assert_close(y, oracle.combine(down, lay), "combined", tolerance=TOLERANCE)
    for name, first, again in zip(("hidden", "combined"), (hidden, y), call(*args), strict=True):
        assert_same_bits(again, first, name)


def test_second_derivative(implementation: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """The backward pass differentiates again; against the portable implementation in float32."""
    shape = Shape(num_tokens=9, top_k=2, num_experts=4, hidden=16, intermediate=8)
    args = inputs(rng, "uniform", 2, shape)

    def fn(implementation: str, x, topk_idx, topk_weights, w_gate_up, w_down):
        def loss(x, w):
            y = layer(shape, implementation)(x, topk_idx, topk_weights, w, w_down)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        def slope(x, w):
            dx, dw = jax.grad(loss, (0, 1))(x, w)
            return jnp.sum(dx.astype(jnp.float32) ** 2) + jnp.sum(dw.astype(jnp.float32) ** 2)

        return jax.grad(slope, (0, 1))(x, w_gate_up)

    weights = [split(w, 2) for w in args[3:]]
    got = run(functools.partial(fn, implementation), expert_mesh(2), *args[:3], *weights)
    single = [args[0].astype(np.float32), *args[1:3], *(w.astype(np.float32) for w in weights)]
    wanted = run(functools.partial(fn, "xla"), expert_mesh(2), *single)
    for name, g, w in zip(("x", "w_gate_up"), got, wanted, strict=True):
        assert_close(g, w, name, tolerance=0.1)
