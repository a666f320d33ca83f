"""Keywords of operations in one launch: what they may be, and where there is no such launch."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import backends
from jax_ep.types import Array, Layout


def fuse_weight_gradients(function: str, value: bool | None) -> bool | None:
    """True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(
            f"{function}: fuse_weight_gradients={value!r} is a {type(value).__name__}, expected True, False, or None"
            " for what should be faster."
        )
    return value


def num_communicating_programs(function: str, value: int | None) -> int | None:
    """A positive number or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{function}: num_communicating_programs={value!r} is a {type(value).__name__}, expected an int, or None"
            " for the default."
        )
    if value < 1:
        raise ValueError(
            f"{function}: num_communicating_programs must be at least 1, got {value}; None takes the default."
        )
    return value


def no_launch_for(function: str, num_communicating_programs: int, implementation: str, x: Array) -> ValueError:
    """The error of a call whose dispatch and product have launches of their own."""
    return ValueError(
        f"{function}: num_communicating_programs={num_communicating_programs}, but {implementation!r} has no single"
        f" launch for dispatch and product of these tokens of {x.dtype}; 'triton' has it on GPUs with TMA, for bfloat16"
        " and float16, without wire_dtype, and sizes that are multiples of 8. Or leave num_communicating_programs=None."
    )


def check_none(function: str, forward_dtype: DTypeLike | None, **options: int | None) -> None:
    """Raises ValueError where the layer with FP8 products is asked for what its launches do not have."""
    for name, value in options.items():
        if value:
            raise ValueError(
                f"{function}: {name}={value} and forward_dtype={forward_dtype!r}: the layer with FP8 products keeps its"
                " tokens in another form, by other launches; leave one of them None."
            )


def check_gradients(
    function: str, implementation: str, layout: Layout, w: Array, mode: str | None, wire_dtype: DTypeLike | None
) -> None:
    """Raises ValueError where the backward pass of dispatch + GEMM with `w [L, H, N]` cannot be one launch."""
    hidden, columns = w.shape[1:]
    if wire_dtype is not None:
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
