"""What the `xla` implementation does not support: only modes that share a launch."""

from __future__ import annotations

from jax_ep.core.facts import ExchangeFacts, Facts, FusedFacts, FusedMoEFacts, GemmActivationFacts, LowLatencyGemmFacts
from jax_ep.types import Options


def unsupported_reason(facts: Facts, options: Options) -> str | None:
    """Return why this implementation does not support these facts, or None; see ops/registry.py."""
    if isinstance(facts, FusedFacts | FusedMoEFacts | GemmActivationFacts | LowLatencyGemmFacts):
        return f"it has no {facts.operation}: its operations are separate kernels"
    if not isinstance(facts, ExchangeFacts) or facts.columns is None:
        return None
    modes = options.schedule.dispatch_mode, options.schedule.combine_mode
    fused = [mode for mode in modes if mode not in (None, "serial")]
    if not fused:
        return None
    return f"it has no fused kernels, so mode={fused[0]!r} is not supported; use 'serial'"
