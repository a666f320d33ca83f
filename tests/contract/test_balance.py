"""The balanced expert layer: forward and gradients against the oracle for any routing, and its memory."""

import dataclasses
import functools
import gc
import re

import jax
import numpy as np
import pytest

import facts_of
import jax_ep
from cases import BASE, BF16, F32, Shape, assert_close, assert_same_bits, reals
from harness import compiled, make_mesh, per_rank, run
from jax_ep.ops import balanced
from jax_ep.ops import plan as plans
from jax_ep.types import Layout, Schedule
from layers import Layer, check_gradients, check_routings, first_tokens, with_gradients
from routings import ROUTINGS

ROUTED = [(2, jax_ep.Balance(1.0, 1)), (1, jax_ep.Balance(1.1)), (4, jax_ep.Balance(1.0, 8)), (8, jax_ep.Balance(1.1))]


def layer_and_gradients(shape, implementation, balance, **options):
    fixed = {"num_experts": shape.num_experts, "implementation": implementation, "balance": balance}
    return with_gradients(functools.partial(jax_ep.moe, **fixed, **options))


@pytest.mark.parametrize(("num_ranks", "balance"), ROUTED)
@pytest.mark.slow(unless={"num_ranks": [2]})
def test_balance_routings(implementation, num_ranks, balance, expert_mesh, rng, subtests):
    mesh = expert_mesh(num_ranks)
    call = compiled(layer_and_gradients(BASE, implementation, balance), mesh)
    check_routings(call, ROUTINGS, mesh, rng, subtests, BASE)


@pytest.mark.slow
def test_balance_one_expert_per_rank(implementation, mesh, rng, subtests):
    shape = Shape(num_tokens=9, top_k=2, num_experts=mesh.size)
    call = compiled(layer_and_gradients(shape, implementation, jax_ep.Balance(1.0)), mesh)
    check_routings(call, ("one_hot_every_slot", "zipf"), mesh, rng, subtests, shape)


@pytest.mark.slow
def test_balance_axes_in_another_order(implementation, rng):
    layer, axis_name = Layer(rng, "one_hot_every_slot", 4, BASE), ("b", "a")
    call = layer_and_gradients(BASE, implementation, jax_ep.Balance(1.0, 1), axis_name=axis_name)
    d_out = reals(rng, *layer.x.shape)
    got = run(call, make_mesh((2, 2), ("a", "b")), *layer.args, d_out, axes=(axis_name,))
    check_gradients(got, layer, d_out)


