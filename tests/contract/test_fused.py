"""The layer in 16-bit floats with rows of whole 16-byte words, which implementations may fuse."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep
import oracle
from cases import BF16, F16, Shape, assert_close, assert_same_bits, probabilities, reals
from harness import compiled, run
from jax_ep.types import COMBINE_MODES, DISPATCH_MODES, Schedule
from layers import second_derivative
from routings import FEW_ROUTINGS, ROUTINGS

# Groups end within tiles, and T is not a multiple of a block.
SHAPE = Shape(num_tokens=37, top_k=3, num_experts=8, hidden=88, intermediate=40)
# Two GEMMs deep, each of which rounds its inputs and outputs.
TOLERANCE = 4e-2


@pytest.fixture(params=COMBINE_MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of GEMM + combine; implementations without fusion skip all but one."""
    return request.param


def inputs(rng: np.random.Generator, routing: str, num_ranks: int, shape: Shape = SHAPE, dtype: Any = BF16) -> Any:
    """Return x, topk_idx, topk_weights and the stacked weights of all experts."""
    topk_idx = ROUTINGS[routing](rng, num_ranks, shape)
    x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=dtype)
    w_gate_up = rng.standard_normal((shape.num_experts, shape.hidden, 2 * shape.intermediate)) / shape.hidden**0.5
    w_down = rng.standard_normal((shape.num_experts, shape.intermediate, shape.hidden)) / shape.intermediate**0.5
    return x, topk_idx, probabilities(rng, *topk_idx.shape), w_gate_up.astype(dtype), w_down.astype(dtype)


def split(w: np.ndarray, num_ranks: int) -> np.ndarray:
    return w.reshape(num_ranks, -1, *w.shape[1:])


def layer(shape: Shape, implementation: str, **options: Any) -> Any:
    """Return `moe` with these keywords; schedule fields are passed by name."""
    names = {field.name for field in dataclasses.fields(Schedule)}
    schedule = Schedule(**{name: options.pop(name) for name in names & set(options)})
    common = {"num_experts": shape.num_experts, "implementation": implementation, "schedule": schedule}
    return functools.partial(jax_ep.moe, **common, **options)


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
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_fused_forward_and_gradients(
    implementation: str, mode: str, num_ranks: int, expert_mesh: Any, rng: Any, subtests: Any
) -> None:
    call = compiled(layer_and_gradients(SHAPE, implementation, combine_mode=mode), expert_mesh(num_ranks))
    for routing in ROUTINGS if num_ranks == 2 else FEW_ROUTINGS:
        with subtests.test(routing):
            args = inputs(rng, routing, num_ranks)
            d_out = reals(rng, *args[0].shape, dtype=BF16)
            got = call(*args[:3], *(split(w, num_ranks) for w in args[3:]), d_out)
            check(got, args, d_out, oracle.layout(args[1], SHAPE.num_experts))


@pytest.mark.parametrize("capacity", [1, 24, 60])
@pytest.mark.slow_interpreted(unless={"capacity": [60], "mode": ["scatter"]})
def test_fused_capacity(
    implementation: str, mode: str, capacity: int, expert_mesh: Any, rng: np.random.Generator
) -> None:
    """Assignments without a row add nothing, whatever earlier calls left in the heap."""
    options = {"capacity": capacity, "combine_mode": mode}
    call = compiled(layer_and_gradients(SHAPE, implementation, **options), expert_mesh(2))
    for _ in range(2):
        args = inputs(rng, "zipf", 2)
        d_out = reals(rng, *args[0].shape, dtype=BF16)
        got = call(*args[:3], *(split(w, 2) for w in args[3:]), d_out)
        check(got, args, d_out, oracle.layout(args[1], SHAPE.num_experts, capacity=capacity))


