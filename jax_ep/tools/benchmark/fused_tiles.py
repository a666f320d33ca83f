"""Ways to cut the expert layer in one launch into tasks, to find out which is fastest."""

from __future__ import annotations

from jax import Array

from jax_ep import Experts
from jax_ep.megakernels.fused_moe import FusedTiles, Matrices, fused_moe

_FEW_ROWS = [
    FusedTiles(),
    FusedTiles(splits=2),
    FusedTiles(splits=4),
    FusedTiles(columns=128, programs=3),
    FusedTiles(columns=256, programs=3),
    FusedTiles(hidden_columns=128, columns=128, programs=3),
    FusedTiles(hidden_columns=128, columns=128, num_warps=8),
    FusedTiles(hidden_columns=128, columns=256, num_warps=8),
    FusedTiles(hidden_columns=128, columns=128, num_warps=8, programs=3),
    FusedTiles(columns=128, depth=256, num_stages=2, programs=3),
    FusedTiles(block_m=32, columns=128, programs=3),
    FusedTiles(block_m=64),
    FusedTiles(num_stages=4),
    FusedTiles(columns=128, splits=2, programs=3),
    FusedTiles(hidden_columns=128, columns=128, splits=2, programs=3),
    FusedTiles(hidden_columns=128, columns=256, programs=3),
    FusedTiles(block_m=32, hidden_columns=128, columns=128),
    FusedTiles(block_m=32, hidden_columns=128, columns=128, splits=2),
    FusedTiles(block_m=32, splits=2, programs=3),
    FusedTiles(hidden_columns=32, splits=2, num_stages=4),
    FusedTiles(splits=8, num_stages=4),
    FusedTiles(splits=2, programs=4),
    FusedTiles(columns=128, programs=4),
    FusedTiles(columns=128, splits=2, programs=4),
    FusedTiles(columns=128, splits=8, programs=4),
]
_TURNED = [
    FusedTiles(32, 64, 128, programs=3),
    FusedTiles(32, 64, 128, splits=2, programs=3),
    FusedTiles(32, 128, 128, splits=2, programs=2),
    FusedTiles(64, 64, 128, programs=2),
    FusedTiles(64, 64, 128, splits=2, programs=2),
]
_FEW_ROWS_IN_FP8 = [
    FusedTiles(16, 128, 128, num_stages=3, programs=3),
    FusedTiles(16, 128, 128, num_stages=2, programs=3),
    FusedTiles(16, 128, 128, num_stages=4, programs=2),
    FusedTiles(16, 128, 64, num_stages=4, programs=3),
    FusedTiles(16, 128, 64, splits=2, num_stages=4, programs=3),
    FusedTiles(16, 128, 128, num_warps=8, num_stages=3, programs=2),
    FusedTiles(32, 128, 128, num_stages=3, programs=2),
]
_FEW_ROWS_PREPACKED = [
    FusedTiles(16, 64, 128, programs=4),
    FusedTiles(16, 64, 128, splits=2, programs=4),
    FusedTiles(16, 64, 128, splits=4, programs=4),
    FusedTiles(16, 64, 128, splits=8, programs=4),
    FusedTiles(16, 64, 128, num_stages=4, programs=4),
    FusedTiles(16, 64, 128, splits=4, num_stages=4, programs=4),
    FusedTiles(16, 64, 128, programs=5),
    FusedTiles(16, 64, 128, splits=4, programs=5),
    FusedTiles(16, 64, 64, splits=4, programs=5),
    FusedTiles(16, 64, 128, splits=4, depth=256, programs=3),
    FusedTiles(16, 32, 64, splits=4, depth=256, programs=5),
    FusedTiles(16, 64, 128, num_warps=2, programs=4),
    FusedTiles(16, 64, 128, splits=2, num_warps=2, programs=4),
    FusedTiles(16, 64, 128, splits=4, num_warps=2, programs=4),
    FusedTiles(16, 64, 128, splits=4, num_warps=2, programs=5),
    FusedTiles(16, 64, 128, splits=4, num_warps=2, num_stages=4, programs=5),
    FusedTiles(16, 64, 128, splits=4, num_warps=2, programs=6),
    FusedTiles(16, 64, 128, splits=8, num_warps=2, programs=6),
    FusedTiles(16, 32, 64, splits=4, num_warps=2, programs=8),
    FusedTiles(32, 64, 128, splits=4, programs=3),
    FusedTiles(32, 64, 128, splits=4, programs=4),
    FusedTiles(32, 64, 128, splits=4, num_warps=2, programs=4),
    FusedTiles(64, 64, 128, programs=2),
    FusedTiles(64, 128, 128, num_warps=8, programs=1),
]
_MANY_ROWS = [
    FusedTiles(128, 128, 128, depth=64, num_warps=8, num_stages=4, programs=1),
    FusedTiles(128, 128, 128, depth=128, num_warps=8, num_stages=2, programs=1),
    FusedTiles(128, 128, 256, depth=64, num_warps=8, num_stages=4, programs=1),
    FusedTiles(128, 64, 128, depth=64, num_warps=8, num_stages=3, programs=2),
    FusedTiles(128, 64, 128, depth=128, num_warps=8, num_stages=3, programs=1),
    FusedTiles(128, 64, 128, depth=64, num_warps=4, num_stages=3, programs=2),
    FusedTiles(64, 64, 128, depth=64, num_warps=4, num_stages=4, programs=2),
    FusedTiles(64, 64, 128, depth=128, num_warps=4, num_stages=2, programs=2),
    FusedTiles(64, 64, 128, depth=128, num_warps=8, num_stages=3, programs=1),
    FusedTiles(64, 64, 64, splits=2, depth=128, num_warps=4, num_stages=3, programs=2),
    FusedTiles(32, 128, 128, splits=2, depth=128, num_warps=4, num_stages=3, programs=2),
]


