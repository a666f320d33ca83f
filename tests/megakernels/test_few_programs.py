"""All-to-alls with fewer programs than would fill the device, as next to other work: the same bits."""

from functools import partial
from typing import Any

import numpy as np

import harness
from jax_ep.core.kernel import Config
from jax_ep.megakernels import exchange
from jax_ep.ops import registry
from jax_ep.types import Layout, Options, Schedule

LAYOUT = Layout(num_ranks=2, num_experts=4, num_tokens=9, top_k=2, capacity=40)
AXIS = (harness.EXPERT,)


def test_num_programs_limit():
    config = Config(7, num_warps=2)
    assert exchange.at_most(config, None) == exchange.at_most(config, 9) == config
    assert exchange.at_most(config, 3) == Config(3, num_warps=2)


def test_num_programs_one_matches_several(two_ranks, monkeypatch):
    launched, launch = [], exchange.launch

    def launch_and_note(kernel, operands, results, config, *rest, **options):
        launched.append((kernel.name, config.num_programs))
        return launch(kernel, operands, results, config, *rest, **options)

    monkeypatch.setattr(exchange, "launch", launch_and_note)
    run: Any = registry.get("exchange", "triton")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 9, 64)).astype(np.float32)
    ids = rng.integers(0, 4, (2, 9, 2), np.int32)

    def fn(schedule, x, ids):
        options = Options("test", AXIS, schedule=schedule)
        handle = run.plan(options, ids, LAYOUT)
        rows = run.dispatch_tokens(options, x, None, handle)[0]
        return rows, run.combine_tokens(options, rows, None, handle)[0]

    wanted = harness.run(partial(fn, Schedule()), two_ranks, x, ids)
    assert launched == [("plan", 2), ("dispatch", 2), ("combine", 2)]
    launched.clear()
    few = Schedule(num_communicating_programs=1, num_combining_programs=1)
    for got, want in zip(harness.run(partial(fn, few), two_ranks, x, ids), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert launched == [("plan", 2), ("dispatch", 1), ("combine", 1)]
    np.testing.assert_array_equal(wanted[1], 2 * x)
