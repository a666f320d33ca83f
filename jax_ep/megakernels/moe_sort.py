"""Sort of one device's assignments by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import SortSizes, dropless_capacity, power_of_two
from jax_ep.megakernels.kernels import moe_sort as moe_sort_kernels
from jax_ep.megakernels.kernels.fused_moe_structs import Sort
from jax_ep.megakernels.launch import all_programs, int32, launch, num_programs
from jax_ep.types import Array, SortedTokens

_SORT = Kernel(moe_sort_kernels.moe_sort)
_LANES, _MOST_COUNTED = 256, 2048
_EXPERTS_OF_PROGRAM = 4  # whose padding a program fills, if assignments need fewer programs


def moe_sort(topk_idx: Array, topk_weights: Array | None, num_tokens: Array | None, sizes: SortSizes) -> SortedTokens:
    """Sort as xla/moe_sort.py does."""
    config, constants = sort_sizes(topk_idx.shape, sizes)
    num_rows = constants.num_rows
    results = (
        *int32((num_rows,)),
        jax.ShapeDtypeStruct((1 if topk_weights is None else num_rows,), jnp.float32),
        *int32((num_rows // sizes.block_size,), (sizes.num_local_experts,), ()),
    )
    operands = topk_idx, topk_weights, num_tokens
    slots, weights, *others = launch(_SORT, operands, results, config, {"S": constants})
    return SortedTokens(slots, None if topk_weights is None else weights, *others)


def sort_sizes(shape: tuple[int, ...], wanted: SortSizes) -> tuple[Config, Sort]:
    """Return config and sizes for ids `[T, K]`: a block of assignments per program that runs at a time."""
    num_slots, num_experts = shape[0] * shape[1], wanted.num_local_experts
    block = _LANES * -(-num_slots // (_LANES * all_programs()))
    sizes = Sort(
        num_assignments=num_slots,
        top_k=shape[1],
        **wanted._asdict(),
        num_rows=dropless_capacity(num_slots, num_experts, wanted.block_size),
        per_program=block,
        lanes=_LANES,
        count_block=min(_MOST_COUNTED, max(_LANES, power_of_two(num_slots))),
        bins=max(32, power_of_two(num_experts)),
    )
    programs = max(-(-num_slots // block), num_programs(-(-num_experts // _EXPERTS_OF_PROGRAM)))
    return Config(programs, num_warps=8), sizes
