"""The number formats of the package: what tokens may be, what sums run in, what may travel."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

TOKEN_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
FP8 = jnp.dtype(jnp.float8_e4m3fn)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Sums of `dtype` run in float32, those of float64 in float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
