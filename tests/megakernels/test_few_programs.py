"""Exchanges by fewer programs than would fill the device, as beside other work: the same bits."""

from __future__ import annotations

from typing import Any

import harness
import jax
import numpy as np
import pytest

from jax_ep.core.kernel import Config
from jax_ep.megakernels import exchange, tuning
from jax_ep.ops import registry
from jax_ep.types import Layout

LAYOUT = Layout(num_ranks=2, num_experts=4, num_tokens=9, top_k=2, capacity=40)
AXIS = (harness.EXPERT,)


@pytest.fixture
def mesh(two_ranks: jax.sharding.Mesh) -> jax.sharding.Mesh:
    return two_ranks


def test_a_limit_is_none_or_a_number_that_is_not_exceeded():
    config = Config(7, num_warps=2)
    assert tuning.at_most(config, None) == tuning.at_most(config, 9) == config
    assert tuning.at_most(config, 3) == Config(3, num_warps=2)


def test_one_program_sends_what_several_send(mesh, monkeypatch):
    launched = []
    launch = exchange.launch_on_heap

    def launch_and_note(kernel: Any, *arguments: Any, **options: Any) -> Any:
        launched.append(next(a for a in arguments if isinstance(a, Config)).num_programs)
        return launch(kernel, *arguments, **options)

    monkeypatch.setattr(exchange, "launch_on_heap", launch_and_note)
    run: Any = registry.get("triton")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 9, 64)).astype(np.float32)
    ids = rng.integers(0, 4, (2, 9, 2), np.int32)

    def fn(x, ids, **options):
        handle = run.plan(ids, LAYOUT, AXIS)
        rows = run.send_tokens(x, handle, AXIS, None, **options)
        return rows, run.return_tokens(rows, handle, AXIS, None, **options)

    wanted = harness.run(fn, mesh, x, ids)
    assert launched == [2, 2]
    for got, want in zip(harness.run(lambda *a: fn(*a, num_programs=1), mesh, x, ids), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert launched[2:] == [1, 1]
    np.testing.assert_array_equal(wanted[1], 2 * x)
