"""How long the modes of fused operations should take, and so which one to choose; docs/design/fused.md tells why."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax_ep.core.facts import FusedFacts, FusedModes
from jax_ep.megakernels import tuned
from jax_ep.settings.file import Rates
from jax_ep.types import Layout, Schedule


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates of a GPU for the parts of fused operations, here those of an H200, each with the report that measured it.

    Files are in benchmarks/results; "no report": the output of the run was not kept (docs/design/fused.md).
    """

    link_bytes: float = 350e9  # sent to other GPUs in a second, by ordinary stores (dispatch_combine_4_gpus.json)
    product_flops: float = 600e12  # operations of a grouped GEMM of `triton` in a second (grouped_gemm_gpu.json)
    specialized_product: float = 1.08  # speedup of a separate GEMM by `pallas`, or in Gluon (grouped_gemm_gpu.json)
    # K from which that speedup is reached; it shrinks in proportion below (grouped_gemm_gpu.json).
    specialized_depth: int = 4096
    # Moved to make sums in a second, by combine (dispatch_combine_2_gpus.json, moe_layer_combine.json).
    combine_bytes: float = 3.8e12
    scatter_bytes: float = 2.6e12  # the same in the sums at the end of GEMM + combine (moe_layer.json)
    many_row_bytes: int = 1 << 30  # from this many bytes of arriving rows on, their stores slow down the GEMM
    many_scatter_bytes: float = 1.5e12  # `scatter_bytes` from `many_row_bytes` on (no report)
    meeting_seconds: float = 50e-6  # until all programs of all ranks have met before these sums (moe_layer.json)
    copy_bytes: float = 3.8e12  # read and written by a copy of rows in a second (moe_layer_combine.json)
    launch_seconds: float = 10e-6  # cost of one more launch, which matters with few tokens (no report)
    # Part of the dispatch by which dispatch + GEMM takes longer than the GEMM (moe_layer_4_gpus.json).
    shown_dispatch: float = 0.6
    # The same in Gluon, the part of a separate dispatch by which it and the GEMM take longer than the GEMM, and by how
    # much longer a GEMM takes that gathers rows, per column of these (moe_layer_2_gpus_fused.json,
    # moe_layer_dispatch_fused.json).
    gluon_shown_dispatch: float = 0.15
    separate_dispatch: float = 0.6
    gather_cost: float = 8.5e-6


H200 = Device()
H200_RATES = Rates(link_bytes_per_s=395e9, memory_bytes_per_s=4.53e12, product_flops_per_s=684e12)
"""What `jax-ep tune rates` finds on one (no report), and a copy to another (dispatch_combine_4_gpus.json)."""


@functools.cache
def scaled(rates: Rates | None) -> Device:
    """Scale the rates of an H200 by the measured rates of another machine."""
    if rates is None:
        return H200
    changed: dict[str, Any] = {}
    for rate, names in _FIELDS_OF_RATE.items():
        measured = getattr(rates, rate)
        factor = 1.0 if measured is None else measured / getattr(H200_RATES, rate)
        changed |= {name: factor * getattr(H200, name) for name in names}
    return dataclasses.replace(H200, **changed)


def _device() -> Device:
    """Return the rates of this machine if `jax-ep tune` has measured them, else those of an H200."""
    return scaled(tuned.rates())


_FIELDS_OF_RATE = {
    "link_bytes_per_s": ("link_bytes",),
    "product_flops_per_s": ("product_flops",),
    "memory_bytes_per_s": ("combine_bytes", "scatter_bytes", "many_scatter_bytes", "copy_bytes"),
}
_FEW_ROWS = {16: 26, 8: 48, 4: 128}  # rows per expert, by the bits of an element of the weights
_FEW_SWAPPED_ROWS = 96  # with `swap_ab`, which converts an element once for all rows of a block
_FEW_GLUON_ROWS, _FEW_SMALL_GLUON_ROWS = 24, 64  # with GEMMs in Gluon as the alternative, of large and small experts
_MANY_ROWS, _SMALL_EXPERT = 128, 1 << 21


def few_rows(bits: int, *, in_fp8: bool, swap_ab: bool) -> int:
    """Return the number of rows per expert up to which one launch is faster; see `serves_in_one_launch`."""
    found = _FEW_ROWS[16 if in_fp8 else bits]
    return max(found, _FEW_SWAPPED_ROWS) if swap_ab else found


def serves_in_one_launch(
    num_slots: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    bits: int,
    *,
    in_fp8: bool,
    swap_ab: bool,
    specialized: bool,
    in_gluon: bool = False,
) -> bool:
    """Whether one launch is expected to be fastest for the layer of one device, with gated experts of `[I, H]`.

    With few rows per expert, the time is that of reading the weights, which one launch does without pauses
    (fused_moe_decode.json). `_FEW_ROWS` holds the limits, from fused_moe_batches.json; up to 128 rows were measured
    there. With many rows, GEMMs in several launches are faster, but rows are moved between them. For small experts
    moving rows takes longer, unless a specialized kernel computes the GEMMs and activates in them, as for Qwen3-30B-A3B
    with 256 rows (fused_moe_prefill.json). GEMMs of prepacked weights in Gluon are faster with 32 rows of large experts
    (fused_moe_prefill_mixtral.json), and with 128 of small ones, but not with 32 (fused_moe_prefill_quantized.json,
    fused_moe_prefill_qwen.json).

    `num_slots` are the assignments of all tokens; `bits` those of an element of the weights, and with `in_fp8` rows are
    FP8, too. `swap_ab` converts an element once for more rows. `specialized`: the kernel of
    the first GEMM in a separate launch has a warp that only copies; `in_gluon`: kernels in Gluon run both of quantized
    weights.
    """
    rows, is_small = num_slots / num_experts, hidden * intermediate <= _SMALL_EXPERT
    of_gluon = _FEW_SMALL_GLUON_ROWS if is_small else _FEW_GLUON_ROWS
    if rows <= (of_gluon if in_gluon else few_rows(bits, in_fp8=in_fp8, swap_ab=swap_ab)):
        return True
    return rows >= _MANY_ROWS and is_small and bits == 16 and not specialized


