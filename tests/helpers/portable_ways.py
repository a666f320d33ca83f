"""The algorithms of `xla` for dispatch and combine of any size, and what its compiled programs send."""

import functools

import jax
import numpy as np
import pytest
from jax import lax

from harness import compiled
from jax_ep.xla import exchange, segments


def take(way, monkeypatch):
    """Force one algorithm for arrays of any size: "gathered" or "rounds"."""
    monkeypatch.setattr(exchange, "GATHERED_BYTES", 1 << 62 if way == "gathered" else 0)
    monkeypatch.setattr(exchange, "ROUNDS_COST", 0)


def record_sizes(monkeypatch, note, axis=None):
    """Force rounds; calls pass `note` their mesh axes, their rank by `axis`, and the tokens sent to each rank."""
    only_in_one_process()
    take("rounds", monkeypatch)
    send = segments.send

    def recorded(rows_of, own, num_rows, axes, *rest):
        jax.debug.callback(functools.partial(note, str(axes)), lax.axis_index(axis or axes), own.send_counts)
        return send(rows_of, own, num_rows, axes, *rest)

    monkeypatch.setattr(segments, "send", recorded)


def both_ways(monkeypatch, fn, mesh, *args, **options):
    """Return results of `fn` in rounds and with "gathered", which the contract suite checks."""
    got = compiled(fn, mesh, **options)(*args)
    take("gathered", monkeypatch)
    wanted = compiled(lambda *a: fn(*a), mesh, **options)(*args)
    take("rounds", monkeypatch)
    return got, wanted


def tokens_between(ids, num_experts):
    """Count `[W, W]` tokens of each rank with an expert on each rank: the minimum that must be sent."""
    owners = np.where(ids < 0, -1, ids // (num_experts // len(ids)))
    return np.stack([(owners == rank).any(-1).sum(-1) for rank in range(len(ids))], 1)


def only_in_one_process():
    """Skip in several processes, because callbacks of all ranks are counted."""
    if jax.process_count() > 1:
        pytest.skip("counts the calls of all ranks, in one process")