@pytest.mark.parametrize("mode", ["serial", "scatter"])
@pytest.mark.slow(unless={"implementation": ["triton"], "mode": ["scatter"]})
def test_balance_bfloat16_copies_in_their_own_array(implementation, mode, expert_mesh, rng, monkeypatch):
    """Match the oracle; GEMMs that read two arrays have the bits of those of weights and copies in one array."""
    shape = Shape(num_tokens=24, top_k=2, num_experts=8, hidden=72, intermediate=40)
    is_fused = facts_of.fuses(implementation, Layout(2, 8, 24, 2, 48), BF16, shape.hidden, shape.intermediate)
    if mode != "serial" and not is_fused:
        pytest.skip(f"{implementation} fuses no GEMM with all-to-alls")
    modes = {"dispatch_mode": "serial" if mode == "serial" else "fused", "combine_mode": mode}
    layer, resolve = Layer(rng, "zipf", 2, shape, BF16), plans.balanced
    d_out = reals(rng, *layer.x.shape, dtype=BF16)

    def results(splits):
        monkeypatch.setattr(plans, "balanced", lambda *args: dataclasses.replace(resolve(*args), splits=splits))
        fn = layer_and_gradients(shape, implementation, jax_ep.Balance(1.0, 1), schedule=Schedule(**modes))
        return run(fn, expert_mesh(2), *layer.args, d_out)

    found = results(True)
    assert [g.dtype for g in found] == [BF16, BF16, F32, BF16, BF16]
    check_gradients(found, layer, d_out, tolerance=4e-2)
    for got, want in zip(found, results(False), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("recipe", [None, "fp8"])
@pytest.mark.slow
def test_balance_moves_no_home_weights(implementation, recipe, expert_mesh, rng):
    """Without later passes XLA copies, slices, converts or joins neither all weights nor all gradients."""
    shape = Shape(num_tokens=24, top_k=2, num_experts=8, hidden=384, intermediate=128)
    layer = Layer(rng, "zipf", 2, shape, BF16)
    fn = per_rank(layer_and_gradients(shape, implementation, jax_ep.Balance(1.0, 1), recipe=recipe), expert_mesh(2))
    text = jax.jit(fn).lower(*layer.args, layer.x).compile().as_text()
    # The gradient kernel of `xla` writes one array. Its transfers, which serve `pallas`, add to a float32 copy of it.
    kinds = "concatenate" if implementation != "triton" else "copy|slice|concatenate|convert|fusion"
    entry = text[text.index("ENTRY") :]
    assert not re.findall(rf"= \w+\[[45],(?:384,256|128,384)\]\S* (?:{kinds})\(.*", entry)


@pytest.mark.slow
def test_balance_padding_and_biases(implementation, expert_mesh, rng):
    """The same sums as without balance; tokens without experts get zeros."""
    layer = Layer(rng, "one_hot_every_slot", 2, BASE)
    biases = reals(rng, 2, 4, 2 * BASE.intermediate), reals(rng, 2, 4, BASE.hidden)

    def fn(*args):
        *args, b_gate_up, b_down = args
        args[1] = first_tokens(args[1], 4)

        def call(**options):
            given = {"biases": (b_gate_up, b_down), "implementation": implementation}
            return jax_ep.moe(*args, num_experts=BASE.num_experts, **given, **options)

        want = call()
        args[0] = args[0] + 0 * want[:1]  # Sequentially.
        return call(balance=jax_ep.Balance(1.0, 1)), want

    got, want = run(fn, expert_mesh(2), *layer.args, *biases)
    assert not got[:, 4:].any()
    assert_close(got, want.astype(np.float64), "y")


@pytest.mark.parametrize("spare", [1, None])
@pytest.mark.slow(unless={"spare": [1], "implementation": ["xla"]})
def test_balance_custom_activation_closure(implementation, spare, expert_mesh, rng):
    """An array that the activation closes over gets its gradient, also one that is the same on all ranks."""
    layer, size = Layer(rng, "one_hot_every_slot", 2, BASE), BASE.intermediate

    def loss(factor, options):
        def own(hidden):
            return jax.numpy.tanh(hidden[:, :size] * factor) * hidden[:, size:]

        fixed = {"num_experts": BASE.num_experts, "experts": jax_ep.Experts(own), "implementation": implementation}
        y = per_rank(functools.partial(jax_ep.moe, **fixed, **options), expert_mesh(2))(*layer.args)
        return jax.numpy.sum(y**2)

    balances = {"balance": jax_ep.Balance(1.0, spare)}, {}
    got, want = (jax.jit(jax.value_and_grad(functools.partial(loss, options=o)))(np.float32(2)) for o in balances)
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("kind", ["recipe", "int8"])
@pytest.mark.slow(unless={"kind": ["recipe"]})
def test_balance_eight_bits(implementation, kind, expert_mesh, rng):
    """FP8 training and quantized experts, close to the layer without balance: rows move, and scales with them."""
    shape = Shape(num_tokens=8, top_k=2, num_experts=4, hidden=128, intermediate=128)
    layer = Layer(rng, "one_hot_every_slot", 2, shape, BF16)

    def fn(x, topk_idx, topk_weights, *weights):
        options = {"num_experts": 4, "implementation": implementation}
        if kind == "recipe":
            options["recipe"] = "fp8"
        else:
            weights = tuple(jax_ep.quantize(w, "int8") for w in weights)
        want = jax_ep.moe(x, topk_idx, topk_weights, *weights, **options)
        got = jax_ep.moe(x + 0 * want, topk_idx, topk_weights, *weights, **options, balance=jax_ep.Balance(1.0, 1))
        return got, want

    got, want = run(fn, expert_mesh(2), *layer.args)
    assert_close(got, want.astype(np.float64), "y")


@pytest.mark.slow
def test_balance_quantized_once(implementation, expert_mesh, rng):
    """Weights quantized before the layer have the bits of those quantized in it, forward and gradients."""
    shape = Shape(num_tokens=8, top_k=2, num_experts=4, hidden=128, intermediate=128)
    layer = Layer(rng, "zipf", 2, shape, BF16)
    d_out = reals(rng, *layer.x.shape, dtype=BF16)

    def results(once):
        def fn(x, topk_idx, topk_weights, *others):
            def moe(x, *weights):
                if once:
                    weights = tuple(jax_ep.quantize(w, "fp8", for_training=True) for w in weights)
                options = {"num_experts": 4, "implementation": implementation, "recipe": "fp8"}
                return jax_ep.moe(x, topk_idx, topk_weights, *weights, **options, balance=jax_ep.Balance(1.0, 1))

            *weights, d_out = others
            y, pull = jax.vjp(moe, x, *weights)
            return y, *pull(d_out)

        return run(fn, expert_mesh(2), *layer.args, d_out)

    for got, want in zip(results(True), results(False), strict=True):
        assert_same_bits(got, want)


@pytest.mark.slow
def test_balance_jit_scan_and_remat(implementation, expert_mesh, rng):
    """Two rematerialized layers in a scan have the gradient of two calls."""
    layer = Layer(rng, "zipf", 2, BASE)

    def fn(x, topk_idx, topk_weights, *weights):
        def call(x, *weights):
            fixed = {"num_experts": BASE.num_experts, "implementation": implementation}
            return jax_ep.moe(x, topk_idx, topk_weights, *weights, **fixed, balance=jax_ep.Balance(1.0, 1))

        def scanned(x, *weights):
            step = jax.checkpoint(lambda x, _: (x + call(x, *weights), None))
            return jax.lax.scan(step, x, None, length=2)[0].sum()

        def unrolled(x, *weights):
            x = x + call(x, *weights)
            return (x + call(x, *weights)).sum()

        first = jax.grad(scanned, (0, 1, 2))(x, *weights)
        return first, jax.grad(unrolled, (0, 1, 2))(x + 0 * first[0], *weights)

    got, want = run(fn, expert_mesh(2), *layer.args)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w.astype(np.float64), "gradient")


