"""Number of package functions between a public function and the custom call."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import harness
import jax_ep
from cases import BF16, F32
from jax_ep import interpreter

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter stands for GPUs on the CPU")

PACKAGE = Path(jax_ep.__file__).parent
MOST = 7
IN_HIDDEN_ROWS = ("moe", "moe, fused", "moe, serial")
"""Layers with a custom forward rule because their first GEMM activates rows."""
T, K, E, H, INNER = 6, 2, 4, 128, 128
FP8 = jnp.float8_e4m3fn


def dispatch(x: Any, idx: Any, weights: Any, *_: Any) -> Any:
    return jax_ep.dispatch(x, idx, weights, num_experts=E, implementation="triton").tokens


def combine(x: Any, idx: Any, weights: Any, *_: Any) -> Any:
    d = jax_ep.dispatch(x, idx, weights, num_experts=E, implementation="triton")
    return jax_ep.combine(d.tokens, d.handle, implementation="triton")


def moe(**options: Any) -> Callable[..., Any]:
    return lambda *args: jax_ep.moe(*args, num_experts=E, implementation="triton", **options)


CALLS = {
    "dispatch": dispatch,
    "combine": combine,
    "moe": moe(),
    "moe, fused": moe(schedule=jax_ep.Schedule(dispatch_mode="fused", combine_mode="scatter")),
    "moe, serial": moe(schedule=jax_ep.Schedule(dispatch_mode="serial", combine_mode="serial")),
    "moe in FP8": moe(recipe="fp8"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow(unless={"name": ["dispatch", "moe"]})
def test_call_depth_to_custom_call(name: str, two_ranks: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit axes, public function, primitive, implementation, launch, call; one more for two launches."""
    chains: dict[str, list[str]] = {}

    def call(kernel: Any, *arguments: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
        chains[kernel.name] = [*(f"{Path(frame.filename).stem}.{frame.name}" for frame in frames), "custom call"]
        return original(kernel, *arguments)

    original = interpreter.call
    monkeypatch.setattr(interpreter, "call", call)
    tokens, ids, weights = ((2, T, H), BF16), ((2, T, K), jnp.int32), ((2, T, K), F32)
    matrices = ((2, E // 2, H, 2 * INNER), BF16), ((2, E // 2, INNER, H), BF16)
    arrays = [jax.ShapeDtypeStruct(*array) for array in (tokens, ids, weights, *matrices)]
    jax.eval_shape(harness.per_rank(CALLS[name], two_ranks), *arrays)
    assert len(chains) > 1
    most = MOST + (name in IN_HIDDEN_ROWS)
    assert {kernel: chain for kernel, chain in chains.items() if len(chain) > most} == {}
