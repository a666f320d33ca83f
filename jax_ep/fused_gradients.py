"""The keyword `fuse_weight_gradients`: what it may be, and where it cannot be True."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import backends
from jax_ep.types import Array, Layout


def checked(function: str, value: bool | None) -> bool | None:
    """True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(
            f"{function}: fuse_weight_gradients={value!r} is a {type(value).__name__}, expected True, False, or None"
            " for what should be faster."
        )
    return value


def check_served(
    function: str, implementation: str, layout: Layout, w: Array, mode: str | None, wire_dtype: DTypeLike | None
) -> None:
    """Raises ValueError where the backward pass of dispatch + GEMM with `w [L, H, N]` cannot be one launch."""
    hidden, columns = w.shape[1:]
    if mode not in (None, "scatter"):
        reason = f"combine_mode={mode!r} sends other rows than that launch"
        remedy = "pass combine_mode='scatter' or None"
    elif wire_dtype is not None:
        reason = f"with wire_dtype={jnp.dtype(wire_dtype).name} exchanges and products have launches of their own"
        remedy = "pass wire_dtype=None"
    elif not _has_launch(implementation, layout, w, mode):
        reason = f"{implementation!r} has no such launch for tokens of {w.dtype} and matrices of [{hidden}, {columns}]"
        remedy = "'triton' has it on GPUs with TMA, for bfloat16 and float16 and sizes that are multiples of 8"
    else:
        return
    raise ValueError(
        f"{function}: fuse_weight_gradients=True, but {reason}; {remedy}, or leave fuse_weight_gradients=None."
    )


def _has_launch(implementation: str, layout: Layout, w: Array, mode: str | None) -> bool:
    run = backends.get(implementation)
    hidden, columns = w.shape[1:]
    if not run.fuses(layout, w.dtype, hidden, columns):
        return False  # and then it may lack the next function
    return run.fuses_products(layout, w.dtype, columns, hidden, mode=mode, wanted=True)
