"""What the tests of the custom calls share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
# JAX's fast path, from a compiled function's second call on, raises ValueError for what fails at once on the CPU.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

_ids = itertools.count(1000)  # no context gets so far


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs on GPUs only."""
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="needs a GPU")(test))


def new_id() -> int:
    """An id of a table or a context that nobody uses."""
    return next(_ids)
