"""What the `pallas` implementation refuses; apart from its functions, so that asking loads no compiler."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax

_CAPABILITY = "9.0"
_COMPILER = "jax.experimental.mosaic.gpu"


def refusal(request: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see `backends.Request`."""
    if request.platform == "cpu":
        return None if request.alone else "it runs on GPUs; on CPU devices only for tests that name it alone"
    if request.platform != "gpu":
        return f"the platform is {request.platform}, it needs NVIDIA GPUs"
    return missing()


def missing() -> str | None:
    """What these GPUs, or this JAX, lack, or None."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if capability != _CAPABILITY:
        return f"its kernels are for compute capability {_CAPABILITY} (Hopper), that of these GPUs is {capability}"
    if importlib.util.find_spec(_COMPILER) is None:
        return f"this JAX has no {_COMPILER}"
    return None
