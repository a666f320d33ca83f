"""The weight gradient fused with dispatch or combine: same bits as two launches, and the default choice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import facts_of
import harness
import jax_ep
from cases import BF16, Shape
from jax_ep.core.facts import FusedFacts
from jax_ep.core.kernel import Config
from jax_ep.core.layout import dropless_capacity
from jax_ep.megakernels import cost_model, exchange_gemm
from jax_ep.megakernels.kernels.gemm_structs import WeightGradientOperands
from jax_ep.ops import exchange_gemm as ops
from jax_ep.ops import registry
from jax_ep.pallas import requirements
from jax_ep.types import Layout, Options, Schedule
from routings import ROUTINGS

SHAPE = Shape(num_tokens=19, top_k=3, num_experts=8, hidden=88, intermediate=40)
LAYOUT = Layout(num_ranks=2, num_experts=8, num_tokens=19, top_k=3, capacity=2 * 19 * 3)
AXIS = (harness.EXPERT,)


@pytest.fixture(scope="module")
def mesh():
    """Two ranks with one context for the tests of this file."""
    jax_ep.finalize()
    mesh = harness.make_mesh((2,), (harness.EXPERT,))
    jax_ep.init(mesh, transport="shared_memory")
    yield mesh
    jax_ep.finalize()


def sixteenths(rng, *shape):
    """Draw sixteenths, whose products have exact float32 sums in any order: tiles may differ in order."""
    return (rng.integers(-60, 61, shape) / 16).astype(BF16)


def launches(layout, transposed, mode, *, parts):
    """Return `fn(ids, x, h, w)`: sums and GEMMs in one launch, or in separate ones; with `parts`, each separately."""
    run = registry.get("exchange_gemm", "triton")
    products = registry.get("grouped_gemm", "triton")
    options = Options("test", AXIS, ("triton",), schedule=Schedule(dispatch_mode="fused", combine_mode=mode))
    sent = {"save_as": "tokens", "mode": "fused", "products": products}

    def fn(ids, x, h, w):
        handle = registry.get("exchange", "triton").plan(options, ids, layout)
        plan = facts_of.exchange_gemm(options, layout, BF16, SHAPE.hidden, SHAPE.intermediate)
        saved = run.dispatch_grouped_gemm(options, x, None, w, handle, transpose_rhs=not transposed, **sent)[1]
        tokens = run.expert_rows(saved, handle, "tokens")
        if mode == "scatter":
            arguments = {"transpose_rhs": transposed, "tokens": tokens}
            sums, _, gradient = run.grouped_gemm_combine(options, h, None, w, handle, **arguments)
        else:
            y = products.grouped_gemm(h, w, handle.group_sizes, transpose_rhs=transposed, out_dtype=h.dtype)
            combine = run.combine_with_weight_gradient
            sums, _, gradient = combine(options, y, None, h, tokens, handle, transpose=transposed)
        found = sums, gradient
        if not parts:
            return found
        # Sequentially: on the CPU the runtime would start independent launches in any order.
        h = h + (found[0][0, 0] == 12345.678).astype(h.dtype)
        sums, _ = ops.run_combine(plan, transposed, h, None, w, handle, None)
        h = h + (sums[0, 0] == 12345.678).astype(h.dtype)
        return found, (sums, ops.weight_gradient(plan, not transposed, "tokens", x, saved, h, handle))

    return fn


def operands(layout, transposed, routing, rng):
    sizes = (SHAPE.hidden, SHAPE.intermediate) if transposed else (SHAPE.intermediate, SHAPE.hidden)
    ids = ROUTINGS[routing](rng, 2, dataclasses.replace(SHAPE, num_tokens=layout.num_tokens))
    h = sixteenths(rng, 2, layout.capacity, SHAPE.intermediate)
    if layout.alignment == 1:  # Rows past the groups are undefined.
        for rank in range(2):
            h[rank, np.count_nonzero((ids >= 4 * rank) & (ids < 4 * rank + 4)) :] = np.nan
    return ids, sixteenths(rng, 2, layout.num_tokens, SHAPE.hidden), h, sixteenths(rng, 2, 4, *sizes)


MODES = {  # And the settings that divide them.
    "scatter": "gemm_combine_sizes",
    "serial": "combine_with_weight_gradient_sizes",
}
ALIGNED = dropless_capacity(LAYOUT.num_slots, 4, 16)
CASES = {
    "uniform": (LAYOUT, False, "some_without_expert"),
    "capacity": (dataclasses.replace(LAYOUT, capacity=24), True, "zipf"),
    "alignment": (dataclasses.replace(LAYOUT, capacity=ALIGNED, alignment=16), True, "one_hot_every_slot"),
    "one token": (dataclasses.replace(LAYOUT, num_tokens=1, capacity=6), True, "uniform"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(unless={"name": ["uniform", "capacity"]})
def test_fused_weight_gradients_match_two_launches(name, mode, mesh, rng):
    layout, transposed, routing = CASES[name]
    arguments = operands(layout, transposed, routing, rng)
    joined, parts = harness.run(launches(layout, transposed, mode, parts=True), mesh, *arguments)
    for what, got, wanted in zip(("sums", "gradient"), joined, parts, strict=True):
        assert got.dtype == wanted.dtype and np.isfinite(wanted.astype(np.float32)).all()
        np.testing.assert_array_equal(got, wanted, err_msg=what)
    if name != "alignment":  # Padding rows hold numbers that no other rank knows.
        assert all(np.abs(array.astype(np.float32)).max() > 0 for array in joined)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow(unless={"mode": ["scatter"]})
def test_fused_weight_gradients_programs_and_tiles_same_bits(mode, mesh, rng, monkeypatch):
    """One program, several that leave sums to the last one, or more than all for the first; other tiles."""
    chosen, launched = getattr(exchange_gemm, MODES[mode]), []
    gradient_sizes = exchange_gemm._gradient_sizes
    arguments = operands(LAYOUT, True, "zipf", rng)
    wanted = harness.run(launches(LAYOUT, True, mode, parts=False), mesh, *arguments)
    for num_programs, width, few in ((1, 16, 1), (5, 64, 2), (3, 32, 4)):

        def divided(*arguments, choice=(num_programs, few)):
            launched.append(choice)
            _, sizes = chosen(*arguments)
            shares = {"comm_programs": choice[1], "tiles_per_task": choice[1]} if mode == "serial" else {}
            return Config(choice[0]), dataclasses.replace(sizes, **shares)

        def narrowed(*arguments, width=width, **options):
            sizes = gradient_sizes(*arguments, **options)
            return dataclasses.replace(sizes, tile=dataclasses.replace(sizes.tile, block_n=width))

        monkeypatch.setattr(exchange_gemm, MODES[mode], divided)
        monkeypatch.setattr(exchange_gemm, "_gradient_sizes", narrowed)
        got = harness.run(launches(LAYOUT, True, mode, parts=False), mesh, *arguments)
        for found, want in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(found, want)
        assert launched[-1] == (num_programs, few)


@pytest.mark.parametrize("function", ["moe", "dispatch_grouped_gemm"])
def test_fused_weight_gradients_requested_launch_runs(function, mesh, monkeypatch):
    """By name against the cost model, and by the cost model as the default."""
    launched = gradient_launches(monkeypatch)
    kernels = {"scatter": "gemm_combine", "serial": "combine_with_weight_gradient"}
    for wanted, faster, number in ((True, False, 1), (False, True, 0), (None, False, 0), (None, True, 1)):
        monkeypatch.setattr(cost_model, "_gradient_is_faster", lambda *_, faster=faster: faster)
        for mode in kernels:
            times = cost_model.BackwardTimes({}, {name: float(name != mode) for name in kernels})
            monkeypatch.setattr(cost_model, "backward_times", lambda *_, times=times, **__: times)
            launched.clear()
            schedule = Schedule(fuse_weight_gradients=wanted)
            jax.eval_shape(harness.per_rank(gradients(function, schedule=schedule), mesh), *layer_inputs())
            assert launched == [kernels[mode]] * number


def gradient_launches(monkeypatch):
    """Record kernels of launches that include a weight gradient, from now on."""
    launched, launch = [], exchange_gemm.launch

    def note(kernel, operands, *rest, **options):
        if isinstance(operands[-1], WeightGradientOperands):
            launched.append(kernel.name)
        return launch(kernel, operands, *rest, **options)

    monkeypatch.setattr(exchange_gemm, "launch", note)
    return launched


def test_fused_weight_gradients_frozen_weights(mesh, monkeypatch):
    """With any schedule: no gradient is computed, and no tokens are saved or sent again for it."""
    launched = gradient_launches(monkeypatch)
    forms, dispatch, sent = [], exchange_gemm.dispatch_grouped_gemm, []
    again = exchange_gemm.dispatch_apart

    def note(*arguments, save_as, **options):
        forms.append(save_as)
        return dispatch(*arguments, save_as=save_as, **options)

    monkeypatch.setattr(exchange_gemm, "dispatch_grouped_gemm", note)
    monkeypatch.setattr(exchange_gemm, "dispatch_apart", lambda *args: sent.append(args[1].shape) or again(*args))
    x, ids, weights, w, w_down = layer_inputs()
    rng = np.random.default_rng(5)
    x, w = sixteenths(rng, *x.shape), sixteenths(rng, *w.shape)

    def fn(argnums, keep, x, ids, weights, w, w_down):
        def loss(x, w):
            schedule = Schedule(fuse_weight_gradients=True, keep_tokens=keep)
            common = {"num_experts": 4, "implementation": "triton", "schedule": schedule}
            hidden = jax_ep.dispatch_grouped_gemm(x, ids, weights, w, **common).hidden.astype(jnp.float32)
            return jnp.sum(hidden * jnp.arange(32, dtype=jnp.float32)[None, :])

        return jax.grad(loss, argnums)(x, w)

    arguments = x, ids, weights, w, w_down
    for keep in (True, False):
        d_x, d_w = harness.run(functools.partial(fn, (0, 1), keep), mesh, *arguments)
        assert launched == ["combine_with_weight_gradient"] and np.abs(d_w.astype(np.float32)).max() > 0
        assert (forms, sent) == (["rows"], []) if keep else ([None], [(4, 16)])
        launched.clear(), forms.clear(), sent.clear()
        np.testing.assert_array_equal(harness.run(functools.partial(fn, 0, keep), mesh, *arguments), d_x)
        assert (launched, forms, sent) == ([], [None], [])
        forms.clear()


def layer_inputs(dtype=BF16):
    """Return x, expert ids, router weights, and both weights of two ranks."""
    matrices = np.ones((2, 2, 16, 32), dtype), np.ones((2, 2, 16, 16), dtype)
    return np.ones((2, 4, 16), dtype), np.zeros((2, 4, 1), np.int32), np.ones((2, 4, 1), np.float32), *matrices


def gradients(function, **options):
    """Return gradients of tokens and of the first weights."""

    def fn(x, ids, weights, w, w_down):
        def loss(x, w):
            common = {"num_experts": 4, "implementation": "triton", **options}
            if function == "moe":
                return jnp.sum(jax_ep.moe(x, ids, weights, w, w_down, **common).astype(jnp.float32))
            return jnp.sum(jax_ep.dispatch_grouped_gemm(x, ids, None, w, **common).hidden.astype(jnp.float32))

        return jax.grad(loss, (0, 1))(x, w)

    return fn


REFUSED = {
    "float32 tokens": ("moe", np.float32, {}, r"tokens of float32.*matrices of \[16, 32\].*bfloat16"),
    "float32": ("dispatch_grouped_gemm", np.float32, {}, "tokens of float32"),
}


def test_fused_weight_gradients_unsupported(mesh, subtests):
    """True is an error; None uses separate launches."""

    def trace(function, dtype, **options):
        return jax.eval_shape(harness.per_rank(gradients(function, **options), mesh), *layer_inputs(dtype))

    for name, (function, dtype, options, message) in REFUSED.items():
        with subtests.test(name):
            with pytest.raises(ValueError, match=f"fuse_weight_gradients=True.*{message}.*leave it None"):
                trace(function, dtype, schedule=Schedule(fuse_weight_gradients=True), **options)
            assert jax.tree.leaves(trace(function, dtype, **options))


def layout(ranks):
    return Layout(ranks, 256, 4096, 8, capacity=9 * 4096)


@pytest.mark.parametrize(
    ("ranks", "sizes", "mode", "wanted"),
    [
        (2, (4096, 7168), None, False),  # Little is sent: less than a hundredth to gain.
        (4, (4096, 7168), None, True),
        (8, (4096, 7168), "scatter", False),  # The GEMM hides the communication.
        (8, (4096, 7168), "serial", True),
        (4, (3072, 4096), None, True),  # Qwen3-235B.
        (8, (512, 4096), None, True),  # Narrow experts: communication takes longer than the GEMMs.
    ],
)
def test_fused_weight_gradients_cost_model_choice(ranks, sizes, mode, wanted, on_h200):
    product = facts_of.gemm(BF16, layout(ranks).capacity, *sizes, layout(ranks).num_local_experts)
    facts = FusedFacts(jnp.dtype(BF16), sizes[1], sizes[0], layout(ranks))
    for asked, expected in ((None, wanted), (False, False), (True, True)):
        schedule = Schedule(combine_mode=mode, fuse_weight_gradients=asked)
        found = cost_model.fused_modes(schedule, facts, by_pallas=requirements.is_preferred(product))
        assert (found.combine_with_gradient is not None) == expected
