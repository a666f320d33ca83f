"""Settings of launches that were measured on this machine: where they come from, and how to put others in their place.

`jax-ep tune` measures them, and writes a file that every operation looks into when it is traced. What the caller says
in a `Schedule` counts first, then `override`, then the file, then what the package was shipped with.

The file is that of `use`, else that of the environment variable `JAX_EP_TUNING`, a path, or "off" for none, else
`jax_ep/tuning/<kind of device>.json` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). It is read when a
program that needs it is first traced. A file that does not fit, of another kind of device, for other kernels, or
damaged, gives a `TuningWarning`, and is not used. All processes of a program need the same.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from jax_ep import context
from jax_ep.settings import file, operations
from jax_ep.settings.file import Rates, Tuning, TuningWarning
from jax_ep.types import type_name

__all__ = ["Rates", "Tuning", "TuningWarning", "current", "override", "use"]


def use(path: str | os.PathLike[str] | None) -> None:
    """Takes tuned settings from a file, or from none; for all programs that are traced from now on.

    Functions under `jit` are traced again when they are next called. Programs of several processes must all do this,
    with equal files, or their ranks may refuse to launch together.

    Args:
      path: what `jax-ep tune` has written, read at once; None: no file, and so the settings of the package.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it cannot be read.
      ValueError: it is not for this kind of device or these kernels, or damaged.
      TypeError: no path.

    Example:
      >>> import jax_ep
      >>> jax_ep.tuning.use(None)
      >>> len(jax_ep.tuning.current().entries)
      0
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"use: path is {type_name(path)}, expected a path, or None for no file; pass one of them.")
    kind = jax.local_devices()[0].device_kind
    context.set_tuning(Tuning(kind) if path is None else file.read(Path(path), kind))


def current() -> Tuning:
    """The tuned settings in use, without overrides.

    Returns:
      A frozen value; its `entries` are empty where there is no file, its `rates` None where none were measured.

    Example:
      >>> import jax, jax_ep
      >>> jax_ep.tuning.current().device_kind == jax.devices()[0].device_kind
      True
    """
    return context.tuning()


def override(operation: str, **settings: bool | int | str) -> AbstractContextManager[None]:
    """Within it, settings of an operation count instead of tuned ones; those of a `Schedule` that is passed still win.

    It is of the thread, and acts on what is traced within it: put it around the call of a function under `jit`, which
    is traced again for it, or around the `lower` of one. The backward pass is traced where `jax.grad` is called. It may
    be nested. The settings change times, and no result but the order of some roundings.

    Args:
      operation: such as "dispatch", "combine" or "grouped_gemm"; docs/tuning.md lists them with their settings.
      **settings: names and values.

    Raises:
      ValueError: an unknown operation or setting, or a value that it cannot have.

    Example:
      >>> import jax_ep
      >>> with jax_ep.tuning.override("combine", num_combining_programs=24, rows_in_flight=4):
      ...     pass  # call what is to be traced with them
    """
    try:
        operations.check(operation, settings)
    except ValueError as error:
        raise ValueError(f"override: {error}; see docs/tuning.md for what there is.") from None
    return context.overriding(tuple((operation, name, value) for name, value in settings.items()))
