"""Dtypes that the package supports: token dtypes, accumulation dtypes and the FP8 wire dtype; products in these."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import dot_general_p
from jax.typing import DTypeLike

from jax_ep.core.mesh_axes import vary_alike
from jax_ep.types import Array

TOKEN_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
FP8 = jnp.dtype(jnp.float8_e4m3fn)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which sums of `dtype` accumulate: float64 for float64 with `jax_enable_x64`, else float32."""
    return jnp.dtype(jnp.float64 if jax.dtypes.canonicalize_dtype(dtype) == jnp.float64 else jnp.float32)


def contract(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of `a` and `b`, at full precision for float32 and float64, accumulating in float32 or more.

    It binds JAX's primitive: qwix replaces `lax.dot_general`, and would quantize routers and experts, which must stay
    as they are.
    """
    a, b = vary_alike((a, b))
    precision = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else lax.Precision.DEFAULT
    return dot_general_p.bind(
        a,
        b,
        dimension_numbers=(((axes[0],), (axes[1],)), ((), ())),
        precision=(precision, precision),
        preferred_element_type=accumulation_dtype(a.dtype),
        out_sharding=None,
    )
