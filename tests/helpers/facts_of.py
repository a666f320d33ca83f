"""Facts of parts of calls, for tests of the choice of implementation."""

from typing import Any

import jax.numpy as jnp

from jax_ep.core.facts import ExchangeFacts, FusedFacts, GemmFacts
from jax_ep.ops import plan, registry
from jax_ep.types import Layout, Options

LAYOUT = Layout(2, 8, 256, 2, 1024)


def gemm(
    dtype: Any, num_rows: int = 64, depth: int = 256, columns: int = 256, groups: int = 8, out_dtype: Any = None
) -> GemmFacts:
    """Return the facts of a grouped GEMM; its result has the operands' dtype, or bfloat16 for FP8."""
    dtype = jnp.dtype(dtype)
    out_dtype = out_dtype or (jnp.bfloat16 if dtype.itemsize == 1 else dtype)
    return GemmFacts(dtype, num_rows, depth, columns, groups, jnp.dtype(out_dtype))


def exchange(dtype: Any, hidden: int = 256, *, is_foreign: bool = False, columns: int | None = None) -> ExchangeFacts:
    """Return the facts of a dispatch or combine over `LAYOUT`."""
    return ExchangeFacts(jnp.dtype(dtype), hidden, LAYOUT, is_foreign, columns)


def exchange_gemm(options: Options, layout: Layout, dtype: Any, hidden: int, columns: int) -> plan.ExchangeGemmPlan:
    """Return the plan of dispatch or combine with GEMMs."""
    facts = ExchangeFacts(jnp.dtype(dtype), hidden, layout, columns=columns)
    return plan.exchange_gemm(options, facts, out_columns=columns)


def fuses(implementation: str, layout: Layout, dtype: Any, hidden: int, columns: int) -> bool:
    """Return whether the implementation fuses communication and GEMM."""
    facts = FusedFacts(jnp.dtype(dtype), hidden, columns, layout)
    return registry.unsupported_reason(implementation, facts, Options("test", (), (implementation,))) is None
