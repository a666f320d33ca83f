"""What one launch for an exchange and a product would take in FP8, by the model of times; needs no GPU.

    python benchmarks/fused_fp8.py

Prints nanoseconds per token of both exchanges with their products in a layer with `recipe="fp8"` and experts that are
chosen evenly: of the forward pass, which is the table of docs/design/rejected.md, and of the backward pass. There is no
such launch: this is an estimate, out of what fused launches in bfloat16, and separate products in FP8, have been
measured to do.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

from jax_ep.megakernels.cost_model import H200
from lib import harness, tables
from lib.inputs import MODELS, Model

TOKENS = 4096
RANKS = (2, 4, 8, 16)
SHOWN = ("deepseek-v3", "qwen3-235b", "mixtral-8x7b", "qwen3-30b")
COLUMNS = (
    "4096 tokens per rank",
    "ranks",
    "dispatch, then GEMM",
    "in one launch",
    "GEMM, then combine",
    "one launch, rows in FP8",
    "in bfloat16",
    "won of the layer",
)
_REPORT, _ROUTING = "grouped_gemm_gpu_fp8", "multinomial"
_KERNELS = ("triton, FP8", "pallas, FP8")
_GROUP = 128  # columns that share a float32 scale


class Estimate(NamedTuple):
    """Seconds per token.

    Attributes:
      dispatch: dispatch and the product behind it, in two launches.
      dispatch_fused: the same in one.
      combine: the product before combine, and combine, in two launches.
      scatter_fp8: in one, which sends a row for each expert, rounded to FP8 one by one.
      scatter_bf16: the same without that rounding.
      activation: between the products, which no launch hides.
    """

    dispatch: float
    dispatch_fused: float
    combine: float
    scatter_fp8: float
    scatter_bf16: float
    activation: float

    @property
    def won(self) -> float:
        """Part of the layer that the better ways would save."""
        layer = self.dispatch + self.activation + self.combine
        best = min(self.dispatch, self.dispatch_fused) + min(self.combine, self.scatter_fp8, self.scatter_bf16)
        return 1 - (best + self.activation) / layer


@functools.cache
def product_flops(depth: int) -> tuple[float, float]:
    """Operations per second of the kernel that a fused launch would hold, and of the fastest one by itself.

    Of the greatest depth that has been measured and is no greater, else of the least one.
    """
    rows = json.loads((harness.RESULTS / f"{_REPORT}.json").read_text())["rows"]
    of = {
        (row["shape"]["k"], row["variant"]): row["tflops"] * 1e12
        for row in rows
        if row["distribution"] == _ROUTING and row["variant"] in _KERNELS
    }
    depths = sorted({k for k, _ in of})
    measured = max((k for k in depths if k <= depth), default=depths[0])
    fused, alone = (of[measured, kernel] for kernel in _KERNELS)
    return fused, alone


def estimate(model: Model, ranks: int, *, backward: bool = False) -> Estimate:
    """Of a layer's forward pass, or its backward pass; there dispatch leaves rows in order, for weight gradients."""
    hidden, inner, top_k = model.hidden, model.intermediate, model.top_k
    remote, copies = (ranks - 1) / ranks, ranks * (1 - ((ranks - 1) / ranks) ** top_k)
    wide, row = 2 * hidden, hidden * (1 + 4 / _GROUP)  # bytes in bfloat16, and in FP8 with scales

    def products(depth: int, columns: int) -> tuple[float, float]:
        fused, alone = (2 * top_k * depth * columns / rate for rate in product_flops(depth))
        return fused, alone

    def scatter(row: float) -> float:
        travels, meets = top_k * remote * row / H200.link_bytes, H200.meeting_seconds / TOKENS
        return max(second, travels) + (top_k * row + wide) / H200.scatter_bytes + meets

    widths = (inner, 2 * inner) if backward else (2 * inner, inner)
    (first, first_alone), (second, second_alone) = products(hidden, widths[0]), products(widths[1], hidden)
    in_order = 2 * top_k * row / H200.copy_bytes if backward else 0.0
    sent = copies * remote * row / H200.link_bytes
    made = (top_k * wide + 2 * copies * row + wide) / H200.combine_bytes
    return Estimate(
        dispatch=first_alone + sent + H200.launch_seconds / TOKENS,
        dispatch_fused=first + H200.shown_dispatch * sent + in_order,
        combine=second_alone + max(sent, made),
        scatter_fp8=scatter(row),
        scatter_bf16=scatter(wide),
        activation=top_k * 5 * inner / H200.copy_bytes,  # gates and others in bfloat16, and what becomes of them in FP8
    )


def table(*, backward: bool = False) -> list[str]:
    """Markdown; of the backward pass without what would be won, of which weight gradients are a part."""
    lines = []
    for name in SHOWN:
        for ranks in RANKS:
            if MODELS[name].experts % ranks:
                continue
            found = estimate(MODELS[name], ranks, backward=backward)
            halves = (found[:2], found[2:5])
            cells = [
                f"**{1e9 * time:.0f}**" if time == min(half) else f"{1e9 * time:.0f}"
                for half in halves
                for time in half
            ]
            won = [] if backward else [f"{abs(100 * found.won):.1f} %"]
            lines.append([tables.MODELS[name] if ranks == RANKS[0] else "", str(ranks), *cells, *won])
    return tables.table(COLUMNS[:-1] if backward else COLUMNS, lines)


if __name__ == "__main__":
    print("\n".join([*table(), "", *table(backward=True)]))
