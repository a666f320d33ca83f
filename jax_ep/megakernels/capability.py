"""What kernels need of the GPUs of this process, and the words for GPUs that lack it."""

from __future__ import annotations

import jax

LEAST, FP8, TMA = 8.0, 8.9, 9.0
"""Compute capabilities from which Triton supports GPUs, these convert to FP8, and copy by TMA."""
_WITHOUT_TMA = 12.0
TMA_MODELS = "9.0 to 11.x"


def missing() -> str | None:
    """Why no kernel can run here, or None."""
    capability = _written()
    try:
        number = float(capability)
    except ValueError:  # ROCm writes the name of an architecture
        return f"it needs NVIDIA GPUs, these are {jax.local_devices()[0].device_kind} ({capability}); `xla` serves them"
    return _lacking("it", f"{LEAST} or more", number >= LEAST)


def missing_fp8(what: str) -> str | None:
    """Why `what` cannot convert to FP8 here, or None."""
    return _lacking(what, f"{FP8} or more", _is_cpu() or float(_written()) >= FP8)


def missing_tma(what: str) -> str | None:
    """Why `what` cannot copy by TMA here, or None."""
    return _lacking(what, TMA_MODELS, has_tma())


def has_tma() -> bool:
    """Whether the devices copy blocks by descriptor and have the memory for wide tiles; the interpreter does.

    That is Hopper and the Blackwell of data centres: the Blackwell of workstations has TMA, but 99 KB instead of 227.
    """
    return _is_cpu() or TMA <= float(_written()) < _WITHOUT_TMA


def _is_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


def _written() -> str:
    return str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))


def _lacking(what: str, needed: str, has: bool) -> str | None:
    if has:
        return None
    return f"{what} needs GPUs of compute capability {needed}, that of these is {_written()}; `xla` serves the call"
