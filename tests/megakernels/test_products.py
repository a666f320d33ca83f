"""Products between exchanges take the fastest kernel there is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jax_ep
from cases import BF16, Shape, assert_close
from harness import run
from jax_ep.megakernels import cost_model, exchange_gemm, grouped_gemm
from jax_ep.pallas import gemm_activation, requirements
from jax_ep.pallas import grouped_gemm as pallas_gemm
from jax_ep.types import Layout, Options, Schedule
from layers import Layer

REFUSAL = requirements.refusal(Options("moe", (), ("pallas",)), "grouped_gemm", BF16)


@pytest.mark.parametrize(
    ("rows", "platform", "lacking", "wanted"),
    [
        (2048, "gpu", None, "pallas"),
        (1024, "gpu", None, "triton"),
        (2048, "gpu", "another GPU", "triton"),
        (2048, "cpu", None, "triton"),
    ],
)
def test_gemm_choice_fastest_kernel(
    rows: int, platform: str, lacking: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_gemm.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(requirements, "missing", lambda: lacking)
    modules = {"pallas": pallas_gemm, "triton": grouped_gemm}
    assert exchange_gemm.fastest_products(rows, 64, 64, 8) is modules[wanted]
    layout = Layout(1, 8, rows // 2, 2, rows)
    for mode, apart in (("serial", wanted), ("fused", None)):
        assert exchange_gemm.product_apart(Schedule(dispatch_mode=mode), layout, BF16, 64, 64) == apart


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("mode", ["serial", "fused"])
@pytest.mark.slow
def test_gemm_choice_activation_follows_gemm(
    mode: str, two_ranks: jax.sharding.Mesh, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the product is a launch by itself, and nobody wants a gradient."""
    monkeypatch.setattr(cost_model, "is_from_pallas", lambda *_: True)
    launched, launch = [], gemm_activation.gemm_activation

    def note(experts: jax_ep.Experts, rows: Any, *others: Any) -> Any:
        launched.append(rows.shape)
        return launch(experts, rows, *others)

    monkeypatch.setattr(gemm_activation, "gemm_activation", note)
    shape = Shape(num_tokens=13, top_k=2, num_experts=4, hidden=64, intermediate=64)
    layer = Layer(rng, "some_without_expert", 2, shape, BF16)
    schedule = Schedule(dispatch_mode=mode, combine_mode="scatter")

    def call(x: Any, topk_idx: Any, *others: Any) -> Any:
        return jax_ep.moe(x, topk_idx, *others, num_experts=4, schedule=schedule, implementation="triton")

    assert_close(run(call, two_ranks, *layer.args), layer.oracle().forward(), "layer")
    assert bool(launched) == (mode == "serial")
