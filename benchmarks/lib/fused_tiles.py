"""Ways to cut the expert layer in one launch into tasks, to find out which is fastest."""

from __future__ import annotations

from jax import Array

from jax_ep import Experts
from jax_ep.megakernels.fused_moe import FusedTiles, Matrices, fused_moe

CANDIDATES = [
    FusedTiles(),
    FusedTiles(splits=2),
    FusedTiles(splits=4),
    FusedTiles(hidden_columns=32, splits=2),
    FusedTiles(hidden_columns=16, splits=4),
    FusedTiles(hidden_columns=32, columns=32),
    FusedTiles(num_stages=4),
    FusedTiles(programs=3),
    FusedTiles(programs=3, hidden_columns=32, splits=2),
    FusedTiles(programs=4),
    FusedTiles(columns=128),
    FusedTiles(hidden_columns=128, columns=128),
    FusedTiles(hidden_columns=128, columns=128, num_warps=8, programs=1),
    FusedTiles(block_m=32),
]


def label(tiles: FusedTiles) -> str:
    """What differs between candidates."""
    cut_as = f"{tiles.block_m}x{tiles.hidden_columns}x{tiles.columns}/{tiles.splits}"
    return f"{cut_as}, {tiles.programs}x{tiles.num_warps} warps, {tiles.num_stages} stages"


def cut(
    tiles: FusedTiles, x: Array, topk_idx: Array, topk_weights: Array, w_gate_up: Matrices, w_down: Matrices
) -> Array:
    """The layer in one launch, in these tiles."""
    options = {"out_dtype": x.dtype, "tiles": tiles}
    return fused_moe(Experts(), x, topk_idx, topk_weights, w_gate_up, w_down, (None, None), **options)
