"""Registration of linear functions that are each other's backward pass."""

from __future__ import annotations

from typing import Any

from jax_ep.types import Array, Options


def transposes(function: Any, transpose: Any) -> None:
    """Define `transpose` as the backward pass of the custom VJP `function(options, rows, handle)`."""

    def forward(options: Options, rows: Array, handle: Any) -> tuple[Array, Any]:
        return function(options, rows, handle), (rows[:0], handle)

    def backward(options: Options, residuals: Any, cotangent: Array) -> tuple[Array, None]:
        like, handle = residuals
        return transpose(options.transposed, cotangent.astype(like.dtype), handle), None

    function.defvjp(forward, backward)
