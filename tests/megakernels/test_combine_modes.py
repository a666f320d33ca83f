"""GEMM + combine in one launch: the same bits for any division of work, and the default choice of the mode."""

import functools

import jax
import numpy as np
import pytest

import facts_of
import harness
import jax_ep
from cases import BF16, Shape, reals
from jax_ep.core.kernel import Config
from jax_ep.megakernels import cost_model, exchange, exchange_gemm, requirements
from jax_ep.ops import registry
from jax_ep.types import COMBINE_MODES, Layout, Options, Schedule
from routings import ROUTINGS

SHAPE = Shape(num_tokens=19, top_k=3, num_experts=8, hidden=88, intermediate=24)
AXIS = (harness.EXPERT,)


def test_combine_mode_num_programs_same_bits(two_ranks, rng, monkeypatch):
    """One program, or several that leave sums to the last one."""
    chosen, launched = exchange_gemm.gemm_combine_sizes, []
    layout = Layout(num_ranks=2, num_experts=8, num_tokens=19, top_k=3, capacity=90)
    exchange = registry.EXCHANGE.by("triton")
    options = Options("test", AXIS, schedule=Schedule(combine_mode="scatter"))
    ids = ROUTINGS["some_without_expert"](rng, 2, SHAPE)
    h = reals(rng, 2, 90, SHAPE.intermediate, dtype=BF16)
    w = reals(rng, 2, 4, SHAPE.intermediate, SHAPE.hidden, dtype=BF16)

    def fn(ids, h, w):
        handle = exchange.plan(options, ids, layout)
        return exchange_gemm.grouped_gemm_combine(options, h, None, w, handle, transpose=False)[0]

    wanted = harness.run(fn, two_ranks, ids, h, w)
    assert np.abs(wanted.astype(np.float32)).max() > 0
    for programs in (1, 2, 5):

        def divided(*arguments, programs=programs):
            launched.append(programs)
            return Config(programs), chosen(*arguments)[1]

        monkeypatch.setattr(exchange_gemm, "gemm_combine_sizes", divided)
        np.testing.assert_array_equal(harness.run(fn, two_ranks, ids, h, w), wanted)
        assert launched[-1] == programs


def layout(ranks, *, tokens=4096, top_k=8, experts=256):
    return Layout(ranks, experts, tokens, top_k, capacity=9 * tokens * top_k // 8)


def specialized(layout, sizes):
    """Whether a kernel in Gluon runs a GEMM of these sizes, as a separate launch."""
    return requirements.in_gluon(facts_of.gemm(BF16, layout.capacity, *sizes, layout.num_local_experts))


def chosen_dispatch(layout, sizes, keep):
    in_gluon = specialized(layout, sizes)
    return cost_model.dispatch_mode(layout, *sizes, keep, specialized=in_gluon, in_gluon=in_gluon)


@pytest.mark.parametrize(
    ("ranks", "sizes", "keep", "wanted"),
    [
        (2, (7168, 4096), None, "serial"),  # Gathering rows takes longer than what one launch hides.
        (4, (7168, 4096), None, "serial"),
        (4, (7168, 4096), "tokens", "fused"),
        (8, (7168, 2048), "rows", "fused"),  # More data is sent.
        (2, (2048, 1536), "rows", "serial"),  # One launch would have to copy it.
        (1, (2048, 1536), None, "fused"),  # It gathers rows instead of copying them.
    ],
)
def test_dispatch_mode_choice(ranks, sizes, keep, wanted, on_h200):
    of, few = layout(ranks), layout(ranks, tokens=128)
    assert chosen_dispatch(of, sizes, keep) == wanted
    # Launches dominate the time.
    assert chosen_dispatch(few, sizes, keep) == "fused"


@pytest.mark.parametrize(
    ("ranks", "sizes", "wanted"),
    [
        (1, (2048, 7168), "serial"),
        (2, (2048, 7168), "serial"),  # Combine takes less time than the sums at the end of one launch.
        (4, (2048, 7168), "scatter"),
        (8, (2048, 7168), "scatter"),
        (8, (768, 2048), "serial"),  # Too narrow to hide a row per expert.
        (2, (256, 7168), "serial"),
    ],
)
def test_combine_mode_choice(ranks, sizes, wanted, on_h200):
    assert cost_model.combine_mode(layout(ranks), *sizes, specialized=specialized(layout(ranks), sizes)) == wanted


def test_combine_mode_choice_is_launched(two_ranks, monkeypatch):
    ran = []
    for mode, of, name in (("scatter", exchange_gemm, "grouped_gemm_combine"), ("serial", exchange, "combine_tokens")):
        original = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *a, m=mode, call=original, **k: ran.append(m) or call(*a, **k))
    x, ids = np.ones((2, 4, 16), BF16), np.zeros((2, 4, 1), np.int32)
    w = np.ones((2, 2, 16, 16), BF16)

    def fn(x, ids, w):
        d = jax_ep.dispatch(x, ids, num_experts=4, implementation="triton")
        return jax_ep.grouped_gemm_combine(d.tokens, w, d.handle, implementation="triton")

    for mode in COMBINE_MODES:
        monkeypatch.setattr(cost_model, "combine_mode", lambda *_, mode=mode, **__: mode)
        np.testing.assert_array_equal(harness.run(fn, two_ranks, x, ids, w).astype(np.float32), 16)
    assert ran == list(COMBINE_MODES)


def test_combine_mode_unsupported_calls(two_ranks):
    """float32, sizes that are not multiples of 8, FP8 on the wire: no fused launch, and no silent replacement."""
    x, ids = np.ones((2, 4, 128), np.float32), np.zeros((2, 4, 1), np.int32)

    def fn(x, ids, width, dtype, wire_dtype=None):
        x = x.astype(dtype)
        d = jax_ep.dispatch(x, ids, num_experts=4, implementation="triton")
        w = jax.numpy.ones((2, 128, width), dtype)
        schedule = jax_ep.Schedule(combine_mode="scatter", wire_dtype=wire_dtype)
        options = {"implementation": "triton", "schedule": schedule}
        return jax_ep.grouped_gemm_combine(d.tokens, w, d.handle, **options)

    refused = {"float32": (128, np.float32, {}), "between 12 and 128 columns": (12, BF16, {})}
    refused["wire_dtype=.*float8_e4m3fn"] = (128, BF16, {"wire_dtype": jax.numpy.float8_e4m3fn})
    for found, (width, dtype, options) in refused.items():
        call = harness.per_rank(functools.partial(fn, width=width, dtype=dtype, **options), two_ranks)
        with pytest.raises(NotImplementedError, match=f"mode='scatter'.*{found}"):
            jax.eval_shape(call, x, ids)