def test_balance_work(implementation, expert_mesh, rng):
    """One copy takes 9 of the 18 rows that rank 0 has too many; a second pass computes the others."""
    layer = Layer(rng, "uniform", 2, BASE)
    layer.topk_idx = np.arange(36, dtype=np.int32).reshape(2, 6, 3) % 4

    def fn(*args):
        with balanced.recording() as found:
            options = {"num_experts": 8, "implementation": implementation}
            y = jax_ep.moe(*args, **options, balance=jax_ep.Balance(1.0, 1))
        return y, found[0]

    y, work = run(fn, expert_mesh(2), *layer.args)
    assert_close(y, layer.oracle().forward(), "y")
    want = {"rows_before": [36, 0], "rows_after": [27, 9], "copies": [0, 1], "passes": [2, 2]}
    assert {name: np.ravel(count).tolist() for name, count in work.items()} == want


@pytest.mark.slow
def temporary_bytes(layer, shape, mesh, balance):
    fn = per_rank(layer_and_gradients(shape, "xla", balance), mesh)
    return jax.jit(fn).lower(*layer.args, layer.x).compile().memory_analysis().temp_size_in_bytes


def test_balance_memory(expert_mesh, rng):
    """The gradient of the balanced layer needs at most 0.4 of the temporary memory of the dropless layer."""
    shape = Shape(num_tokens=512, top_k=4, num_experts=16, hidden=128, intermediate=64)
    layer, mesh = Layer(rng, "uniform", 8, shape), expert_mesh(8)
    balanced_bytes = temporary_bytes(layer, shape, mesh, jax_ep.Balance(1.1, 1))
    assert balanced_bytes < 0.4 * temporary_bytes(layer, shape, mesh, None)


