"""The benchmark of the layer of one GPU runs on a small shape, and computes what it says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from reports import check_report, run_quickly

import jax_ep
from jax_ep.tools.benchmark import fused_moe
from jax_ep.tools.benchmark.fused_moe import Variant


def test_wrong_layers_are_not_timed() -> None:
    right = Variant(lambda: jnp.ones(4), ())
    names = ["fused_moe, bfloat16", "fused_moe, mxfp4"]
    found = {"ragged_dot": right} | dict.fromkeys(names, right)
    fused_moe.check(found, ["mxfp4"], names)
    for name in names:
        wrong = Variant(partial(jnp.full, 4, 1.1 if name == names[0] else 1.4), ())
        with pytest.raises(RuntimeError, match=rf"{name} is wrong: error 0\.[14]"):
            fused_moe.check(found | {name: wrong}, ["mxfp4"], names)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on GPUs programs reuse lowered launches")
def test_hidden_rows_are_those_of_one_variant_alone() -> None:
    """Programs are traced several at a time."""
    layer = partial(jax_ep.fused_moe, schedule=fused_moe.SEVERAL, implementation="pallas")
    x, ids, weights = jnp.ones((16, 64), jnp.bfloat16), jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
    arguments = x, ids, weights, jnp.ones((4, 64, 128), jnp.bfloat16), jnp.ones((4, 64, 64), jnp.bfloat16)
    ways = {True: layer, False: partial(fused_moe.with_hidden_rows, layer)}
    with ThreadPoolExecutor(8) as executor:
        traced = [(activates, executor.submit(jax.make_jaxpr(f), *arguments)) for activates, f in [*ways.items()] * 4]
    for activates, program in traced:
        assert ("name=gemm_activation" in str(program.result())) == activates


@pytest.mark.slow
def test_quick_run(tmp_path) -> None:
    output = run_quickly("fused_moe.py", tmp_path, "--shard", "2", "--routing", "zipf", "--formats", "mxfp4")
    content = json.loads((tmp_path / "fused_moe.json").read_text())
    check_report(content)
    variants = {row["variant"] for row in content["rows"]}
    assert {"fused_moe, bfloat16", "several launches, mxfp4", "ragged_dot", "moe_sort", "batched einsum"} <= variants
    assert content["summary"]["read_bytes_per_s"] > 0
    assert "tiny, 16 tokens" in output
