"""Exchange of 32-bit words between ranks: ids and router weights."""

from __future__ import annotations

import jax

from jax_ep import context, ffi
from jax_ep.core.kernel import Kernel
from jax_ep.megakernels import tuning
from jax_ep.megakernels.heap_launch import launch_on_heap
from jax_ep.types import Array

_WORDS = Kernel("words", "exchange_words")


def exchange_words(
    x: Array,
    group: Array,
    num_ranks: int,
    *,
    different: bool,
    after: Array | None,
    operation: ffi.Operation = ffi.Operation.DISPATCH,
) -> Array:
    """`[N]` 32-bit words to all ranks, or `[W, N]` one row to each; `[W, N]` by source rank.

    A failure says that it was in `operation`.
    """
    num_words = x.shape[-1]
    config, block = tuning.words(num_ranks, num_words)
    context.reserve("dispatch", num_ranks * num_words * 4)
    constants = {"N": num_words, "DIFFERENT": different, "BLOCK": block, "OPERATION": int(operation)}
    result = jax.ShapeDtypeStruct((num_ranks, num_words), x.dtype)
    return launch_on_heap(_WORDS, (x,), group, (result,), config, {"W": num_ranks, **constants}, after)[0]
