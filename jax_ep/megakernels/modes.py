"""The modes of exchanges with GEMMs: what the schedule or the settings say, else what should be fastest."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jax_ep.core.facts import FusedFacts, FusedModes
from jax_ep.core.kernel import BOUND
from jax_ep.megakernels import cost_model, tuned
from jax_ep.types import COMBINE_MODES, Layout, Schedule


def fused_modes(schedule: Schedule, facts: FusedFacts, *, by_pallas: bool) -> FusedModes:
    """The modes of both directions; `by_pallas`: `pallas` runs GEMMs in launches of their own."""
    layout, dtype, hidden, columns = facts.layout, facts.dtype, facts.hidden, facts.columns
    settings = tuned.exchange_gemm_facts(layout, hidden, columns, dtype)
    chosen = tuned.schedule(schedule, "dispatch_grouped_gemm", **settings).dispatch_mode
    none, rows, tokens = (
        chosen or cost_model.dispatch_mode(layout, hidden, columns, save_as, by_pallas=by_pallas)
        for save_as in (None, "rows", "tokens")
    )
    settings = tuned.exchange_gemm_facts(layout, columns, hidden, dtype)
    combine = tuned.schedule(schedule, "grouped_gemm_combine", **settings).combine_mode
    combine = combine or cost_model.combine_mode(layout, columns, hidden, by_pallas=by_pallas)
    return FusedModes(none, rows, tokens, combine, _mode_with_gradient(schedule, facts, by_pallas))


def _mode_with_gradient(schedule: Schedule, facts: FusedFacts, by_pallas: bool) -> str | None:
    """The mode of GEMM + combine that share a launch with the gradient of the weights; None: they share none."""
    schedule = backward_schedule(schedule, facts.layout, facts.columns, facts.hidden, facts.dtype)
    wanted, mode = schedule.fuse_weight_gradients, schedule.combine_mode
    if facts.layout.capacity > BOUND or wanted is False:
        return None
    times = cost_model.backward_times(facts.layout, facts.columns, facts.hidden, by_pallas=by_pallas)
    if wanted is None and not _gradient_is_faster(times, mode):
        return None
    return mode or min(COMBINE_MODES, key=lambda name: times.beside[name])


def _gradient_is_faster(times: cost_model.BackwardTimes, mode: str | None) -> bool:
    """Whether the gradient of the weights is faster in the launch of the exchange, by more than a hundredth."""
    if jax.default_backend() == "cpu":
        return False  # the interpreter runs nothing at the same time
    modes = COMBINE_MODES if mode is None else (mode,)
    apart, together = (min(found[name] for name in modes) for found in times)
    return 1.01 * together < apart


def backward_schedule(given: Schedule, layout: Layout, features: int, hidden: int, dtype: DTypeLike) -> Schedule:
    """The schedule of the backward pass of dispatch + GEMM, from rows `[., features]` to tokens `[., hidden]`."""
    facts = tuned.exchange_gemm_facts(layout, features, hidden, dtype)
    return tuned.schedule(given, "grouped_gemm_combine_with_weight_gradient", **facts)
