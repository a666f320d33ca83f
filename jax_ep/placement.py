"""Expert placement: copies of busy experts, and the mapping from experts to physical slots.

An overloaded rank stalls every rank. With more slots than experts, busy experts get copies on several ranks, which
share their tokens. Routers choose logical expert ids. Slots are physical: each of W ranks has `P / W` of them, and
`moe` and all other operations treat a slot as an expert (`num_experts=P`).

The policies are those of DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB; arXiv:2412.19437,
section 3.4). Copies go one by one to the expert with the highest load per copy. Slots go, in order of decreasing load,
to the least loaded rank that has room. The hierarchical policy first assigns whole groups of experts to nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep.core import check, relayout
from jax_ep.core.check import errors_begin_with, names_arrays_apart, operation
from jax_ep.core.mesh_axes import axis_size, axis_tuple, on_automatic_axes, resized_spec, spec_of
from jax_ep.ops.balanced import with_copies as with_copies
from jax_ep.types import Array, AxisName, result_type
from jax_ep.values import shown, type_name

__all__ = ["Placement", "move", "plan", "with_copies"]
_ARRAYS = ("physical_to_logical", "logical_to_physical", "num_copies")


@result_type
@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The expert in each slot; frozen and hashable, with at least one slot per expert. Equal slots are equal.

    A pytree: as an argument of a jitted function its arrays are data, so `remap` with another placement of the same
    sizes does not recompile. Placements of several layers have a leading axis, over which `lax.scan` can run;
    `placement[i]` is the placement of one layer, which the methods take.

    Args:
      physical_to_logical: `[P]` or `[layers, P]` int32, the expert of each slot; rank r owns the slots from `r * P / W`
        on.
      num_experts: E, number of logical experts.
      num_ranks: W, which divides P.
      num_nodes: nodes of equally many consecutive ranks; it divides W.

    Attributes:
      physical_to_logical: the argument.
      logical_to_physical: `[..., E, P - E + 1]` int32, slots of each expert in ascending order, padded with -1.
      num_copies: `[..., E]` int32, number of slots of each expert.
      num_experts: the argument.
      num_ranks: the argument.
      num_nodes: the argument.

    Raises:
      ValueError: sizes do not divide, an id is out of range, or an expert has no slot.
      TypeError: ids are not integers.

    Example:
      >>> from jax_ep.placement import Placement
      >>> placement = Placement([0, 1, 0, 2], num_experts=3, num_ranks=2)
      >>> placement.num_copies.tolist(), placement.logical_to_physical.tolist()
      ([2, 1, 1], [[0, 2], [1, -1], [3, -1]])
    """

    physical_to_logical: np.ndarray
    num_experts: int
    num_ranks: int
    num_nodes: int = 1
    logical_to_physical: np.ndarray = dataclasses.field(init=False)
    num_copies: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        slots = _known("Placement", "physical_to_logical", self.physical_to_logical)
        if slots.dtype.kind not in "iu":
            raise TypeError(f"Placement: physical_to_logical has dtype {slots.dtype}, expected integers; pass ids.")
        if slots.ndim not in (1, 2):
            raise ValueError(
                f"Placement: physical_to_logical has shape {slots.shape}, expected [P] or [layers, P]; reshape it."
            )
        sizes = _checked_sizes("Placement", self.num_experts, slots.shape[-1], self.num_ranks, self.num_nodes)
        for name in ("num_experts", "num_ranks", "num_nodes"):
            object.__setattr__(self, name, sizes[name])
        if slots.size and (slots.min() < 0 or slots.max() >= self.num_experts):
            wrong = int(slots.min() if slots.min() < 0 else slots.max())
            raise ValueError(
                f"Placement: physical_to_logical has {wrong}, expected ids in [0, {self.num_experts}); every slot holds"
                " an expert, so check it and num_experts."
            )
        physical, copies = _slots_of(slots, self.num_experts)
        if not copies.all():
            expert = int(np.argwhere(copies == 0)[0, -1])
            raise ValueError(
                f"Placement: physical_to_logical has no slot for expert {expert}, expected one or more for each of the"
                f" {self.num_experts}; add one, or use plan()."
            )
        values = {"physical_to_logical": slots, "logical_to_physical": physical, "num_copies": copies}
        for name, value in values.items():
            frozen = np.array(value, np.int32)
            frozen.flags.writeable = False
            object.__setattr__(self, name, frozen)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Placement) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        slots = _known("Placement", "physical_to_logical", self.physical_to_logical)
        return slots.shape, slots.tobytes(), self.num_experts, self.num_ranks, self.num_nodes

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks, P."""
        return self.physical_to_logical.shape[-1]

    def __getitem__(self, layer: int) -> Placement:
        """Return the placement of one layer."""
        if self.physical_to_logical.ndim != 2:
            raise IndexError(
                "Placement: indexing needs a placement of several layers, but this one is for a single layer"
            )
        children, sizes = self.tree_flatten()
        return Placement.tree_unflatten(sizes, tuple(child[layer] for child in children))

    @errors_begin_with("remap")
    @jax.named_scope("jax_ep.placement.remap")
    @names_arrays_apart
    def remap(self, topk_idx: Array, *, axis_name: AxisName = "expert", prefer_own_node: bool = False) -> Array:
        """Map expert ids to slots: token t of rank r goes to copy `(t + r) % num_copies` of an expert.

        Copies get equal shares of the tokens, unless routing depends on positions. The result is deterministic.

        Args:
          topk_idx: `[T, K]` int32 logical ids, -1 for no expert.
          axis_name: mesh axes of the ranks, inside `jax.shard_map`; `()` for global or local arrays outside of it.
          prefer_own_node: use only copies on the token's node, if there are any. Fewer tokens cross nodes, but loads
            match the plan only if tokens of all nodes are routed alike.

        Returns:
          `[T, K]` int32 in [0, P); -1 stays -1, and other ids out of range stay out of range.

        Raises:
          ValueError: shapes, ids or the number of ranks do not match.
          TypeError: a dtype is wrong.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_ep.placement import Placement
          >>> placement = Placement([0, 1, 0, 2], num_experts=3, num_ranks=2)
          >>> placement.remap(jnp.array([[0, 1], [0, 2], [0, -1]]), axis_name=()).tolist()
          [[0, 1], [2, 3], [0, -1]]
        """
        check.flag("remap", "prefer_own_node", prefer_own_node)
        axes = axis_tuple(axis_name)
        self._check_one_layer("remap")
        topk_idx = check.expert_ids("remap", topk_idx, None, self.num_experts)
        if axes:
            self._check_ranks("remap", axes)
        elif prefer_own_node:
            raise ValueError(
                "remap: prefer_own_node=True with axis_name=(), expected the axes of the ranks; name the axes."
            )
        choose = partial(_choose_copies, axes=axes, num_nodes=self.num_nodes if prefer_own_node else None)
        return on_automatic_axes(choose, P(*spec_of(topk_idx)), topk_idx, self)

    @errors_begin_with("expand")
    @jax.named_scope("jax_ep.placement.expand")
    @names_arrays_apart
    def expand(self, tree: Any, *, axis_name: AxisName = "expert") -> Any:
        """Copy expert rows to slots: every copy gets the values of its expert.

        The gradient of an expert is the sum of its copies' gradients, in float32 and in a fixed order. A row is sent
        once per slot on another rank, by `lax.ppermute`; no full array is gathered.

        Args:
          tree: pytree of arrays, such as weights, biases or `QuantizedWeights`, whose leading axis is experts:
            `[L, ...]` with `L = E / W` on each rank, or `[E, ...]` with `axis_name=()`.
          axis_name: mesh axes of the ranks, inside `jax.shard_map`; `()` for whole arrays on one device.

        Returns:
          The pytree with `[P / W, ...]`, or `[P, ...]`.

        Raises:
          ValueError: a leading axis has the wrong size, or E is not a multiple of W.
          TypeError: the placement is traced and `axis_name` is not `()`; communication must be static.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_ep.placement import Placement
          >>> placement = Placement([0, 1, 0, 2], num_experts=3, num_ranks=1)
          >>> placement.expand(jnp.array([5.0, 6.0, 7.0]), axis_name=()).tolist()
          [5.0, 6.0, 5.0, 7.0]
        """
        relayed = self._from_experts("expand", axis_tuple(axis_name))
        return _over(tree, "expand", relayed, relayout.gather)

    @errors_begin_with("sum_copies")
    @jax.named_scope("jax_ep.placement.sum_copies")
    @names_arrays_apart
    def sum_copies(self, tree: Any, *, axis_name: AxisName = "expert") -> Any:
        """Sum the values of each expert's slots: the transpose of `expand`.

        For example gradients of weights that are stored by slot, or the number of tokens of each slot, from which
        `plan` makes the next placement.

        Args:
          tree: pytree of arrays `[P / W, ...]` on each rank, or `[P, ...]` with `axis_name=()`.
          axis_name: see `expand`.

        Returns:
          The pytree with `[E / W, ...]`, or `[E, ...]`; 16-bit floats are summed in float32 and rounded once.

        Raises:
          ValueError: see `expand`.
          TypeError: see `expand`.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_ep.placement import Placement
          >>> placement = Placement([0, 1, 0, 2], num_experts=3, num_ranks=1)
          >>> placement.sum_copies(jnp.array([5, 6, 7, 8]), axis_name=()).tolist()
          [12, 6, 8]
        """
        relayed = self._from_experts("sum_copies", axis_tuple(axis_name))
        return _over(tree, "sum_copies", relayed, relayout.scatter)

    def rank_loads(self, loads: Any) -> np.ndarray:
        """Return the load of each rank for given expert loads; copies of an expert take equal shares.

        Args:
          loads: `[E]`, or `[layers, E]` for a placement of several layers.

        Returns:
          `[W]` or `[layers, W]` float64.

        Raises:
          ValueError: the shape is wrong, or a load is negative or not finite.
          TypeError: loads are not numbers, or are traced.

        Example:
          >>> from jax_ep.placement import Placement
          >>> Placement([0, 1, 0, 2], num_experts=3, num_ranks=2).rank_loads([8, 1, 3]).tolist()
          [5.0, 7.0]
        """
        loads = _loads("rank_loads", loads)
        if loads.shape != self.num_copies.shape:
            raise ValueError(
                f"rank_loads: loads have shape {loads.shape}, expected {self.num_copies.shape}; pass one load per"
                " layer and expert."
            )
        shares = np.take_along_axis(loads / self.num_copies, self.physical_to_logical, axis=-1)
        with np.errstate(over="ignore"):  # A sum beyond float64 is infinite.
            return shares.reshape(*shares.shape[:-1], self.num_ranks, -1).sum(axis=-1)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
        return tuple(getattr(self, name) for name in _ARRAYS), (self.num_experts, self.num_ranks, self.num_nodes)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
        arrays, sizes = self.tree_flatten()
        return tuple(zip(map(jax.tree_util.GetAttrKey, _ARRAYS), arrays, strict=True)), sizes

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int, int], arrays: tuple[Any, ...]) -> Placement:
        """Rebuild a placement without checks, because JAX may replace arrays by other objects."""
        made = object.__new__(cls)
        for name, value in zip((*_ARRAYS, "num_experts", "num_ranks", "num_nodes"), (*arrays, *sizes), strict=True):
            object.__setattr__(made, name, value)
        return made

    def _check_one_layer(self, function: str) -> None:
        if self.physical_to_logical.ndim != 1:
            raise ValueError(
                f"{function}: the placement has {len(self.physical_to_logical)} layers, expected a single one; pass"
                " placement[layer], or scan over it."
            )

    def _check_ranks(self, function: str, axes: tuple[str, ...]) -> None:
        size = axis_size(axes, function=function)
        check.size(function, f"the number of ranks of {axes}", size, self.num_ranks, "plan() for as many ranks")

    def _from_experts(self, function: str, axes: tuple[str, ...]) -> relayout.Relayout:
        self._check_one_layer(function)
        if not axes:
            return relayout.make(self.physical_to_logical, self.num_experts, 1, axes)
        self._check_ranks(function, axes)
        check.divisible_experts(function, self.num_experts, self.num_ranks, axes)
        slots = _known(function, "the placement", self.physical_to_logical)
        return relayout.make(slots, self.num_experts, self.num_ranks, axes)


def plan(loads: Any, *, num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 1) -> Placement:
    """Plan a placement that copies busy experts and balances the ranks, by DeepSeek's algorithm.

    With `num_groups` the policy is hierarchical: nodes get whole groups with roughly equal loads, and copies of an
    expert stay on the node of its group. It suits routers that choose few groups per token (DeepSeek-V3), whose tokens
    then go to few nodes. Without groups the policy is global: copies go anywhere. Copies of an expert are on different
    ranks, unless there are more copies than ranks. Equal loads give equal plans.

    Args:
      loads: `[E]`, or `[layers, E]` for one plan per layer: tokens of each expert, as in `MoEMetrics.load`, or any
        other measure; all zeros are allowed.
      num_slots: P, at least E and a multiple of `num_ranks`.
      num_ranks: W.
      num_nodes: nodes of equally many consecutive ranks.
      num_groups: groups of consecutive experts, a multiple of `num_nodes`; 1 for none.

    Returns:
      The `Placement`; the expert ids of a rank are in ascending order.

    Raises:
      ValueError: sizes do not divide, there are too few slots, or a load is negative or not finite.
      TypeError: loads are not numbers, or are traced.

    Example:
      >>> from jax_ep.placement import plan
      >>> placement = plan([90, 10, 20, 30, 10, 20], num_slots=8, num_ranks=4)
      >>> placement.physical_to_logical.reshape(4, 2).tolist()
      [[0, 2], [0, 5], [0, 1], [3, 4]]
      >>> placement.rank_loads([90, 10, 20, 30, 10, 20]).tolist()
      [50.0, 50.0, 40.0, 40.0]

    Source: DeepSeek's EPLB (github.com/deepseek-ai/EPLB; arXiv:2412.19437, section 3.4).
    """
    loads = _loads("plan", loads)
    if loads.ndim not in (1, 2):
        raise ValueError(f"plan: loads have shape {loads.shape}, expected [E] or [layers, E]; reshape them.")
    num_experts = loads.shape[-1]
    given = _checked_sizes("plan", num_experts, num_slots, num_ranks, num_nodes)
    num_slots, num_ranks, num_nodes = given["num_slots"], given["num_ranks"], given["num_nodes"]
    num_groups = check.integer("plan", "num_groups", num_groups)
    if num_experts % num_groups or (num_groups > 1 and num_groups % num_nodes):
        raise ValueError(
            f"plan: num_groups={shown(num_groups)}, expected a number that divides the {num_experts} experts and is a"
            f" multiple of num_nodes={num_nodes}; change it, or leave it out for copies on any node."
        )
    sizes = num_slots, num_ranks, num_nodes if num_groups > 1 else 1, num_groups
    loads = np.ldexp(loads, -np.frexp(loads.max(initial=0))[1])  # Scaling keeps sums finite and preserves the order.
    layers = [_plan_layer(layer, *sizes) for layer in loads.reshape(-1, num_experts)]
    slots = np.array(layers, np.int32).reshape(*loads.shape[:-1], num_slots)
    return Placement(slots, num_experts, num_ranks, num_nodes)


@operation
def move(tree: Any, old: Placement, new: Placement, *, axis_name: AxisName = "expert") -> Any:
    """Move rows from the slots of one placement to those of another, between ranks and not through the host.

    For weights that are stored by slot, and their optimizer state. A row comes from a copy on the same rank if there is
    one, else from one on the same node, else from the copy whose rank has sent the least.

    Args:
      tree: pytree of arrays `[P / W, ...]` on each rank, by `old`, or `[P, ...]` with `axis_name=()`.
      old: the current placement; copies hold equal values.
      new: the next placement, with the same numbers of experts and ranks; its number of slots may differ.
      axis_name: mesh axes of the ranks, inside `jax.shard_map`; `()` for whole arrays on one device.

    Returns:
      The pytree by `new`.

    Raises:
      ValueError: sizes do not match.
      TypeError: a placement is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.placement import Placement, move
      >>> old = Placement([0, 1, 0, 2], num_experts=3, num_ranks=2)
      >>> new = Placement([2, 1, 0, 2], num_experts=3, num_ranks=2)
      >>> move(jnp.array([5.0, 6.0, 5.0, 7.0]), old, new, axis_name=()).tolist()
      [7.0, 6.0, 5.0, 7.0]
    """
    for placement in (old, new):
        if not isinstance(placement, Placement):
            raise TypeError(f"move: got {type_name(placement)}, expected a Placement; pass the old and the new.")
        placement._check_one_layer("move")
        _known("move", "the placement", placement.physical_to_logical)
    check.size("move", "the number of experts of new", new.num_experts, old.num_experts, "plan() for the same experts")
    check.size("move", "the number of ranks of new", new.num_ranks, old.num_ranks, "plan() for the same ranks")
    axes = axis_tuple(axis_name)
    if axes:
        old._check_ranks("move", axes)
    relayed = relayout.make(_nearest(old, new), old.num_slots, old.num_ranks if axes else 1, axes)
    return _over(tree, "move", relayed, relayout.gather)


# --- copies ----------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("axes", "num_nodes"))
def _choose_copies(topk_idx: Array, placement: Placement, *, axes: tuple[str, ...], num_nodes: int | None) -> Array:
    """Map ids to slots as `remap` describes; with `num_nodes`, copies on this rank's node come first."""
    rank = lax.axis_index(axes) if axes else 0
    slots, copies = jnp.asarray(placement.logical_to_physical), jnp.asarray(placement.num_copies)
    if num_nodes is not None:
        node = rank // (placement.num_ranks // num_nodes)
        here = (slots >= 0) & (slots // (placement.num_slots // num_nodes) == node)
        slots = jnp.take_along_axis(slots, jnp.argsort(~here, axis=-1, stable=True), axis=-1)
        num_here = here.sum(axis=-1, dtype=jnp.int32)
        copies = jnp.where(num_here > 0, num_here, copies)
    known = (topk_idx >= 0) & (topk_idx < placement.num_experts)
    experts = jnp.where(known, topk_idx, 0)
    turn = (jnp.arange(topk_idx.shape[0], dtype=jnp.int32)[:, None] + rank) % copies[experts]
    return jnp.where(known, slots[experts, turn], jnp.where(topk_idx < 0, topk_idx, placement.num_slots))


# --- the algorithm ---------------------------------------------------------------------------------------------------


def _plan_layer(loads: np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> np.ndarray:
    """Return the expert of each slot, `[P]`."""
    ranks = num_ranks // num_nodes
    groups = np.arange(len(loads)).reshape(num_groups, -1)
    node_of_group = _pack(loads[groups].sum(axis=1), np.arange(num_groups), num_nodes)
    slots = []
    for node in range(num_nodes):
        experts = groups[node_of_group == node].reshape(-1)
        copies = _replicate(loads[experts], num_slots // num_nodes, ranks)
        held, shares = np.repeat(experts, copies), np.repeat(loads[experts] / copies, copies)
        rank_of_slot = _pack(shares, held, ranks)
        slots += [np.sort(held[rank_of_slot == rank]) for rank in range(ranks)]
    return np.concatenate(slots)


def _replicate(loads: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """Choose copies per expert, `[n]`: each copy goes to the highest load per copy, at most one per rank."""
    copies = np.ones(len(loads), np.int64)
    for _ in range(num_slots - len(loads)):
        full = copies >= num_ranks
        copies[np.lexsort((copies, -loads / copies, full))[0]] += 1
    return copies


def _pack(loads: np.ndarray, kinds: np.ndarray, num_bins: int) -> np.ndarray:
    """Assign items to bins of equal size, `[n]`: by decreasing load to the lightest bin with room, kinds kept apart."""
    room = np.full(num_bins, len(loads) // num_bins)
    total, held = np.zeros(num_bins), np.zeros((num_bins, kinds.max() + 1), np.int64)
    bins = np.zeros(len(loads), np.int64)
    for i in np.argsort(-loads, kind="stable"):
        bins[i] = lightest = np.lexsort((-room, total, held[:, kinds[i]] > 0, room == 0))[0]
        total[lightest] += loads[i]
        room[lightest] -= 1
        held[lightest, kinds[i]] += 1
    while (pair := _apart(loads, kinds, bins, total, held)) is not None:
        for item, other in (pair, pair[::-1]):
            total[bins[item]] += loads[other] - loads[item]
            held[bins[item], [kinds[item], kinds[other]]] += -1, 1
        bins[list(pair)] = bins[list(pair[::-1])]
    return bins


def _apart(
    loads: np.ndarray, kinds: np.ndarray, bins: np.ndarray, total: np.ndarray, held: np.ndarray
) -> tuple[int, int] | None:
    """Find two items whose swap leaves fewer duplicates of a kind in a bin, and the heavier bin as light as possible.

    Such items exist while a kind is twice in one bin and missing in another. The other bin then has a duplicate that
    can move, or, without duplicates, two kinds that the first bin lacks.
    """
    for item in np.flatnonzero(held[bins, kinds] > 1):
        is_missing = held[:, kinds[item]] == 0
        may_go = (held[bins, kinds] > 1) | (held[bins[item], kinds] == 0)
        others = np.flatnonzero(is_missing[bins] & may_go)
        if len(others):
            change = loads[others] - loads[item]
            heavier = np.maximum(total[bins[item]] + change, total[bins[others]] - change)
            return int(item), int(others[np.argmin(heavier)])
    return None


def _nearest(old: Placement, new: Placement) -> np.ndarray:
    """Return the old slot from which each new slot is copied, `[P of new]`."""
    sent, sources = np.zeros(old.num_ranks, np.int64), np.zeros(new.num_slots, np.int64)
    per_node = new.num_ranks // new.num_nodes
    for slot, expert in enumerate(new.physical_to_logical):
        copies = old.logical_to_physical[expert, : old.num_copies[expert]]
        ranks, rank = copies // (old.num_slots // old.num_ranks), slot // (new.num_slots // new.num_ranks)
        order = np.lexsort((sent[ranks], ranks // per_node != rank // per_node, ranks != rank))
        sources[slot] = copies[order[0]]
        sent[ranks[order[0]]] += ranks[order[0]] != rank
    return sources


def _slots_of(slots: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `logical_to_physical` and `num_copies`."""
    layers, num_slots = slots.reshape(-1, slots.shape[-1]), slots.shape[-1]
    physical = np.full((len(layers), num_experts, num_slots - num_experts + 1), -1, np.int32)
    copies = np.zeros((len(layers), num_experts), np.int32)
    for layer, held in enumerate(layers):
        copies[layer] = np.bincount(held, minlength=num_experts)
        if not copies[layer].all():
            break  # The caller reports an expert without a slot.
        order = np.argsort(held, kind="stable")
        first = np.cumsum(copies[layer]) - copies[layer]
        physical[layer, held[order], np.arange(num_slots) - first[held[order]]] = order
    leading = slots.shape[:-1]
    return physical.reshape(*leading, *physical.shape[1:]), copies.reshape(*leading, num_experts)


# --- checks ----------------------------------------------------------------------------------------------------------


def _known(function: str, name: str, value: Any) -> np.ndarray:
    """Return an array on the host; tracers are an error."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} is traced, expected concrete values; close over it instead of passing it to the"
            " jitted function."
        )
    if isinstance(value, jax.Ref):  # While jit traces, NumPy would read its elements without end.
        raise TypeError(f"{function}: {name} is a Ref, expected an array; pass its values, ref[...].")
    check.not_deleted(function, name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: {name} is {type_name(value)}, expected an array ({error}); pass one.") from None


def _loads(function: str, loads: Any) -> np.ndarray:
    loads = _known(function, "loads", loads)
    if loads.dtype.kind not in "iuf":
        raise TypeError(f"{function}: loads have dtype {loads.dtype}, expected real numbers; pass one per expert.")
    loads = loads.astype(np.float64)
    wrong = loads[~(np.isfinite(loads) & (loads >= 0))]
    if wrong.size:
        raise ValueError(f"{function}: loads contain {wrong[0]}, expected finite numbers from 0; pass counts.")
    return loads


def _checked_sizes(function: str, num_experts: Any, num_slots: Any, num_ranks: Any, num_nodes: Any) -> dict[str, int]:
    given = {"num_experts": num_experts, "num_slots": num_slots, "num_ranks": num_ranks, "num_nodes": num_nodes}
    sizes = {name: check.integer(function, name, value) for name, value in given.items()}
    if sizes["num_slots"] < sizes["num_experts"]:
        raise ValueError(
            f"{function}: {num_slots} slots for {num_experts} experts, expected at least as many; give each rank more."
        )
    for whole, parts in (("num_slots", "num_ranks"), ("num_ranks", "num_nodes")):
        reason = f"{parts}, because all have equally many"
        check.multiple(function, whole, sizes[whole], sizes[parts], reason, "change one of the two")
    return sizes


def _over(tree: Any, function: str, relayed: relayout.Relayout, move_rows: Callable[..., Array]) -> Any:
    """Apply `relayout.gather` or `relayout.scatter` to every leaf; explicit mesh axes keep sharding it."""
    sizes = relayed.num_sources, relayed.own_rows.shape[-1]
    before, after = sizes if move_rows is relayout.gather else sizes[::-1]

    def run(own_rows: Array, w: Array) -> Array:
        return move_rows(dataclasses.replace(relayed, own_rows=own_rows), w)

    def one(path: Any, leaf: Any) -> Array:
        name = f"tree{jax.tree_util.keystr(path)}"
        leaf = check.array(function, name, leaf, "[rows, ...]")
        if leaf.shape[0] != before:
            raise ValueError(
                f"{function}: {name} has shape {leaf.shape}, expected {before} rows; pass the part of this rank inside"
                " jax.shard_map, and whole arrays with axis_name=()."
            )
        if move_rows is relayout.scatter and not jnp.issubdtype(leaf.dtype, jnp.number):
            raise TypeError(
                f"{function}: {name} has dtype {leaf.dtype}, expected numbers, which are summed; cast it with astype,"
                " or leave it out of the tree."
            )
        return on_automatic_axes(run, resized_spec(leaf, 0, after), relayed.own_rows, leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
