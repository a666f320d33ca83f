"""The local sum of rows in combine, in plain JAX.

`exchange.py` takes this function as a parameter, so that an implementation can use its own kernel between XLA's
collectives.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.core.layout import gather_rows
from jax_ep.types import Array, Quantized

type Unpermute = Callable[[Array, Array, DTypeLike], Array | Quantized]


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Array | Quantized:
    """Sum `y[index[:, k]]` over k, for `y [R, H]` and `index [N, K]`; -1 adds nothing.

    Rows are added in this order in float32, and rounded once. With FP8 as dtype, return values `[N, H]` and their
    scales
    `[N, H / 128]`.
    """
    wide = accumulation_dtype(y.dtype)
    total = gather_rows(y, index[:, 0]).astype(wide)
    for k in range(1, index.shape[1]):
        total = total + gather_rows(y, index[:, k]).astype(wide)
    return fp8.quantize_rows(total) if dtype == FP8 else total.astype(dtype)
