"""The algorithms of `xla` for dispatch and combine of any size, and what its compiled programs send."""

import functools

import jax
import numpy as np
import pytest
from jax import lax

from emulated_ragged import emulated_ragged_all_to_all
from harness import compiled, per_rank
from jax_ep.xla import exchange

WAYS = ("rounds", "ragged")
PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def take(way, monkeypatch):
    """Force one algorithm for arrays of any size: "gathered", "rounds" or "ragged"."""
    monkeypatch.setattr(exchange, "GATHERED_BYTES", 1 << 62 if way == "gathered" else 0)
    for cost in ("RAGGED_COST", "ROUNDS_COST"):
        monkeypatch.setattr(exchange, cost, 0)
    if way == "ragged":
        monkeypatch.setattr(exchange, "RAGGED_PLATFORMS", (PLATFORM,))
        if PLATFORM == "cpu":
            monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    elif way == "rounds":
        monkeypatch.setattr(exchange, "RAGGED_PLATFORMS", ())


def record_sizes(monkeypatch, note, axis=None):
    """Force the ragged all-to-all; calls pass `note` (shape, axis), their rank by `axis`, and the sizes sent."""
    only_in_one_process()
    take("ragged", monkeypatch)

    def recorded(*arrays, axis_name):
        call = (arrays[0].shape, str(axis_name))
        jax.debug.callback(functools.partial(note, call), lax.axis_index(axis or axis_name), arrays[3])
        return emulated_ragged_all_to_all(*arrays, axis_name=axis_name)

    monkeypatch.setattr(lax, "ragged_all_to_all", recorded)


def both_ways(monkeypatch, way, fn, mesh, *args, **options):
    """Return results of `fn` with this algorithm and with "gathered", which the contract suite checks."""
    got = compiled(fn, mesh, **options)(*args)
    take("gathered", monkeypatch)
    wanted = compiled(lambda *a: fn(*a), mesh, **options)(*args)
    take(way, monkeypatch)
    return got, wanted


def lowered(platform, fn, mesh, *args):
    return jax.jit(per_rank(fn, mesh)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def tokens_between(ids, num_experts):
    """Count `[W, W]` tokens of each rank with an expert on each rank: the minimum that must be sent."""
    owners = np.where(ids < 0, -1, ids // (num_experts // len(ids)))
    return np.stack([(owners == rank).any(-1).sum(-1) for rank in range(len(ids))], 1)


def only_in_one_process():
    """Skip in several processes, because callbacks of all ranks are counted."""
    if jax.process_count() > 1:
        pytest.skip("counts the calls of all ranks, in one process")
