"""Named routings, named shapes and the one tolerance table that the tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)

# Largest allowed |got - want| / (|want| + max|want|): a few roundings of the dtype, since sums are kept in float32.
TOLERANCE = {BF16: 1.2e-2, F16: 2e-3, F32: 1e-5, F64: 1e-12}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one MoE problem, per rank."""

    num_tokens: int = 6
    top_k: int = 3
    num_experts: int = 8
    hidden: int = 10
    intermediate: int = 6


BASE = Shape()

# Each is a corner of the shape space; `num_ranks` is in the value so that L = 1 and E = W = 1 exist.
SHAPES: dict[str, tuple[int, Shape]] = {
    "one_token": (2, Shape(num_tokens=1)),
    "one_token_one_choice_one_local_expert": (4, Shape(num_tokens=1, top_k=1, num_experts=4)),
    "one_choice": (2, Shape(top_k=1)),
    "one_expert_in_the_world": (1, Shape(top_k=2, num_experts=1)),
    "odd_hidden": (2, Shape(num_tokens=7, hidden=13)),
    "hidden_of_one": (2, Shape(hidden=1)),
    "prime_tokens": (2, Shape(num_tokens=37, top_k=2, num_experts=6, hidden=5)),
    "more_choices_than_experts": (2, Shape(num_tokens=3, top_k=5, num_experts=2)),
    "more_experts_than_slots": (2, Shape(num_tokens=1, top_k=2, num_experts=64)),
}

Routing = Callable[[np.random.Generator, int, Shape], np.ndarray]


def _weighted(rng: np.random.Generator, num_ranks: int, shape: Shape, p: np.ndarray) -> np.ndarray:
    """Experts drawn by `p`, distinct within a token where there are enough of them."""
    out = np.empty((num_ranks, shape.num_tokens, shape.top_k), np.int32)
    replace = np.count_nonzero(p) < shape.top_k
    for at in np.ndindex(num_ranks, shape.num_tokens):
        out[at] = rng.choice(shape.num_experts, shape.top_k, replace=replace, p=p / p.sum())
    return out


def uniform(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    return _weighted(rng, num_ranks, shape, np.ones(shape.num_experts))


def zipf(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    return _weighted(rng, num_ranks, shape, 1 / np.arange(1, shape.num_experts + 1) ** 1.5)


def one_hot(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """All tokens to one expert, once."""
    out = np.full((num_ranks, shape.num_tokens, shape.top_k), -1, np.int32)
    out[..., rng.integers(shape.top_k)] = rng.integers(shape.num_experts)
    return out


def one_hot_every_slot(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """All slots of all tokens to one expert: one rank receives every row there is."""
    return np.full((num_ranks, shape.num_tokens, shape.top_k), rng.integers(shape.num_experts), np.int32)


def empty_experts(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Every other expert gets nothing."""
    return _weighted(rng, num_ranks, shape, (np.arange(shape.num_experts) % 2 == 0).astype(np.float64))


def idle_ranks(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """The first rank sends nothing, and only the last rank receives."""
    num_local = shape.num_experts // num_ranks
    out = _weighted(rng, num_ranks, shape, (np.arange(shape.num_experts) >= shape.num_experts - num_local) * 1.0)
    if num_ranks > 1:
        out[0] = -1
    return out


def local_only(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Every token stays on its rank."""
    num_local = shape.num_experts // num_ranks
    local = rng.integers(num_local, size=(num_ranks, shape.num_tokens, shape.top_k))
    return (local + np.arange(num_ranks)[:, None, None] * num_local).astype(np.int32)


def no_experts(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """All -1."""
    return np.full((num_ranks, shape.num_tokens, shape.top_k), -1, np.int32)


def some_without_expert(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    out = uniform(rng, num_ranks, shape)
    return np.where(rng.random(out.shape) < 0.4, np.int32(-1), out)


def duplicates(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """Drawn with replacement from three experts, so that tokens ask for the same expert twice."""
    few = rng.choice(shape.num_experts, min(3, shape.num_experts), replace=False)
    return rng.choice(few, (num_ranks, shape.num_tokens, shape.top_k)).astype(np.int32)


def out_of_range(rng: np.random.Generator, num_ranks: int, shape: Shape) -> np.ndarray:
    """A third of the ids lies outside [0, E), up to the ends of int32."""
    wrong = np.array([shape.num_experts, shape.num_experts + 7, -2, -(2**31), 2**31 - 1], np.int32)
    out = uniform(rng, num_ranks, shape)
    return np.where(rng.random(out.shape) < 0.3, rng.choice(wrong, out.shape), out)


ROUTINGS: dict[str, Routing] = {
    f.__name__: f
    for f in (
        uniform,
        zipf,
        one_hot,
        one_hot_every_slot,
        empty_experts,
        idle_ranks,
        local_only,
        no_experts,
        some_without_expert,
        duplicates,
        out_of_range,
    )
}
# A quick subset for tests whose subject is not the routing.
FEW_ROUTINGS = {name: ROUTINGS[name] for name in ("uniform", "one_hot_every_slot", "some_without_expert", "duplicates")}


def routings(implementation: str, num_ranks: int) -> dict[str, Routing]:
    """Those for a test whose subject is the routing: all, but few where an interpreter runs kernels of many ranks."""
    interpreted = implementation == "triton" and jax.default_backend() == "cpu"
    return FEW_ROUTINGS if interpreted and num_ranks > 2 else ROUTINGS


def reals(rng: np.random.Generator, *shape: int, dtype: np.dtype = F32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def integers(rng: np.random.Generator, *shape: int, dtype: np.dtype = F32, largest: int = 3) -> np.ndarray:
    """Small integers: their sums are exact in every dtype and order, so that reductions compare bit for bit."""
    return rng.integers(-largest, largest, shape, endpoint=True).astype(dtype)


def probabilities(rng: np.random.Generator, *shape: int, dtype: np.dtype = F32) -> np.ndarray:
    weights = rng.random(shape) + 0.1
    return (weights / weights.sum(-1, keepdims=True)).astype(dtype)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Same dtype, same shape, same bits."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    view = np.dtype(f"u{want.dtype.itemsize}")
    wrong = np.argwhere(np.ascontiguousarray(got).view(view) != np.ascontiguousarray(want).view(view))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(f"{what}: {len(wrong)} of {want.size} differ, first at {at}: {got[at]} != {want[at]}")


def assert_close(got: np.ndarray, want: np.ndarray, what: str = "", *, tolerance: float | None = None) -> None:
    """Within the table's tolerance for `got.dtype`, relative to each value and to the largest."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    want = want.astype(np.float64)
    scale = np.abs(want) + np.abs(want).max(initial=0)
    error = np.abs(got.astype(np.float64) - want)
    wrong = np.argwhere(~(error <= limit * scale))
    if wrong.size:
        at = tuple(int(i) for i in wrong[np.argmax(np.nan_to_num(error[tuple(wrong.T)], nan=np.inf))])
        raise AssertionError(f"{what}: {len(wrong)} of {want.size} off, worst at {at}: {got[at]} != {want[at]}")
