"""Dtypes that the package supports: token dtypes, accumulation dtypes and the FP8 wire dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

TOKEN_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
FP8 = jnp.dtype(jnp.float8_e4m3fn)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which sums of `dtype` accumulate: float64 for float64 with `jax_enable_x64`, else float32."""
    return jnp.dtype(jnp.float64 if jax.dtypes.canonicalize_dtype(dtype) == jnp.float64 else jnp.float32)
