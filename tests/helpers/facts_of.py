"""Facts of parts of calls, for tests of the choice of implementation."""

import jax.numpy as jnp

from jax_ep.core.facts import ExchangeFacts, FusedFacts, GemmFacts
from jax_ep.ops import plan, registry
from jax_ep.types import Layout, Options

LAYOUT = Layout(2, 8, 256, 2, 1024)


def gemm(dtype, num_rows=64, depth=256, columns=256, groups=8, out_dtype=None):
    """Return the facts of a grouped GEMM; its result has the operands' dtype, or bfloat16 for FP8."""
    dtype = jnp.dtype(dtype)
    out_dtype = out_dtype or (jnp.bfloat16 if dtype.itemsize == 1 else dtype)
    return GemmFacts(dtype, num_rows, depth, columns, groups, jnp.dtype(out_dtype))


def exchange(dtype, hidden=256, *, is_foreign=False, columns=None):
    """Return the facts of a dispatch or combine over `LAYOUT`."""
    return ExchangeFacts(jnp.dtype(dtype), hidden, LAYOUT, is_foreign, columns)


def exchange_gemm(options, layout, dtype, hidden, columns):
    """Return the plan of dispatch or combine with GEMMs."""
    facts = ExchangeFacts(jnp.dtype(dtype), hidden, layout, columns=columns)
    return plan.exchange_gemm(options, facts, out_columns=columns)


def fuses(implementation, layout, dtype, hidden, columns):
    """Return whether the implementation fuses communication and GEMM."""
    facts = FusedFacts(jnp.dtype(dtype), hidden, columns, layout)
    return registry.unsupported_reason(implementation, facts, Options("test", (), (implementation,))) is None
