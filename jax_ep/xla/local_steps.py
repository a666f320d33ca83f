"""What one rank does with its rows before and after an exchange, as plain JAX.

`exchange.py` takes these functions as a value: an implementation with a kernel for one has XLA's collectives between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.core.layout import gather_rows
from jax_ep.types import Array, Quantized


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """Functions of one rank.

    Attributes:
      permute: `(x [T, ...], index [R])` to `x[index]`, zeros for -1, bit for bit and of any dtype.
      unpermute: `(y [R, H], index [N, K], dtype)` to sums over k of `y[index[:, k]]`, nothing for -1: added in this
        order in float32, and rounded once. With FP8 as dtype to values `[N, H]` and their scales `[N, H / 128]`.
    """

    permute: Callable[[Array, Array], Array]
    unpermute: Callable[[Array, Array, DTypeLike], Array | Quantized]


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Array | Quantized:
    """See `LocalSteps`."""
    wide = accumulation_dtype(y.dtype)
    total = gather_rows(y, index[:, 0]).astype(wide)
    for k in range(1, index.shape[1]):
        total = total + gather_rows(y, index[:, k]).astype(wide)
    return fp8.quantize_rows(total) if dtype == FP8 else total.astype(dtype)


PORTABLE = LocalSteps(gather_rows, unpermute)