def test_fused_float16(implementation: str, mode: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    args = inputs(rng, "uniform", 2, dtype=F16)
    call = layer(SHAPE, implementation, combine_mode=mode)
    got = run(call, expert_mesh(2), *args[:3], *(split(w, 2) for w in args[3:]))
    assert got.dtype == F16
    x, topk_idx, topk_weights, w_gate_up, w_down = args
    lay = oracle.layout(topk_idx, SHAPE.num_experts)
    assert_close(got, oracle.MoE(x, topk_weights, w_gate_up, w_down, lay).forward(), "moe", tolerance=1e-2)


@pytest.mark.parametrize("number", [1, 1000])
def test_fused_communicating_programs_same_bits(
    implementation: str, number: int, expert_mesh: Any, rng: np.random.Generator
) -> None:
    args, mesh = inputs(rng, "zipf", 2), expert_mesh(2)
    arrays = *args[:3], *(split(w, 2) for w in args[3:]), reals(rng, *args[0].shape, dtype=BF16)
    mode = "fused" if implementation == "triton" else None  # Others ignore the number.
    call = layer_and_gradients(SHAPE, implementation, dispatch_mode=mode, num_communicating_programs=number)
    default = layer_and_gradients(SHAPE, implementation, dispatch_mode=mode)
    for got, want in zip(run(call, mesh, *arrays), run(default, mesh, *arrays), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dispatch_mode", DISPATCH_MODES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_fused_dispatch_modes(
    implementation: str, dispatch_mode: str, num_ranks: int, expert_mesh: Any, rng: Any, subtests: Any
) -> None:
    """Forward and gradients; also with a capacity that leaves tokens without rows."""
    for capacity, routings in ((None, ("zipf", "some_without_expert")), (24, ("one_hot",))):
        options = {"dispatch_mode": dispatch_mode, "capacity": capacity}
        call = compiled(layer_and_gradients(SHAPE, implementation, **options), expert_mesh(num_ranks))
        for routing in routings:
            with subtests.test(f"{routing}, {capacity}"):
                args = inputs(rng, routing, num_ranks)
                d_out = reals(rng, *args[0].shape, dtype=BF16)
                arguments = *args[:3], *(split(w, num_ranks) for w in args[3:]), d_out
                if implementation != "triton" and dispatch_mode == "fused":
                    with pytest.raises(NotImplementedError, match="mode='fused'"):
                        call(*arguments)
                    continue
                check(call(*arguments), args, d_out, oracle.layout(args[1], SHAPE.num_experts, capacity=capacity))


@pytest.mark.parametrize("dispatch_mode", [None, *DISPATCH_MODES])
@pytest.mark.parametrize("alignment", [1, 16])
def test_fused_halves(
    implementation: str, mode: str, alignment: int, dispatch_mode: str | None, mesh: Mesh, rng: np.random.Generator
) -> None:
    """Results match dispatch and grouped_gemm row for row, with zeros in padding."""
    if dispatch_mode == "fused" and implementation != "triton":
        pytest.skip(f"{implementation} fuses nothing")
    if dispatch_mode is not None and mode != "serial":
        pytest.skip("each mode runs once, with the simplest mode of the other half")
    x, topk_idx, _, w_gate_up, w_down = inputs(rng, "some_without_expert", mesh.size)

    def fn(x, topk_idx, w_gate_up, w_down):
        options = {"num_experts": SHAPE.num_experts, "implementation": implementation, "alignment": alignment}
        schedule = Schedule(dispatch_mode=dispatch_mode)
        d = jax_ep.dispatch_grouped_gemm(x, topk_idx, None, w_gate_up, schedule=schedule, **options)
        rows = d.hidden[:, : SHAPE.intermediate]
        schedule = Schedule(combine_mode=mode)
        y = jax_ep.grouped_gemm_combine(rows, w_down, d.handle, schedule=schedule, implementation=implementation)
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


def sixteenths(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw sixteenths, whose products have exact float32 sums in any order: tiles may differ in order."""
    return (rng.integers(-60, 61, shape) / 16).astype(BF16)


@pytest.mark.parametrize("options", [{}, {"capacity": 32, "alignment": 4}], ids=["dropless", "capacity"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_fused_modes_rounding(
    implementation: str, num_ranks: int, options: dict[str, int], expert_mesh: Any, rng: Any, subtests: Any
) -> None:
    """The modes round in different places; the gradients of both have the same bits."""

    def fn(mode: str, x, topk_idx, h, w_down, d_y):
        common = {"num_experts": SHAPE.num_experts, "implementation": implementation}
        handle = jax_ep.dispatch(x, topk_idx, **common, **options).handle
        how = {"schedule": Schedule(combine_mode=mode), "implementation": implementation}
        call = functools.partial(jax_ep.grouped_gemm_combine, handle=handle, **how)
        y, pull = jax.vjp(call, h[: handle.row_to_assignment.shape[0]], w_down)
        return y, *pull(d_y)

    calls = {mode: compiled(functools.partial(fn, mode), expert_mesh(num_ranks)) for mode in COMBINE_MODES}
    for routing in ROUTINGS if num_ranks == 2 else FEW_ROUTINGS:
        with subtests.test(routing):
            x, topk_idx, *_ = inputs(rng, routing, num_ranks)
            h = sixteenths(rng, num_ranks, topk_idx.size, SHAPE.intermediate)
            w_down = sixteenths(rng, num_ranks, SHAPE.num_experts // num_ranks, SHAPE.intermediate, SHAPE.hidden)
            d_y = reals(rng, *x.shape, dtype=BF16)
            found = {mode: call(x, topk_idx, h, w_down, d_y) for mode, call in calls.items()}
            assert_close(found["scatter"][0], found["serial"][0].astype(np.float64), "scatter", tolerance=TOLERANCE)
            for name, got, wanted in zip(("dh", "dw"), found["scatter"][1:], found["serial"][1:], strict=True):
                assert_same_bits(got, wanted, name)


def test_fused_mode_default(implementation: str, mesh: Mesh, rng: np.random.Generator) -> None:
    """In every implementation, with the result of one of the modes."""
    args = inputs(rng, "zipf", mesh.size)
    arguments = *args[:3], *(split(w, mesh.size) for w in args[3:])
    got = run(layer(SHAPE, implementation), mesh, *arguments)
    serial = run(layer(SHAPE, implementation, combine_mode="serial"), mesh, *arguments)
    assert_close(got, serial.astype(np.float64), "chosen", tolerance=TOLERANCE)


def test_fused_second_derivative(implementation: str, mode: str, expert_mesh: Any, rng: np.random.Generator) -> None:
    """The backward pass can be differentiated; compare with the portable implementation in float32."""
    shape = Shape(num_tokens=9, top_k=2, num_experts=4, hidden=16, intermediate=8)
    args = inputs(rng, "uniform", 2, shape)

    def fn(implementation: str, mode: str | None, x, topk_idx, topk_weights, w_gate_up, w_down):
        call = layer(shape, implementation, combine_mode=mode)
        return second_derivative(lambda x, w: call(x, topk_idx, topk_weights, w, w_down))(x, w_gate_up)

    weights = [split(w, 2) for w in args[3:]]
    got = run(functools.partial(fn, implementation, mode), expert_mesh(2), *args[:3], *weights)
    single = [args[0].astype(np.float32), *args[1:3], *(w.astype(np.float32) for w in weights)]
    wanted = run(functools.partial(fn, "xla", None), expert_mesh(2), *single)
    for name, g, w in zip(("x", "w_gate_up"), got, wanted, strict=True):
        assert_close(g, w, name, tolerance=0.1)
