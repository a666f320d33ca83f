"""Named routings that the tests share."""

from collections.abc import Callable

import jax
import numpy as np

from cases import Shape

Routing = Callable[[np.random.Generator, int, Shape], np.ndarray]


def _weighted(rng, num_ranks, shape, p):
    """Draw experts by `p`, distinct within a token if there are enough of them."""
    out = np.empty((num_ranks, shape.num_tokens, shape.top_k), np.int32)
    replace = np.count_nonzero(p) < shape.top_k
    for at in np.ndindex(num_ranks, shape.num_tokens):
        out[at] = rng.choice(shape.num_experts, shape.top_k, replace=replace, p=p / p.sum())
    return out


def uniform(rng, num_ranks, shape):
    return _weighted(rng, num_ranks, shape, np.ones(shape.num_experts))


def zipf(rng, num_ranks, shape):
    return _weighted(rng, num_ranks, shape, 1 / np.arange(1, shape.num_experts + 1) ** 1.5)


def one_hot(rng, num_ranks, shape):
    """Route all tokens to one expert, once."""
    out = np.full((num_ranks, shape.num_tokens, shape.top_k), -1, np.int32)
    out[..., rng.integers(shape.top_k)] = rng.integers(shape.num_experts)
    return out


def one_hot_every_slot(rng, num_ranks, shape):
    """Route all assignments of all tokens to one expert: one rank receives every row."""
    return np.full((num_ranks, shape.num_tokens, shape.top_k), rng.integers(shape.num_experts), np.int32)


def empty_experts(rng, num_ranks, shape):
    """Leave every other expert empty."""
    return _weighted(rng, num_ranks, shape, (np.arange(shape.num_experts) % 2 == 0).astype(np.float64))


def idle_ranks(rng, num_ranks, shape):
    """Let the first rank send nothing, and only the last rank receive."""
    num_local = shape.num_experts // num_ranks
    out = _weighted(rng, num_ranks, shape, (np.arange(shape.num_experts) >= shape.num_experts - num_local) * 1.0)
    if num_ranks > 1:
        out[0] = -1
    return out


def local_only(rng, num_ranks, shape):
    """Keep every token on its rank."""
    num_local = shape.num_experts // num_ranks
    local = rng.integers(num_local, size=(num_ranks, shape.num_tokens, shape.top_k))
    return (local + np.arange(num_ranks)[:, None, None] * num_local).astype(np.int32)


def no_experts(rng, num_ranks, shape):
    """Set all ids to -1."""
    return np.full((num_ranks, shape.num_tokens, shape.top_k), -1, np.int32)


def some_without_expert(rng, num_ranks, shape):
    out = uniform(rng, num_ranks, shape)
    return np.where(rng.random(out.shape) < 0.4, np.int32(-1), out)


def duplicates(rng, num_ranks, shape):
    """Draw with replacement from three experts, so that tokens repeat an expert."""
    few = rng.choice(shape.num_experts, min(3, shape.num_experts), replace=False)
    return rng.choice(few, (num_ranks, shape.num_tokens, shape.top_k)).astype(np.int32)


def out_of_range(rng, num_ranks, shape):
    """Set a third of the ids outside [0, E), up to the limits of int32."""
    wrong = np.array([shape.num_experts, shape.num_experts + 7, -2, -(2**31), 2**31 - 1], np.int32)
    out = uniform(rng, num_ranks, shape)
    return np.where(rng.random(out.shape) < 0.3, rng.choice(wrong, out.shape), out)


ROUTINGS = {
    f.__name__: f
    for f in (
        *(uniform, zipf, one_hot, one_hot_every_slot, empty_experts, idle_ranks),
        *(local_only, no_experts, some_without_expert, duplicates, out_of_range),
    )
}
# A quick subset for tests that are not about the routing.
FEW_ROUTINGS = {name: ROUTINGS[name] for name in ("uniform", "one_hot_every_slot", "some_without_expert", "duplicates")}


def routings(implementation, num_ranks, *, most_ranks=2):
    """Return the routings for a test of routing: all, or few if an interpreter runs kernels of more ranks."""
    interpreted = implementation == "triton" and jax.default_backend() == "cpu"
    return FEW_ROUTINGS if interpreted and num_ranks > most_ranks else ROUTINGS
