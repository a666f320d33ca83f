"""Low-latency dispatch and combine in two launches each: rows of some tokens are computed before others are awaited.

What starts an exchange does not wait; what finishes it finds that most has arrived. Not every implementation has these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.ops import registry
from jax_ep.types import Array, Layout, Options

Compute = Callable[[int, Array, Array | None, Array], Array]
"""Tokens per rank, their rows `[L, W * M, H]` with scales or None, and how many each expert has, to as many rows."""


def implementation(options: Options, dtypes: tuple[DTypeLike, DTypeLike], hidden: int, layout: Layout) -> Any:
    """The functions for rows `[., hidden]` that travel to experts and back in two dtypes; None: there are none."""
    names = {registry.choose(options, "low_latency", dtype, hidden, layout, False) for dtype in dtypes}
    if not names <= set(registry.available("low_latency_parts")):
        return None
    context.compare(options.function, f"{layout}, halves of tokens {dtypes[0]}[{layout.num_tokens}, {hidden}]")
    return registry.get("low_latency_parts", names.pop())


def compute_in_halves(
    run: Any,
    options: Options,
    layout: Layout,
    group_size: int | None,
    compute: Compute,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    num_tokens: Array | None,
) -> Array:
    """`[T, H]` weighted sums of what `compute` makes of the first half of the tokens, and of the second.

    Each launch takes something that the one before it has made: that, and nothing else, is their order.
    """
    first = -(-x.shape[0] // 2)
    halves = slice(0, first), slice(first, x.shape[0])
    sent: list[Any] = []
    for half in halves:
        after = sent[-1] if sent else None
        sent.append(run.start_dispatch(options, x, topk_idx, num_tokens, layout, group_size, half, after))
    last: Any = sent[-1]
    back: list[Any] = []
    for half, dispatching in zip(halves, sent, strict=True):
        tokens, scales, sizes, handle = run.finish_dispatch(dispatching, last)
        num_here = half.stop - half.start
        y = compute(num_here, tokens, scales, sizes)
        last = run.start_combine(options, y, num_here, handle, back[-1] if back else None)
        back.append(last)
    out: Array = run.finish_combine(options, *back, first, topk_weights, handle, y)
    return out