def _ranks_of_token(layout: Layout) -> float:
    """Return the expected number of ranks with an expert of a token."""
    ranks = layout.num_ranks
    return ranks * (1 - ((ranks - 1) / ranks) ** layout.top_k)


def _product(layout: Layout, features: int, hidden: int) -> float:
    """Return the seconds per token of a GEMM."""
    return 2 * layout.top_k * features * hidden / _device().product_flops


def _sums_of_scatter(layout: Layout, hidden: int) -> float:
    """Return the seconds per token of the sums of "scatter", after all ranks have sent."""
    row = 2 * hidden
    are_many = layout.num_tokens * layout.top_k * row >= _device().many_row_bytes
    rate = _device().many_scatter_bytes if are_many else _device().scatter_bytes
    meeting = _device().meeting_seconds / layout.num_tokens if layout.num_ranks > 1 else 0.0
    return (layout.top_k + 1) * row / rate + meeting


def _gemm_alone(layout: Layout, features: int, hidden: int, specialized: bool) -> float:
    """Seconds per token of a GEMM in a separate launch."""
    time = _product(layout, features, hidden)
    if specialized:
        time /= 1 + (_device().specialized_product - 1) * min(1.0, features / _device().specialized_depth)
    return time


def _combine_alone(layout: Layout, hidden: int) -> tuple[float, float]:
    """Seconds per token of combine by itself: to send the sums, and to move what they are made of."""
    remote = (layout.num_ranks - 1) / layout.num_ranks
    sent = _ranks_of_token(layout) * remote * 2 * hidden / _device().link_bytes
    # Rows are read; sums are written, read and added up.
    moved = (layout.top_k + 2 * _ranks_of_token(layout) + 1) * 2 * hidden
    return sent, moved / _device().combine_bytes


def combine_times(layout: Layout, features: int, hidden: int, *, specialized: bool) -> dict[str, float]:
    """Seconds per token that each mode of GEMM + combine should take, the simplest mode first.

    `specialized`: `pallas`, or a kernel in Gluon, runs a GEMM in a separate launch (docs/design/fused.md).
    """
    product, (sent, made) = _product(layout, features, hidden), _combine_alone(layout, hidden)
    remote = (layout.num_ranks - 1) / layout.num_ranks
    rows_sent = layout.top_k * remote * 2 * hidden / _device().link_bytes  # each expert row of another rank separately
    return {
        "serial": _gemm_alone(layout, features, hidden, specialized) + max(sent, made),
        "scatter": max(product, rows_sent) + _sums_of_scatter(layout, hidden),
    }


def dispatch_mode(
    layout: Layout, hidden: int, columns: int, save_as: str | None, *, specialized: bool, in_gluon: bool
) -> str:
    """Choose the mode of dispatch + GEMM, `[., hidden]` times `[hidden, columns]`: "serial" unless "fused" is faster.

    The fused kernel, which runs `in_gluon` or not, does not hide all of the dispatch. Saving tokens costs a copy in
    "serial", saving rows in "fused". The model assumes even loads; uneven loads slow "fused" down by some percent more
    than "serial".
    """
    device, (sent, _) = _device(), _combine_alone(layout, hidden)
    token = 2 * 2 * hidden / device.copy_bytes  # to read and write one
    rows, tokens = layout.top_k * token, _ranks_of_token(layout) * token
    alone = _gemm_alone(layout, hidden, columns, specialized)
    if in_gluon:
        dispatch = device.separate_dispatch * (sent + rows / 3)  # rows are written partly while others arrive
        fused = (1 + device.gather_cost * hidden) * alone + device.gluon_shown_dispatch * sent
    else:
        dispatch, fused = sent, _product(layout, hidden, columns) + device.shown_dispatch * sent
    serial = alone + dispatch + device.launch_seconds / layout.num_tokens
    serial += tokens if save_as == "tokens" else 0.0
    fused += rows if save_as == "rows" else 0.0
    return "serial" if serial <= 1.03 * fused else "fused"


def combine_mode(layout: Layout, features: int, hidden: int, *, specialized: bool) -> str:
    """Choose the mode of GEMM + combine: the simplest within 1 % of the fastest."""
    times = combine_times(layout, features, hidden, specialized=specialized)
    return next(mode for mode, time in times.items() if time <= 1.01 * min(times.values()))


def fused_modes(schedule: Schedule, facts: FusedFacts, *, specialized: bool, in_gluon: bool) -> FusedModes:
    """Choose the modes of both directions; `specialized` as for `combine_times`, `in_gluon` as for `dispatch_mode`."""
    layout, dtype, hidden, columns = facts.layout, facts.dtype, facts.hidden, facts.columns
    settings = tuned.exchange_gemm_facts(layout, hidden, columns, dtype)
    chosen = tuned.schedule(schedule, "dispatch_grouped_gemm", **settings).dispatch_mode
    none, rows, tokens = (
        chosen or dispatch_mode(layout, hidden, columns, save_as, specialized=specialized, in_gluon=in_gluon)
        for save_as in (None, "rows", "tokens")
    )
    settings = tuned.exchange_gemm_facts(layout, columns, hidden, dtype)
    combine: str | None = tuned.schedule(schedule, "grouped_gemm_combine", **settings).combine_mode
    combine = combine or combine_mode(layout, columns, hidden, specialized=specialized)
    return FusedModes(none, rows, tokens, combine)
