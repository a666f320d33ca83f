"""The layer in 16-bit floats with rows of whole 16-byte words, which implementations may fuse."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BF16, F16, Shape, assert_close, assert_same_bits, reals
from harness import compiled, per_rank, run
from jax_ep.types import COMBINE_MODES, DISPATCH_MODES, Schedule
from layers import Layer, check_gradients, check_routings, second_derivative, with_gradients
from routings import FEW_ROUTINGS, ROUTINGS

# Groups end within tiles, and T is not a multiple of a block.
SHAPE = Shape(num_tokens=37, top_k=3, num_experts=8, hidden=88, intermediate=40)
# Two GEMMs deep; each one rounds its inputs and outputs.
TOLERANCE = 4e-2
OTHER_ROUTINGS = [name for name in ROUTINGS if name not in FEW_ROUTINGS]


@pytest.fixture(params=COMBINE_MODES)
def mode(request):
    """The mode of GEMM + combine; implementations without fusion skip all but one."""
    return request.param


def layer(shape, implementation, **options):
    """Return `moe` with these keywords; schedule fields are passed by name."""
    names = {field.name for field in dataclasses.fields(Schedule)}
    schedule = Schedule(**{name: options.pop(name) for name in names & set(options)})
    common = {"num_experts": shape.num_experts, "implementation": implementation, "schedule": schedule}
    return functools.partial(jax_ep.moe, **common, **options)


def layer_and_gradients(shape, implementation, **options):
    return with_gradients(layer(shape, implementation, **options))


@pytest.mark.parametrize(
    ("num_ranks", "routings"),
    [(1, FEW_ROUTINGS), (2, FEW_ROUTINGS), (2, OTHER_ROUTINGS), (4, FEW_ROUTINGS)],
    ids=["1", "2", "2 others", "4"],
)
@pytest.mark.slow(unless={"num_ranks": [2]})
@pytest.mark.slow_interpreted(unless={"routings": [FEW_ROUTINGS]})
def test_fused_forward_and_gradients(implementation, mode, num_ranks, routings, expert_mesh, rng, subtests):
    mesh = expert_mesh(num_ranks)
    call = compiled(layer_and_gradients(SHAPE, implementation, combine_mode=mode), mesh)
    check_routings(call, routings, mesh, rng, subtests, SHAPE, BF16, tolerance=TOLERANCE)


@pytest.mark.parametrize("capacity", [1, 24, 60])
@pytest.mark.slow(unless={"capacity": [60]})
@pytest.mark.slow_interpreted(unless={"capacity": [60], "mode": ["scatter"]})
def test_fused_capacity(implementation, mode, capacity, expert_mesh, rng):
    """Assignments without a row add nothing, whatever earlier calls left in the heap."""
    options = {"capacity": capacity, "combine_mode": mode}
    call = compiled(layer_and_gradients(SHAPE, implementation, **options), expert_mesh(2))
    for _ in range(2):
        problem = Layer(rng, "zipf", 2, SHAPE, BF16)
        d_out = reals(rng, *problem.x.shape, dtype=BF16)
        check_gradients(call(*problem.args, d_out), problem, d_out, tolerance=TOLERANCE, capacity=capacity)


@pytest.mark.slow
def test_fused_scan_and_remat(implementation, mode, expert_mesh, rng):
    """Gradients of two layers are those without scan and remat."""
    problem = Layer(rng, "uniform", 2, SHAPE, BF16)
    x, topk_idx, topk_weights, *matrices = problem.args
    layers = [np.stack([w, np.roll(w, 1, axis=1)], axis=1) for w in matrices]

    def fn(scanned, x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def block(x, w):
            return x + layer(SHAPE, implementation, combine_mode=mode)(x, topk_idx, topk_weights, *w), None

        def forward(x, *w):
            if scanned:
                return jax.lax.scan(jax.checkpoint(block), x, w)[0]
            for i in range(2):
                x = block(x, tuple(array[i] for array in w))[0]
            return x

        return jax.vjp(forward, x, w_gate_up, w_down)[1](d_out)

    args = x, topk_idx, topk_weights, *layers, reals(rng, *x.shape, dtype=BF16)
    got, wanted = (run(functools.partial(fn, scanned), expert_mesh(2), *args) for scanned in (True, False))
    for name, g, w in zip(("dx", "d_gate_up", "d_down"), got, wanted, strict=True):
        assert_close(g, w.astype(np.float64), name)


def test_fused_float16(implementation, mode, expert_mesh, rng):
    problem = Layer(rng, "uniform", 2, SHAPE, F16)
    got = run(layer(SHAPE, implementation, combine_mode=mode), expert_mesh(2), *problem.args)
    assert got.dtype == F16
    assert_close(got, problem.oracle().forward(), "moe", tolerance=1e-2)


@pytest.mark.parametrize("number", [1, 1000])
@pytest.mark.slow(unless={"implementation": ["triton"]})
def test_fused_communicating_programs_same_bits(implementation, number, expert_mesh, rng):
    problem, mesh = Layer(rng, "zipf", 2, SHAPE, BF16), expert_mesh(2)
    arrays = *problem.args, reals(rng, *problem.x.shape, dtype=BF16)
    mode = "fused" if implementation == "triton" else None  # Others ignore the number.
    call = layer_and_gradients(SHAPE, implementation, dispatch_mode=mode, num_communicating_programs=number)
    default = layer_and_gradients(SHAPE, implementation, dispatch_mode=mode)
    for got, want in zip(run(call, mesh, *arrays), run(default, mesh, *arrays), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dispatch_mode", DISPATCH_MODES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_fused_dispatch_modes(implementation, dispatch_mode, num_ranks, expert_mesh, rng, subtests):
    """Forward and gradients; also with a capacity that leaves tokens without rows."""
    for capacity, routings in ((None, ("zipf", "some_without_expert")), (24, ("one_hot",))):
        options = {"dispatch_mode": dispatch_mode, "capacity": capacity}
        call, mesh = layer_and_gradients(SHAPE, implementation, **options), expert_mesh(num_ranks)
        if implementation != "triton" and dispatch_mode == "fused":
            layer = Layer(rng, routings[0], num_ranks, SHAPE, BF16)
            with pytest.raises(NotImplementedError, match="mode='fused'"):
                jax.eval_shape(per_rank(call, mesh), *layer.args, layer.x)
            continue
        check_routings(
            compiled(call, mesh), routings, mesh, rng, subtests, SHAPE, BF16, tolerance=TOLERANCE, capacity=capacity
        )


@pytest.mark.parametrize("dispatch_mode", [None, *DISPATCH_MODES])
@pytest.mark.parametrize("alignment", [1, 16])
def test_fused_halves(implementation, mode, alignment, dispatch_mode, mesh, rng):
    """Results match dispatch and grouped_gemm row for row, with zeros in padding."""
    if dispatch_mode == "fused" and implementation != "triton":
        pytest.skip(f"{implementation} fuses nothing")
    if dispatch_mode is not None and mode != "serial":
        pytest.skip("each mode runs once, with the simplest mode of the other half")
    x, topk_idx, _, w_gate_up, w_down = Layer(rng, "some_without_expert", mesh.size, SHAPE, BF16).args

    def fn(x, topk_idx, w_gate_up, w_down):
        options = {"num_experts": SHAPE.num_experts, "implementation": implementation, "alignment": alignment}
        schedule = Schedule(dispatch_mode=dispatch_mode)
        d = jax_ep.dispatch_grouped_gemm(x, topk_idx, None, w_gate_up, schedule=schedule, **options)
        rows = d.hidden[:, : SHAPE.intermediate]
        schedule = Schedule(combine_mode=mode)
        y = jax_ep.grouped_gemm_combine(rows, w_down, d.handle, schedule=schedule, implementation=implementation)
        return d.hidden, y

    args = x, topk_idx, w_gate_up, w_down
    call = compiled(fn, mesh)
    hidden, y = call(*args)
    lay = oracle.layout(topk_idx, SHAPE.num_experts, alignment=alignment)
    rows = oracle.gather(x.astype(np.float64), lay)

    def product(lhs, w):
        return np.stack([oracle.grouped_gemm(*a) for a in zip(lhs, w.astype(float), lay.group_sizes, strict=True)])

    assert_close(hidden, product(rows, w_gate_up), "hidden")
    assert not hidden[lay.is_padding].any()
    gates = hidden[..., : SHAPE.intermediate].astype(np.float64)
    assert_close(y, oracle.combine(product(gates, w_down), lay), "combined", tolerance=TOLERANCE)
    for name, first, again in zip(("hidden", "combined"), (hidden, y), call(*args), strict=True):
        assert_same_bits(again, first, name)


def sixteenths(rng, *shape):
    """Draw sixteenths, whose products have exact float32 sums in any order: tiles may differ in order."""
    return (rng.integers(-60, 61, shape) / 16).astype(BF16)


@pytest.mark.parametrize("options", [{}, {"capacity": 32, "alignment": 4}], ids=["dropless", "capacity"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_fused_modes_rounding(implementation, num_ranks, options, expert_mesh, rng, subtests):
    """The modes round in different places; the gradients of both have the same bits."""

    def fn(mode, x, topk_idx, h, w_down, d_y):
        common = {"num_experts": SHAPE.num_experts, "implementation": implementation}
        handle = jax_ep.dispatch(x, topk_idx, **common, **options).handle
        how = {"schedule": Schedule(combine_mode=mode), "implementation": implementation}
        call = functools.partial(jax_ep.grouped_gemm_combine, handle=handle, **how)
        y, pull = jax.vjp(call, h[: handle.row_to_assignment.shape[0]], w_down)
        return y, *pull(d_y)

    calls = {mode: compiled(functools.partial(fn, mode), expert_mesh(num_ranks)) for mode in COMBINE_MODES}
    for routing in ROUTINGS if num_ranks == 2 else FEW_ROUTINGS:
        with subtests.test(routing):
            x, topk_idx, *_ = Layer(rng, routing, num_ranks, SHAPE, BF16).args
            h = sixteenths(rng, num_ranks, topk_idx.size, SHAPE.intermediate)
            w_down = sixteenths(rng, num_ranks, SHAPE.num_experts // num_ranks, SHAPE.intermediate, SHAPE.hidden)
            d_y = reals(rng, *x.shape, dtype=BF16)
            found = {mode: call(x, topk_idx, h, w_down, d_y) for mode, call in calls.items()}
            assert_close(found["scatter"][0], found["serial"][0].astype(np.float64), "scatter", tolerance=TOLERANCE)
            for name, got, wanted in zip(("dh", "dw"), found["scatter"][1:], found["serial"][1:], strict=True):
                assert_same_bits(got, wanted, name)


def test_fused_mode_default(implementation, mesh, rng):
    """In every implementation, with the result of one of the modes."""
    arguments = Layer(rng, "zipf", mesh.size, SHAPE, BF16).args
    got = run(layer(SHAPE, implementation), mesh, *arguments)
    serial = run(layer(SHAPE, implementation, combine_mode="serial"), mesh, *arguments)
    assert_close(got, serial.astype(np.float64), "chosen", tolerance=TOLERANCE)


@pytest.mark.slow
def test_fused_second_derivative(implementation, mode, expert_mesh, rng):
    """The backward pass can be differentiated; compare with the portable implementation in float32."""
    shape = Shape(num_tokens=9, top_k=2, num_experts=4, hidden=16, intermediate=8)
    args = Layer(rng, "uniform", 2, shape, BF16).args

    def fn(implementation, mode, x, topk_idx, topk_weights, w_gate_up, w_down):
        call = layer(shape, implementation, combine_mode=mode)
        return second_derivative(lambda x, w: call(x, topk_idx, topk_weights, w, w_down))(x, w_gate_up)

    got = run(functools.partial(fn, implementation, mode), expert_mesh(2), *args)
    single = [a.astype(np.float32) if a.dtype == BF16 else a for a in args]
    wanted = run(functools.partial(fn, "xla", None), expert_mesh(2), *single)
    for name, g, w in zip(("x", "w_gate_up"), got, wanted, strict=True):
        assert_close(g, w, name, tolerance=0.1)
