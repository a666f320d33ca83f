"""Cases of layer.py, and chains of dependent calls.

Every chain is a `lax.scan`, which on GPUs runs without the host. A call depends on an int32 zero that only the device
knows: it is added to small index arrays, or written into the first element of a large array, in place. Weights and
inputs are arguments of the program, because XLA would fold constants.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jax_ep.core.layout import round_up
from jax_ep.tools.benchmark.chains import zero_after
from jax_ep.tools.benchmark.exchange_chains import local
from jax_ep.tools.benchmark.inputs import AXIS, MODELS, Model, on_ranks, routing
from jax_ep.types import Handle, Layout

CAPACITY_FACTOR = 1.25
_SAMPLE = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and its tokens, on the mesh.

    Attributes:
      mesh: its only axis is that of the experts.
      name: of the model.
      routing: kind of routing.
      layout: static sizes; the capacity is the most loaded rank's rows, rounded up to 128.
      ids: `[W * T, K]` on the host.
      inputs: x and the result's cotangent `[W * T, H]`, ids and router weights `[W * T, K]`.
      weights: `[E, H, 2I]` and `[E, I, H]`.
    """

    mesh: jax.sharding.Mesh
    name: str
    routing: str
    layout: Layout
    ids: np.ndarray
    inputs: tuple[Array, Array, Array, Array]
    weights: tuple[Array, Array]

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    @property
    def rows(self) -> np.ndarray:
        """`[W]` real rows of each rank."""
        return _rows(self.ids, self.layout.num_ranks, self.layout.num_experts)

    @property
    def slot_capacity(self) -> int:
        """Rows of an expert for the tokens of one rank, in the baseline with fixed capacity."""
        return math.ceil(CAPACITY_FACTOR * self.layout.num_tokens * self.layout.top_k / self.layout.num_experts)

    @property
    def dropped(self) -> float:
        """The share of assignments that this baseline drops."""
        layout = self.layout
        source = np.arange(layout.num_ranks).repeat(layout.num_tokens * layout.top_k)
        counts = np.bincount(source * layout.num_experts + self.ids.reshape(-1))
        return float(np.maximum(counts - self.slot_capacity, 0).sum() / self.ids.size)

    def shard_map(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Map a per-shard function; all arrays are split along their first axis."""
        return jax.shard_map(body, mesh=self.mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)


def _rows(ids: np.ndarray, num_ranks: int, num_experts: int) -> np.ndarray:
    return np.bincount(ids.reshape(-1) // (num_experts // num_ranks), minlength=num_ranks)


def make_case(mesh: jax.sharding.Mesh, name: str, kind: str, num_tokens: int, weights: tuple[Array, Array]) -> Case:
    """Make random tokens and their routing."""
    model, num_ranks = MODELS[name], mesh.devices.size
    ids = routing(kind, num_ranks * num_tokens, model, np.random.default_rng(0))
    capacity = round_up(int(_rows(ids, num_ranks, model.experts).max()), 128)
    layout = Layout(num_ranks, model.experts, num_tokens, model.top_k, capacity, axis=AXIS)
    x, d_y = (on_ranks(mesh, (num_tokens, model.hidden), seed) for seed in (2, 3))
    scores = on_ranks(mesh, (num_tokens, model.top_k), 4)
    router_weights = jax.jit(lambda scores: jax.nn.softmax(scores.astype(jnp.float32), axis=-1))(scores)
    placed = jax.device_put(ids, jax.NamedSharding(mesh, P("expert")))
    return Case(mesh, name, kind, layout, ids, (x, d_y, placed, router_weights), weights)


# --- chains ---------------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A variant.

    Attributes:
      step: `(touched, fixed, zero) -> arrays`, of one rank. It must depend on the touched arrays or on the zero.
      touched: arrays of all ranks that change in every call: the zero is written into their first elements.
      fixed: arrays and handles of all ranks that do not change.
      flops: of the real rows of one rank, on average.
      same_as: a variant whose results are equal except for rounding.
      tuned: XLA times candidates to choose the algorithms of its GEMMs.
      options: compiler options.
      largest_difference: limit of the elements' difference from `same_as`, in units of their root mean square.
    """

    step: Callable[[Any, Any, Array], Any]
    touched: tuple[Array, ...]
    fixed: tuple[Any, ...]
    flops: float = 0
    same_as: str | None = None
    tuned: bool = False
    options: dict[str, Any] | None = None
    largest_difference: float = 0.25  # several GEMMs in bfloat16 differ by some hundredths


def chain(case: Case, variant: Variant) -> Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return `make(n) -> (function, arguments)`: it makes n calls and returns the first numbers of the last results."""
    step, arguments = variant.step, (variant.touched, variant.fixed)

    @functools.cache
    def make(n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def body(touched: Any, fixed: Any) -> Any:
            fixed = tuple(local(arg) if isinstance(arg, Handle) else arg for arg in fixed)

            def once(carry: Any, _: None) -> Any:
                touched, zero = carry
                # The barrier keeps XLA from computing only the elements that are read.
                results = lax.optimization_barrier(jax.tree.leaves(step(touched, fixed, zero)))
                samples = [leaf.reshape(-1)[:_SAMPLE].astype(jnp.float32) for leaf in results]
                zero = sum(map(zero_after, samples))  # the next call cannot start before this one has ended
                return (tuple(_touch(x, zero) for x in touched), zero), samples

            samples = lax.scan(once, (touched, jnp.zeros((), jnp.int32)), None, length=n)[1]
            return [sample[-1:] for sample in samples]

        return jax.jit(case.shard_map(body), compiler_options=variant.options), arguments

    return make


def _touch(x: Array, zero: Array) -> Array:
    """`x`, but known only once the zero is; in place where nobody else needs it."""
    origin = (0,) * x.ndim
    return lax.dynamic_update_slice(x, lax.slice(x, origin, (1,) * x.ndim) + zero.astype(x.dtype), origin)


def difference(got: list[Array], expected: list[Array]) -> float:
    """Return the largest difference between samples, in units of the root mean square of `expected`."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        worst = max(worst, float(np.abs(a - b).max() / max(np.sqrt(np.mean(b**2)), 1e-30)))
    return worst
