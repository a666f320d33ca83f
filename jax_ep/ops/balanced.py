"""The balanced expert layer: overloaded ranks hand rows, and copies of the experts' weights, to ranks with room.

Each pass computes at most R rows per rank, so arrays have R rows, where a dropless layer reserves W * T * K.
Assignments that the spare slots of a pass cannot place run in further passes of the same static size, each with its own
plan (`core/balance.py`). Nothing is dropped, whatever the routing.

The first pass is differentiated as any layer is. Later passes keep nothing for the backward pass and run again there.
Each pass starts from the sum of those before, so XLA cannot run two at a time and hold the memory of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import check, operations
from jax_ep.core.autodiff import HIDDEN_NAME, TOKENS_NAME, without_tangent
from jax_ep.core.balance import WORK, Balance, PassPlan
from jax_ep.core.check import operation
from jax_ep.core.expert_matrices import QuantizedWeights, SplitWeights, joined, split
from jax_ep.core.facts import ExchangeFacts
from jax_ep.core.layout import count_assignments
from jax_ep.core.mesh_axes import known_after, rank_on, spread_axes, vary_alike
from jax_ep.ops import plan as plans
from jax_ep.ops import registry
from jax_ep.types import Array, AxisName, Handle, Layout, Options, Topology

type Tree = Any
"""A pytree of arrays."""
Layer = Callable[..., Array]
"""One pass: `layer(x, topk_idx, topk_weights, weights, closed, num_experts=, capacity=, preferred_element_type=)`."""
type State = tuple[Array, Array]
"""Expert ids `[T, K]` of this rank that have no place yet, and counts `[W, E]` of those of all ranks."""
type Place = tuple[Array, Array, Array]
"""Slots `[T, K]`, copies `[W, S]` and work `[3]` of a pass, see `_work`."""

_FIRST_ONLY = "moe: balance has first derivatives only; for second ones, leave balance=None."

_recorded: ContextVar[list[dict[str, Array]] | None] = ContextVar("jax_ep_balanced_work", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[dict[str, Array]]]:
    """Collect what the balanced calls that are traced in this block do on this rank: `WORK`, `[]` int32 each."""
    found: list[dict[str, Array]] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Static facts of a balanced call."""

    num_experts: int  # E
    num_ranks: int  # W
    rows: int  # R
    spare: int  # S, spare slots per rank
    axis: tuple[str, ...]  # mesh axes of the experts
    sum_dtype: DTypeLike  # dtype of each pass and of the result
    implementation: str  # of the plan and of what moves the copies
    splits: bool = False  # whether weights that are not quantized and copies of them stay in two arrays
    reproducible: bool = False  # whether all assignments of a token are in one pass, so that its sums have one order
    layer: Layer | None = None  # computes one pass, see `Layer`; None for a dispatch

    @property
    def num_local(self) -> int:
        """L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def is_one_pass(self) -> bool:
        """Whether one pass is enough for any routing."""
        return self.num_ranks == 1 or self.spare >= self.num_local

    @property
    def selects_tokens(self) -> bool:
        """Whether a pass must select tokens that it can compute whole."""
        return self.reproducible and not self.is_one_pass


def check_balance(
    function: str, balance: object, axis_name: AxisName, capacity: int | None, handle: object = None
) -> None:
    """Raise where `balance` is no `Balance`, or does not go with the other arguments."""
    if check.value_of(function, "balance", balance, Balance, "jax_ep.Balance") is None:
        return
    if isinstance(axis_name, Topology):
        raise NotImplementedError(f"{function}: balance with a Topology is not supported; pass a single mesh axis.")
    if capacity is not None:
        raise ValueError(
            f"{function}: {capacity=} with balance, expected one of the two, since balance.rows sets the rows per rank;"
            " leave capacity out."
        )
    if handle is not None:
        raise ValueError(
            f"{function}: balance with a handle, expected one of the two, since the handle contains its plan; leave"
            " balance out."
        )


def run(
    balance: Balance,
    layer: Layer,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    weights: Tree,
    closed: Tree,
    *,
    num_experts: int,
    options: Options,
    sum_dtype: DTypeLike,
) -> Array:
    """Sum of all passes, `[T, H]` in `sum_dtype`; call inside shard_map.

    Args:
      balance: rows and spare experts.
      layer: computes one pass.
      x: `[T, H]` tokens.
      topk_idx: `[T, K]` int32; ids outside of `[0, E)` are no expert.
      topk_weights: `[T, K]`.
      weights: pytree of arrays `[L, ...]` of this rank's experts.
      closed: pytree of further arrays for the layer, which may vary over fewer mesh axes.
      num_experts: E.
      options: of the call.
      sum_dtype: dtype of each pass and of the result.
    """
    axis, num_ranks = options.axis, lax.axis_size(options.axis)
    rows = balance.rows_per_rank(topk_idx.size)
    num_tokens, top_k = topk_idx.shape
    layout = Layout(num_ranks, num_experts, num_tokens, top_k, rows, axis=spread_axes(axis))
    exchange, wanted = ExchangeFacts(x.dtype, x.shape[1], layout), balance.spare_experts
    plan = plans.balanced(options, exchange, wanted, jax.tree.leaves(weights))
    facts = num_experts, num_ranks, rows, plan.spare, axis, sum_dtype, plan.part.implementation
    passes = Passes(*facts, plan.splits, bool(options.schedule.reproducible), layer)
    topk_idx = _only_experts(topk_idx, num_experts)
    x, topk_weights, weights, topk_idx = vary_alike((x, topk_weights, weights, topk_idx), over=axis)
    counts = _count(passes, topk_idx)
    y, work = _all_passes(passes, (topk_idx, counts), x, topk_weights, weights, closed)
    if (found := _recorded.get()) is not None:
        before = counts.reshape(num_ranks, num_ranks, -1)[:, rank_on(axis)].sum(dtype=jnp.int32)
        found.append(dict(zip(WORK, (before, *work), strict=True)))
    return y


def place(balance: Balance, options: Options, facts: ExchangeFacts, topk_idx: Array) -> tuple[Passes, Place, State]:
    """Plan the one pass of a dispatch, by default with a spare slot for each expert at home, so that nothing is left.

    Args:
      balance: rows and spare experts.
      options: of the call.
      facts: of the dispatch without balance.
      topk_idx: `[T, K]` int32; ids outside of `[0, E)` are no expert.
    """
    layout, axis, num_experts = facts.layout, options.axis, facts.layout.num_experts
    rows, wanted = balance.rows_per_rank(topk_idx.size), balance.spare_experts or layout.num_local_experts
    facts = dataclasses.replace(facts, layout=dataclasses.replace(layout, capacity=rows))
    plan = plans.balanced(options, facts, wanted, ())
    passes = Passes(num_experts, layout.num_ranks, rows, plan.spare, axis, facts.dtype, plan.part.implementation)
    topk_idx = vary_alike(_only_experts(topk_idx, num_experts), over=axis)
    return passes, *_next_pass(passes, (topk_idx, _count(passes, topk_idx)))


@operation
def with_copies[Weights](weights: Weights, handle: Handle) -> Weights:
    """Return the weights of all experts whose rows a rank has after `dispatch(balance=...)`: copies follow its own.

    Use them in grouped GEMMs over the rows of the dispatch. In the backward pass, gradients of copies return to their
    home rank, and are added there in at least float32, in a fixed order. On GPUs this reserves symmetric memory for
    W * S experts of the largest array, by default W * L: pass `Balance(spare_experts=)` for fewer. Pass all weights in
    one tree: two calls have no order, which launches on symmetric memory need. The result is a residual of such GEMMs;
    put both into `jax.checkpoint` to fetch the copies again instead.

    Args:
      weights: pytree of arrays `[L, ...]` of this rank's experts, such as `QuantizedWeights`.
      handle: `Dispatched.handle`.

    Returns:
      The same tree of `[L + S, ...]` for S spare slots, zero in free ones; `weights` after a dispatch without balance.

    Raises:
      ValueError: weights of another number of experts.
      TypeError: `handle` is no handle.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.placement import with_copies
      >>> d = jax_ep.dispatch(jnp.ones((2, 4)), jnp.array([[1], [0]]), num_experts=2, axis_name=())
      >>> with_copies(jnp.ones((2, 4, 3)), d.handle).shape  # no copies on one device
      (2, 4, 3)

    Source: transient copies of experts, as in MoonEP, ECHO (Megatron Core) and LLEP.
    """
    check.instance("with_copies", "handle", handle, Handle, "the Handle of a dispatch; pass Dispatched.handle")
    leaves, structure = jax.tree.flatten(weights)
    layout, spare = handle.layout, 0 if handle.copies is None else handle.copies.shape[1]
    remedy = "pass the weights of this rank's experts"
    for w in leaves:
        check.array("with_copies", "weights", w, "[L, ...]", remedy=remedy, L=layout.num_local_experts - spare)
    if handle.copies is None:
        return weights
    axis, implementation = layout.axis, "xla" if handle.group is None else "triton"
    sizes = layout.num_experts - handle.copies.size, layout.num_ranks, layout.capacity, spare
    passes = Passes(*sizes, axis, jnp.float32, implementation)
    arrays = tuple(map(_as_bits, leaves)), handle.copies, handle.order
    bits, copies, order = vary_alike(arrays, over=axis)
    whole = _with_copies(passes, (_Form(splits=False),) * len(bits), copies, copies, order, bits)[0]
    return jax.tree.unflatten(structure, map(_from_bits, whole, leaves))


def _only_experts(topk_idx: Array, num_experts: int) -> Array:
    """Replace ids outside of `[0, E)` by -1."""
    return jnp.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, -1)


def _count(passes: Passes, topk_idx: Array) -> Array:
    """Count the assignments `[W, E]` from each rank to each expert, equal on all ranks."""
    mine = count_assignments(topk_idx, passes.num_experts)
    of_all = jnp.zeros((passes.num_ranks, passes.num_experts), jnp.int32)
    return lax.psum(of_all.at[rank_on(passes.axis)].set(mine), passes.axis)


def _next_pass(passes: Passes, state: State) -> tuple[Place, State]:
    """Plan the next pass; return also what it leaves."""
    planner, rank = registry.BALANCE_PLAN.by(passes.implementation), rank_on(passes.axis)
    plan = planner.plan_pass(state[1], passes.rows, passes.spare)
    (topk_idx, counts), plan = _first_tokens(passes, state, plan) if passes.selects_tokens else (state, plan)
    slots, left = planner.place_assignments(topk_idx, counts, plan, rank)
    left_counts = plan.left
    if passes.selects_tokens:
        left, left_counts = jnp.where(topk_idx >= 0, -1, state[0]), state[1] - counts
    return (slots, plan.copies, _work(plan, rank)), (left, left_counts)


def _first_tokens(passes: Passes, state: State, plan: PassPlan) -> tuple[State, PassPlan]:
    """Return the first tokens that have places for all of their assignments in one pass, and its plan.

    Tokens are in the order of their index, then of their rank. While the plan of all of them leaves an assignment, half
    as many are tried. One token, of K assignments on R >= T * K rows, always has places.
    """
    planner, (topk_idx, _) = registry.BALANCE_PLAN.by(passes.implementation), state
    position = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)[:, None] * passes.num_ranks + rank_on(passes.axis)
    end = topk_idx.shape[0] * passes.num_ranks

    def halve(carry: tuple[Array, State, PassPlan]) -> tuple[Array, State, PassPlan]:
        first = lax.pmin(jnp.min(jnp.where(topk_idx >= 0, position, end)), passes.axis)
        number = carry[0] // 2
        ids = jnp.where(position < first + number, topk_idx, -1)
        counts = _count(passes, ids)
        return number, (ids, counts), planner.plan_pass(counts, passes.rows, passes.spare)

    return lax.while_loop(lambda carry: jnp.any(carry[2].left > 0), halve, (jnp.int32(end), state, plan))[1:]


def _work(plan: PassPlan, rank: Array | int) -> Array:
    """Rows and copies of a rank in a pass, and 1 for the pass itself: `[3]` int32, which passes add up."""
    own, copies = plan.own[rank], plan.copies[rank]
    others = plan.ends[rank] - jnp.where(rank > 0, plan.ends[rank - 1], 0)
    return jnp.stack([(own + others).sum(dtype=jnp.int32), (copies >= 0).sum(dtype=jnp.int32), jnp.int32(1)])


def _one_pass(passes: Passes, place: Place, x: Array, topk_weights: Array, weights: Tree, closed: Tree) -> Array:
    slots, copies, _ = place

    def compute(x: Array, topk_weights: Array, weights: Tree, closed: Tree) -> Array:
        paths, structure = jax.tree.flatten_with_path(weights)
        leaves = tuple(_as_bits(w) for _, w in paths)
        forms = tuple(_form(passes, getattr(path[-1], "name", ""), w) for path, w in paths)
        whole, slots_after, x = _with_copies(passes, forms, copies, slots, x, leaves)
        whole = jax.tree.unflatten(structure, map(_from_bits, whole, (w for _, w in paths)))
        sizes = {"num_experts": passes.num_experts + passes.num_ranks * passes.spare, "capacity": passes.rows}
        layer = cast(Layer, passes.layer)
        return layer(x, slots_after, topk_weights, whole, closed, preferred_element_type=passes.sum_dtype, **sizes)

    # The backward pass fetches the copies again instead of keeping them.
    policy = jax.checkpoint_policies.save_only_these_names(HIDDEN_NAME, TOKENS_NAME)
    return jax.checkpoint(compute, policy=policy)(x, topk_weights, weights, closed)


def _add_later_passes(passes: Passes, state: State, step: Callable[[Place], Tree], first: Tree) -> Tree:
    """`first` plus `step(place)` of each later pass, in order; each sum is rounded to the dtype of the pass.

    The number of passes follows from counts that all ranks share.
    """
    if passes.is_one_pass:
        return first

    def one_pass(carry: Tree) -> Tree:
        place, left = _next_pass(passes, carry[0])
        return left, jax.tree.map(jnp.add, carry[1], step(place))

    return lax.while_loop(lambda carry: jnp.any(carry[0][1] > 0), one_pass, (state, first))[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_passes(passes: Passes, state: State, *operands: Tree) -> tuple[Array, Array]:
    place, left = _next_pass(passes, state)
    first = _one_pass(passes, place, *operands), place[2]
    return _add_later_passes(passes, left, lambda place: (_one_pass(passes, place, *operands), place[2]), first)


def _all_passes_forward(passes: Passes, state: State, *operands: Tree) -> tuple[tuple[Array, Array], Tree]:
    place, left = _next_pass(passes, state)
    y, pull = jax.vjp(partial(_one_pass, passes), place, *operands)
    first = y, place[2]
    sums = _add_later_passes(passes, left, lambda place: (_one_pass(passes, place, *operands), place[2]), first)
    return sums, (pull, left, None if passes.is_one_pass else operands)


def _all_passes_backward(passes: Passes, residuals: Tree, cotangents: tuple[Array, Any]) -> tuple[Tree, ...]:
    (pull, left, operands), cotangent = without_tangent(_FIRST_ONLY, (residuals, cotangents[0]))
    first = _pull_after(pull, cotangent)
    if passes.is_one_pass:
        return None, *first

    def step(place: Place) -> Tree:
        return _pull_after(jax.vjp(partial(_one_pass, passes), place, *operands)[1], cotangent)

    return None, *_add_later_passes(passes, left, step, first)


def _pull_after(pull: Any, cotangent: Array) -> Tree:
    """Gradients of a pass, which fetches its copies again after all that the pass kept, and the cotangent, is known."""
    slots, copies, work = pull.args_res[0]
    for earlier in (cotangent, *pull.opaque_residuals):
        copies = known_after(copies, earlier)
    pull.args_res[0] = slots, copies, work
    gradients = pull(cotangent)[1:]
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, gradients)  # of integers


_all_passes.defvjp(_all_passes_forward, _all_passes_backward)


def _as_bits(w: Array) -> Array:
    """Return values of 8 bits or fewer, which have no gradient, as a byte each, and others as they are."""
    return w if w.dtype.itemsize > 1 else lax.stop_gradient(w).view(_bits_of(w)).astype(jnp.uint8)


def _from_bits(w: Array, like: Array) -> Array:
    return w if w.dtype == like.dtype else w.astype(_bits_of(like)).view(like.dtype)


def _bits_of(w: Array) -> str:
    return f"uint{jax.dtypes.itemsize_bits(w.dtype)}"


class _Form(NamedTuple):
    """Static facts of a leaf of the weights.

    Whether it and its copies stay in two arrays, whether anything reads the copies, and whether it has a gradient.
    """

    splits: bool
    is_read: bool = True
    is_trained: bool = True


def _form(passes: Passes, field: str, w: Array) -> _Form:
    """Return the form of a leaf in a field of `ExpertWeights`, `QuantizedWeights` or `LoraWeights`."""
    if field == "master":
        return _Form(passes.splits, is_read=False)
    is_quantized = field in _QUANTIZED_FIELDS
    return _Form(passes.splits and w.ndim > 2 and not is_quantized, is_trained=not is_quantized and field != "base")


_QUANTIZED_FIELDS = {field.name for field in dataclasses.fields(QuantizedWeights)}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_copies(
    passes: Passes, forms: tuple[_Form, ...], copies: Array, slots: Array, x: Array, weights: tuple[Array, ...]
) -> tuple[Any, Array, Array]:
    """Weights `[L, ...]` of the experts at home, followed by those of the copies: `[L + S, ...]`, or `SplitWeights`.

    Copies that nothing reads are zero; only their gradients are moved.
    Collectives and kernels need one order on all ranks. So this also returns `slots` with a data dependence on all
    transfers, and `x`: in the backward pass transfers follow its gradient, and what uses the gradient follows them.
    """
    found = []
    for w, form in zip(weights, forms, strict=True):
        if form.is_read:
            spare, slots = _transfers(passes).fetch_copies(passes.axis, copies, w, slots, zeroed=not form.splits)
        else:
            spare = jnp.zeros_like(w, shape=(copies.shape[1], *w.shape[1:]))
        both = SplitWeights(w, spare)
        found.append(both if form.splits else joined(both))
    return tuple(found), slots, x


def _with_copies_forward(
    passes: Passes, forms: tuple[_Form, ...], copies: Array, slots: Array, x: Array, weights: tuple[Array, ...]
) -> tuple[tuple[Any, Array, Array], Array]:
    return _with_copies(passes, forms, copies, slots, x, weights), copies


def _with_copies_backward(
    passes: Passes, forms: tuple[_Form, ...], copies: Array, cotangents: tuple[Any, Array, Array]
) -> tuple[None, None, Array, Any]:
    """Return the gradients of copies to their home, and add them there in at least float32, in a fixed order."""
    found: list[Any] = []
    gradients, _, dx = cotangents
    for gradient, form in zip(gradients, forms, strict=True):
        if gradient.dtype == jax.dtypes.float0:
            found.append(np.zeros((passes.num_local, *gradient.shape[1:]), jax.dtypes.float0))
            continue
        if not form.is_trained:
            found.append(jnp.zeros_like(joined(gradient)[: passes.num_local]))
            continue
        if not isinstance(gradient, SplitWeights):
            gradient = split(gradient, passes.num_local)
        total, dx = _transfers(passes).add_gradients(passes.axis, copies, *gradient, dx)
        found.append(total)
    return None, None, dx, tuple(found)


_with_copies.defvjp(_with_copies_forward, _with_copies_backward)


def _transfers(passes: Passes) -> operations.ExpertCopies:
    return registry.EXPERT_COPIES.by(passes.implementation)
