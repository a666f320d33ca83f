"""The ways of the exchange of `xla` for arrays of any size, and what its compiled programs send."""

from __future__ import annotations

import math
import re
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
    """Arrays of any size go this way: "gathered", "rounds" or "ragged"."""
    monkeypatch.setattr(exchange, "GATHERED_BYTES", 1 << 62 if way == "gathered" else 0)
    for cost in ("RAGGED_COST", "ROUNDS_COST"):
        monkeypatch.setattr(exchange, cost, 0)
    if way == "ragged":
        monkeypatch.setattr(exchange, "RAGGED_PLATFORMS", (PLATFORM,))
        if PLATFORM == "cpu":
            monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    elif way == "rounds":
        monkeypatch.setattr(exchange, "RAGGED_PLATFORMS", ())


def both_ways(monkeypatch: pytest.MonkeyPatch, way: str, fn: Any, mesh: Mesh, *args: Any, **options: Any) -> Any:
    """Results of `fn`, and what it returns where tokens of all ranks are gathered, which the contract suite proves."""
    got = compiled(fn, mesh, **options)(*args)
    take("gathered", monkeypatch)
    wanted = compiled(lambda *a: fn(*a), mesh, **options)(*args)
    take(way, monkeypatch)
    return got, wanted


def lowered(platform: str, fn: Any, mesh: Mesh, *args: Any) -> str:
    return jax.jit(per_rank(fn, mesh)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def sent_bytes(program: Any) -> dict[str, int]:
    """Bytes of the arrays that a compiled program's collectives exchange, of which each rank keeps its own part."""
    found: dict[str, int] = {}
    for line in program.as_text().splitlines():
        match = re.search(r"= (.*?) (all-to-all|all-gather|all-reduce)\(", line)
        if match:
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                size = math.prod(int(n) for n in shape.split(",") if n)
                key = f"{match[2]} {dtype}"
                found[key] = found.get(key, 0) + size * np.dtype(HLO_DTYPES[dtype]).itemsize
    return found


HLO_DTYPES = {"f32": "f4", "u8": "u1", "s32": "i4"}


def tokens_between(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """`[W, W]` tokens of each rank with an expert on each rank: the least that can travel."""
    owners = np.where(ids < 0, -1, ids // (num_experts // len(ids)))
    return np.stack([(owners == rank).any(-1).sum(-1) for rank in range(len(ids))], 1)


def only_in_one_process() -> None:
    """For what is counted by callbacks of all ranks."""
    if jax.process_count() > 1:
        pytest.skip("counts the calls of all ranks, in one process")


def count_calls(function: Any, counted: list[None]) -> Any:
    """`function`, which adds to a list on each rank and in each round."""

    def call(x, axis):
        jax.debug.callback(lambda: counted.append(None))
        return function(x, axis)

    return call
