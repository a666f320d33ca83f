"""GEMMs between dispatch and combine use the fastest kernel."""

import jax
import pytest

import facts_of
import jax_ep
from cases import BF16, Shape, assert_close
from harness import run
from jax_ep.core.facts import GemmFacts
from jax_ep.megakernels import requirements as triton
from jax_ep.pallas import gemm_activation, requirements
from jax_ep.types import Layout, Options, Schedule
from layers import Layer

REFUSAL = requirements.unsupported_reason(facts_of.gemm(BF16), Options("moe", (), ("pallas",)))


@pytest.mark.parametrize(
    ("rows", "platform", "lacking", "wanted"),
    [
        (2048, "gpu", None, "pallas"),
        (1024, "gpu", None, "triton"),
        (2048, "gpu", "another GPU", "triton"),
        (2048, "cpu", None, "triton"),
    ],
)
def test_gemm_choice_fastest_kernel(rows, platform, lacking, wanted, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(requirements, "missing", lambda: lacking)
    monkeypatch.setattr(triton, "unsupported_reason", lambda *_: None)
    layout = Layout(1, 8, rows // 2, 2, rows)
    for mode in ("serial", "fused"):
        options = Options("test", (), ("triton",), schedule=Schedule(dispatch_mode=mode))
        plan = facts_of.exchange_gemm(options, layout, BF16, 64, 64)
        assert plan.gemm.forward.implementation == wanted and plan.mode(None) == mode


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("mode", ["serial", "fused"])
@pytest.mark.slow
def test_gemm_choice_activation_follows_gemm(mode, two_ranks, rng, monkeypatch):
    """If the GEMM is a separate launch without gradients."""
    monkeypatch.setattr(requirements, "is_preferred", lambda facts: isinstance(facts, GemmFacts))
    monkeypatch.setattr(Options, "alone", True)  # so that it runs on the CPU
    launched, launch = [], gemm_activation.gemm_activation

    def note(experts, rows, *others):
        launched.append(rows.shape)
        return launch(experts, rows, *others)

    monkeypatch.setattr(gemm_activation, "gemm_activation", note)
    shape = Shape(num_tokens=13, top_k=2, num_experts=4, hidden=64, intermediate=64)
    layer = Layer(rng, "some_without_expert", 2, shape, BF16)
    schedule = Schedule(dispatch_mode=mode, combine_mode="scatter")

    def call(x, topk_idx, *others):
        return jax_ep.moe(x, topk_idx, *others, num_experts=4, schedule=schedule, implementation="triton")

    assert_close(run(call, two_ranks, *layer.args), layer.oracle().forward(), "layer")
    assert bool(launched) == (mode == "serial")