def candidates(slots: int, num_experts: int, expert_format: str) -> list[FusedTiles]:
    """Those that may be fastest for so many slots, and that there are with matrices of a format."""
    in_fp8 = expert_format.endswith("_tokens")  # whose groups of 128 columns are of one task
    if expert_format.endswith("_prepacked") and slots <= 128 * num_experts:
        return _FEW_ROWS_PREPACKED
    found = _MANY_ROWS if slots > 32 * num_experts else _FEW_ROWS_IN_FP8 if in_fp8 else _FEW_ROWS
    if expert_format == "bfloat16":
        return found
    if expert_format in ("fp8", "fp8_channel") and slots <= 128 * num_experts:  # products of higher blocks are turned
        found = [tiles for tiles in found if tiles.block_m == 16] + _TURNED
    found = [tiles for tiles in found if tiles.depth == 128]  # whole groups that share a scale
    if in_fp8:
        return [tiles for tiles in found if tiles.hidden_columns % 128 == 0]
    widest = 128 if expert_format == "fp8" else 256  # of which a block of 128 by 128 has one
    return [tiles for tiles in found if max(tiles.hidden_columns, tiles.columns) <= widest]


def label(tiles: FusedTiles) -> str:
    """What differs between candidates."""
    cut_as = f"{tiles.block_m}x{tiles.hidden_columns}x{tiles.columns}x{tiles.depth}/{tiles.splits}"
    return f"{cut_as}, {tiles.programs}x{tiles.num_warps} warps, {tiles.num_stages} stages"


def cut(
    tiles: FusedTiles, x: Array, topk_idx: Array, topk_weights: Array, w_gate_up: Matrices, w_down: Matrices
) -> Array:
    """The layer in one launch, in these tiles."""
    options = {"out_dtype": x.dtype, "tiles": tiles}
    return fused_moe(Experts(), x, topk_idx, topk_weights, w_gate_up, w_down, (None, None), **options)
