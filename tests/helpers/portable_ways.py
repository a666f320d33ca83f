"""The algorithms of `xla` for dispatch and combine of any size, and what its compiled programs send."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from emulated_ragged import emulated_ragged_all_to_all
from harness import compiled, per_rank
from jax_ep.xla import exchange

WAYS = ("rounds", "ragged")
PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def record_sizes(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[Any, np.ndarray, np.ndarray], None], axis: Any = None
) -> None:
    """Force the ragged all-to-all; calls pass `note` (shape, axis), their rank by `axis`, and the sizes sent."""
    only_in_one_process()
    take("ragged", monkeypatch)

    def recorded(*arrays: Any, axis_name: Any) -> Any:
        call = (arrays[0].shape, str(axis_name))
        jax.debug.callback(functools.partial(note, call), lax.axis_index(axis or axis_name), arrays[3])
        return emulated_ragged_all_to_all(*arrays, axis_name=axis_name)

    monkeypatch.setattr(lax, "ragged_all_to_all", recorded)


def both_ways(monkeypatch: pytest.MonkeyPatch, way: str, fn: Any, mesh: Mesh, *args: Any, **options: Any) -> Any:
    """Return results of `fn` with this algorithm and with "gathered", which the contract suite checks."""
    got = compiled(fn, mesh, **options)(*args)
    take("gathered", monkeypatch)
    wanted = compiled(lambda *a: fn(*a), mesh, **options)(*args)
    take(way, monkeypatch)
    return got, wanted


def lowered(platform: str, fn: Any, mesh: Mesh, *args: Any) -> str:
    return jax.jit(per_rank(fn, mesh)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def tokens_between(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Count `[W, W]` tokens of each rank with an expert on each rank: the minimum that must be sent."""
    owners = np.where(ids < 0, -1, ids // (num_experts // len(ids)))
    return np.stack([(owners == rank).any(-1).sum(-1) for rank in range(len(ids))], 1)


def only_in_one_process() -> None:
    """Skip in several processes, because callbacks of all ranks are counted."""
    if jax.process_count() > 1:
        pytest.skip("counts the calls of all ranks, in one process")
