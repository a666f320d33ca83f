"""Launch of the whole expert layer of few tokens on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.kernel import Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.capability import has_tma
from jax_ep.megakernels.grid import all_programs
from jax_ep.megakernels.kernels.structs_serving import FusedMoE, FusedTile, LayerTensors
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array, Experts

_FUSED = Kernel("fused_moe", "fused_moe")
MOST_SLOTS = 1 << 10
"""Every program looks at all slots for each of its tasks."""
_PROGRAMS = 2  # of a multiprocessor
_BLOCK_ROWS = 16  # the fewest that tensor cores multiply without turning the product


def fuses(experts: Experts, num_slots: int, dtype: DTypeLike, hidden: int, intermediate: int) -> bool:
    """Whether the layer of so many slots is one launch."""
    whole_words = hidden % 8 == 0 and intermediate % 8 == 0
    few = 0 < num_slots <= MOST_SLOTS
    return (
        few and dtype in (jnp.bfloat16, jnp.float16) and whole_words and not callable(experts.activation) and has_tma()
    )


def fused_moe(
    experts: Experts,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    biases: tuple[Array | None, Array | None],
    *,
    out_dtype: DTypeLike,
) -> Array:
    """The expert layer of one device: `jax_ep.moe` without a mesh axis, of checked arguments.

    Args:
      experts: what they compute.
      x: `[T, H]`.
      topk_idx: `[T, K]`; what is no expert has no row.
      topk_weights: `[T, K]` float32.
      w_gate_up: `[E, H, 2 * I]`, or `[E, H, I]` without gates.
      w_down: `[E, I, H]`.
      biases: of both products, `[E, 2 * I]` or `[E, I]`, and `[E, H]`; or None.
      out_dtype: of the result.

    Returns:
      `[T, H]`.
    """
    everything = vary_alike((x, topk_idx, topk_weights, w_gate_up, w_down, biases))
    x, topk_idx, topk_weights, w_gate_up, w_down, biases = everything
    config, sizes = fused_sizes(experts, x.shape, topk_idx.shape[1], w_down.shape)
    tile, wide = sizes.tile, 2 if experts.interleaved else 1
    tensors = LayerTensors(
        x,
        Descriptor(w_gate_up, (1, tile.BK, wide * tile.BN)),
        Descriptor(w_down, (1, tile.BK, tile.BN2)),
        topk_idx,
        topk_weights,
    )
    named = dict(zip(("gate_up_bias_ptr", "down_bias_ptr"), biases, strict=True))
    counters = jnp.zeros((num_counters(sizes),), jnp.int32)
    operands = (tensors, *(bias for bias in biases if bias is not None), counters)
    constants: dict[str, Any] = {name: None for name, bias in named.items() if bias is None}
    constants |= {"KIND": kind_of(experts), "S": sizes}
    slots = sizes.T * sizes.K
    results = (
        jax.ShapeDtypeStruct((slots, sizes.INNER), x.dtype),
        jax.ShapeDtypeStruct((slots, sizes.H), jnp.float32),
        jax.ShapeDtypeStruct(x.shape, out_dtype),
        jax.ShapeDtypeStruct(counters.shape, counters.dtype),
    )
    written = {len(tensors) + len(operands) - 2: len(results) - 1}
    return launch(_FUSED, operands, results, config, constants, written=written)[2]


def num_counters(sizes: FusedMoE) -> int:
    """The queue, and counts of tiles and of blocks."""
    return 1 + sizes.MOST_BLOCKS + -(-sizes.H // sizes.tile.BN2)


def fused_sizes(
    experts: Experts, shape: tuple[int, ...], top_k: int, w_down: tuple[int, ...]
) -> tuple[Config, FusedMoE]:
    """Config and sizes for tokens `[T, H]` and matrices `[E, I, H]`.

    Tiles are as wide as leaves most programs one: few slots have as many blocks.
    """
    (num_tokens, hidden), (num_experts, intermediate, _) = shape, w_down
    slots, programs = num_tokens * top_k, all_programs(_PROGRAMS)
    blocks = min(slots, num_experts + slots // _BLOCK_ROWS)
    likely = min(slots, num_experts)
    sizes = FusedMoE(
        T=num_tokens,
        K=top_k,
        H=hidden,
        INNER=intermediate,
        E=num_experts,
        SLOTS=max(16, power_of_two(slots)),
        BINS=max(32, power_of_two(num_experts)),
        MOST_BLOCKS=blocks,
        tile=FusedTile(
            BM=_BLOCK_ROWS,
            BN=_columns(intermediate, likely, programs),
            BN2=_columns(hidden, likely, programs),
            BK=128,
            BT=min(16, power_of_two(num_tokens)),
        ),
    )
    return Config(programs, num_warps=4, num_stages=3), sizes


def _columns(columns: int, blocks: int, programs: int) -> int:
    """Columns of a tile: 64, or fewer where so many blocks would leave programs without one."""
    width = 64
    while width > 16 and blocks * -(-columns // width) < programs:
        width //= 2
    return width