@pytest.mark.slow
def test_balance_memory_of_large_weights(expert_mesh, rng):
    """Later passes reserve no float32 sums of the gradients of bfloat16 weights, which take twice the weights."""
    shape = Shape(num_tokens=512, top_k=4, num_experts=32, hidden=256, intermediate=192)
    layer, mesh = Layer(rng, "uniform", 2, shape, BF16), expert_mesh(2)
    balanced_bytes = temporary_bytes(layer, shape, mesh, jax_ep.Balance(spare_experts=2))
    weight_bytes = 16 * 3 * shape.hidden * shape.intermediate * 2
    # float32 sums of all gradients would add about twice as much
    assert balanced_bytes < temporary_bytes(layer, shape, mesh, None) + 0.7 * weight_bytes


@pytest.mark.parametrize("spare_experts", [1, 8])
def test_balance_no_second_derivative(spare_experts, expert_mesh, rng):
    layer, balance = Layer(rng, "uniform", 2, BASE), jax_ep.Balance(1.0, spare_experts)

    def slope(x, *others):
        return jax.grad(lambda x: jax_ep.moe(x, *others, num_experts=8, balance=balance).sum())(x).sum()

    with pytest.raises(TypeError, match="moe: balance has first derivatives only"):
        run(jax.grad(slope), expert_mesh(2), *layer.args)


def test_balance_keeps_no_tracers_and_names_symbolic_sizes(expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE)

    def moe(*args):
        return jax_ep.moe(*args, num_experts=8, balance=jax_ep.Balance(1.0, 8))

    gc.freeze()  # The check visits all objects; most belong to other tests.
    try:
        with jax.check_tracer_leaks(True):
            jax.eval_shape(per_rank(moe, expert_mesh(2)), *layer.args)
    finally:
        gc.unfreeze()
    (size,) = jax.export.symbolic_shape("t")
    args = [jax.ShapeDtypeStruct((2, size, *a.shape[2:]), a.dtype) for a in layer.args[:3]]
    with pytest.raises(NotImplementedError, match=r"^moe: x has t rows, a symbolic number"):
        jax.eval_shape(per_rank(moe, expert_mesh(2)), *args, *layer.args[3:])


def test_balance_mistakes(expert_mesh, rng, subtests):
    layer = Layer(rng, "uniform", 2, BASE)

    def call(**options):
        run(lambda *args: jax_ep.moe(*args, num_experts=8, **options), expert_mesh(2), *layer.args)

    with subtests.test("type"), pytest.raises(TypeError, match=r"balance is a float, expected a jax_ep.Balance"):
        call(balance=1.1)
    with subtests.test("capacity"), pytest.raises(ValueError, match=r"capacity=8 with balance"):
        call(balance=jax_ep.Balance(), capacity=8)
    for wrong in ({"rows": 0.9}, {"rows": float("nan")}, {"spare_experts": 0}):
        with subtests.test(str(wrong)), pytest.raises(ValueError, match=r"Balance: .* expected a number from 1"):
            jax_ep.Balance(**wrong)
    for wrong in ({"rows": "1.1"}, {"spare_experts": 1.5}, {"spare_experts": True}):
        with subtests.test(str(wrong)), pytest.raises(TypeError, match=r"Balance: .* expected"):
            jax_ep.Balance(**wrong)
    for wrong, kind in ((-1, ValueError), (2**31, ValueError), (8.0, TypeError), (None, TypeError)):
        with subtests.test(str(wrong)), pytest.raises(kind, match=r"^Balance.rows_per_rank: num_assignments=.*expec"):
            jax_ep.Balance().rows_per_rank(wrong)
    assert jax_ep.Balance().rows_per_rank(0) == 0
