"""Launch of the sort of one device's slots by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.core.kernel import Config, Constants, Kernel
from jax_ep.core.layout import dropless_capacity, power_of_two
from jax_ep.megakernels.grid import all_programs, num_programs
from jax_ep.megakernels.kernels import moe_sort as moe_sort_kernels
from jax_ep.megakernels.kernels.fused_moe_structs import Sort
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array, SortedTokens

_SORT = Kernel(moe_sort_kernels.moe_sort)
_LANES, _MOST_COUNTED = 256, 2048
_EXPERTS_OF_PROGRAM = 4  # whose empty rows it fills, where slots need fewer programs


def moe_sort(
    topk_idx: Array,
    topk_weights: Array | None,
    num_tokens: Array | None,
    *,
    first_expert: int,
    num_local_experts: int,
    block_size: int,
) -> SortedTokens:
    """See xla/moe_sort.py."""
    config, sizes = sort_sizes(topk_idx.shape, first_expert, num_local_experts, block_size)
    given = {"weights_ptr": topk_weights, "num_tokens_ptr": num_tokens}
    operands = (topk_idx, *(value for value in given.values() if value is not None))
    constants: Constants = {name: None for name, value in given.items() if value is None} | {"S": sizes}
    results = (
        jax.ShapeDtypeStruct((sizes.num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((1 if topk_weights is None else sizes.num_rows,), jnp.float32),
        jax.ShapeDtypeStruct((sizes.num_rows // block_size,), jnp.int32),
        jax.ShapeDtypeStruct((num_local_experts,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    slots, weights, block_expert, group_sizes, num_rows = launch(_SORT, operands, results, config, constants)
    return SortedTokens(slots, None if topk_weights is None else weights, block_expert, group_sizes, num_rows)


def sort_sizes(shape: tuple[int, ...], first_expert: int, num_experts: int, block_size: int) -> tuple[Config, Sort]:
    """Config and sizes for ids `[T, K]`: a block of slots for each program, of as many as run at a time."""
    num_slots = shape[0] * shape[1]
    block = _LANES * -(-num_slots // (_LANES * all_programs()))
    sizes = Sort(
        num_assignments=num_slots,
        top_k=shape[1],
        first_expert=first_expert,
        num_local_experts=num_experts,
        num_rows=dropless_capacity(num_slots, num_experts, block_size),
        block_size=block_size,
        per_program=block,
        lanes=_LANES,
        count_block=min(_MOST_COUNTED, max(_LANES, power_of_two(num_slots))),
        bins=max(32, power_of_two(num_experts)),
    )
    programs = max(-(-num_slots // block), num_programs(-(-num_experts // _EXPERTS_OF_PROGRAM)))
    return Config(programs, num_warps=8), sizes
