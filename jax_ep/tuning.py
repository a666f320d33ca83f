"""Settings of kernels that were measured on this machine: where they come from, and how to override them.

`jax-ep tune` measures them and writes a file that every operation reads when it is traced. The first of these sets a
value: the `Schedule` of the call, `override`, the file, the package's defaults.

The file is the one passed to `use`; else the path in the environment variable `JAX_EP_TUNING`, where "off" disables
files; else `jax_ep/tuning/<kind of device>.json` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). It is
read when a program that needs it is first traced. A file that is damaged, or was measured on another kind of device or
with other kernels, gives a `TuningWarning` and is not used. All processes of a program need the same file.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import jax

from jax_ep import context, values
from jax_ep.settings import file, operations
from jax_ep.settings.file import Rates, Tuning, TuningWarning

__all__ = ["Rates", "Tuning", "TuningWarning", "current", "override", "use"]


def use(path: str | os.PathLike[str] | None) -> None:
    """Load tuned settings from a file, or disable files, for all programs that are traced from now on.

    Functions under `jit` are traced again when they are next called. All processes of a program must call this with
    equal files; otherwise the first kernel launch raises an error.

    Args:
      path: the file that `jax-ep tune` wrote, which is read at once; None: the defaults of the package.

    Raises:
      FileNotFoundError: the file does not exist.
      OSError: the file cannot be read.
      ValueError: the file is damaged, or was measured on another kind of device or with other kernels.
      TypeError: `path` is not a path.

    Example:
      >>> import jax_ep
      >>> jax_ep.tuning.use(None)
      >>> len(jax_ep.tuning.current().entries)
      0
    """
    kind = jax.local_devices()[0].device_kind
    context.set_tuning(Tuning(kind) if path is None else file.read(values.path("use", "path", path), kind, "use"))


def current() -> Tuning:
    """Return the tuned settings in use, without overrides.

    Returns:
      A frozen value. Without a file its `entries` are empty; without measured rates its `rates` are None.

    Example:
      >>> import jax, jax_ep
      >>> jax_ep.tuning.current().device_kind == jax.devices()[0].device_kind
      True
    """
    return context.tuning()


def override(operation: str, **settings: bool | int | str) -> AbstractContextManager[None]:
    """Return a context manager that overrides tuned settings of an operation; a `Schedule` still takes precedence.

    It applies to its thread, and to everything traced inside it: put it around the call of a function under `jit`,
    which is traced again, or around its `lower`. The backward pass is traced where `jax.grad` is called. Overrides may
    be nested. They change speed, and results only by the order of some roundings.

    Args:
      operation: such as "dispatch", "combine" or "grouped_gemm"; docs/tuning.md lists them with their settings.
      **settings: names and values.

    Raises:
      ValueError: an unknown operation or setting, or a value that it cannot have.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> multiply = jax.jit(jax_ep.grouped_gemm)
      >>> with jax_ep.tuning.override("grouped_gemm", block_m=128):
      ...     y = multiply(jnp.ones((4, 8)), jnp.ones((2, 8, 16)), jnp.array([1, 3]))
      >>> y.shape
      (4, 16)
    """
    try:
        operations.check(operation, settings)
    except ValueError as error:
        raise ValueError(f"override: {error}; see docs/tuning.md for what there is.") from None
    return context.overriding(tuple((operation, name, value) for name, value in settings.items()))
