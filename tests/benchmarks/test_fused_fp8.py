"""The page that says why FP8 has no fused launch shows what the model of times says, and what it says of that holds."""

from __future__ import annotations

from pathlib import Path

import pytest

import fused_fp8
from lib.inputs import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "rejected.md"
UP_TO_8 = [(MODELS[name], ranks) for name in fused_fp8.SHOWN for ranks in (2, 4, 8)]


def test_the_page_has_the_table():
    assert "\n".join(fused_fp8.table()) in PAGE.read_text(), "run python benchmarks/fused_fp8.py"


def test_two_launches_are_faster_on_up_to_eight_ranks():
    forward = [fused_fp8.estimate(*case) for case in UP_TO_8]
    assert max(found.won for found in forward) < 0.001
    both = forward + [fused_fp8.estimate(*case, backward=True) for case in UP_TO_8]
    assert all(found.dispatch < found.dispatch_fused for found in both)
    ratios = sorted(found.scatter_fp8 / found.combine for found in forward)
    assert (ratios[0], ratios[1], ratios[-1]) == (
        pytest.approx(1.03, abs=0.005),
        pytest.approx(1.06, abs=0.005),
        pytest.approx(1.39, abs=0.005),
    )


def test_where_one_launch_would_win():
    won = [fused_fp8.estimate(MODELS[name], 16).won for name in ("deepseek-v3", "qwen3-235b", "qwen3-30b")]
    assert min(won) < 0.001 and max(won) == pytest.approx(0.025, abs=0.001)


def test_rates_are_of_the_nearest_depth_that_was_measured():
    assert fused_fp8.product_flops(14336) == fused_fp8.product_flops(7168) != fused_fp8.product_flops(2048)
    assert fused_fp8.product_flops(768) == fused_fp8.product_flops(2048)
