"""What the `xla` implementation refuses: nothing but launches that it does not have."""

from __future__ import annotations

from typing import Any

from jax.typing import DTypeLike

from jax_ep.types import Options


def refusal(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see ops/registry.py."""
    columns = facts[3] if operation == "exchange" else None
    modes = options.schedule.dispatch_mode, options.schedule.combine_mode
    fused = [mode for mode in modes if mode not in (None, "serial")]
    if columns is None or not fused:
        return None
    return f"it fuses nothing, so that mode={fused[0]!r} does not exist there; 'serial' does"


def is_fastest(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> bool:
    """Never before others that can serve the request."""
    return False


def is_made_for(dtype: DTypeLike) -> bool:
    """All dtypes of the package."""
    return True
