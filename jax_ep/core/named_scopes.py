"""The names under which profiles and lowered programs show the package's operations."""

from __future__ import annotations

from collections.abc import Callable

import jax


def operation[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Everything that `function` traces, what JAX derives from it included, has `jax_ep.<function>` in its name."""
    return jax.named_scope(f"jax_ep.{function.__name__}")(function)
