"""Named shapes and the tolerance table that the tests share."""

import dataclasses

import ml_dtypes
import numpy as np

import jax_ep

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
FP8_WIRE = jax_ep.Schedule(wire_dtype=np.dtype(ml_dtypes.float8_e4m3fn))

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

# Each is a corner case; `num_ranks` is part of the value so that L = 1 and E = W = 1 exist.
SHAPES = {
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


def fp8_tolerance(implementation):
    """Return the tolerance of FP8 GEMMs: Hopper's tensor cores accumulate a block with about 14 bits."""
    return None if implementation == "xla" else 2e-3


def reals(rng, *shape, dtype=F32):
    return rng.standard_normal(shape).astype(dtype)


def integers(rng, *shape, dtype=F32, largest=3):
    """Draw small integers, whose sums are exact in every dtype and order, so that reductions compare bit for bit."""
    return rng.integers(-largest, largest, shape, endpoint=True).astype(dtype)


def probabilities(rng, *shape, dtype=F32):
    weights = rng.random(shape) + 0.1
    return (weights / weights.sum(-1, keepdims=True)).astype(dtype)


def assert_same_bits(got, want, what=""):
    """Check for equal dtype, shape and bits."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    view = np.dtype(f"u{want.dtype.itemsize}")
    wrong = np.argwhere(np.ascontiguousarray(got).view(view) != np.ascontiguousarray(want).view(view))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(f"{what}: {len(wrong)} of {want.size} differ, first at {at}: {got[at]} != {want[at]}")


def assert_close(got, want, what="", *, tolerance=None):
    """Check the table's tolerance for `got.dtype`, relative to each value and to the largest."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    want = want.astype(np.float64)
    scale = np.abs(want) + np.abs(want).max(initial=0)
    error = np.abs(got.astype(np.float64) - want)
    wrong = np.argwhere(~(error <= limit * scale))
    if wrong.size:
        at = tuple(int(i) for i in wrong[np.argmax(np.nan_to_num(error[tuple(wrong.T)], nan=np.inf))])
        raise AssertionError(f"{what}: {len(wrong)} of {want.size} off, worst at {at}: {got[at]} != {want[at]}")


def relative_error(got, want):
    """Return the norm of the difference divided by that of `want`, both in float64."""
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    return float(np.linalg.norm(got.reshape(want.shape) - want) / np.linalg.norm(want))
