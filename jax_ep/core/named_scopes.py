"""The names of the package's public functions, in profiles, in lowered programs and at the beginning of errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax

_called: ContextVar[str | None] = ContextVar("jax_ep_called", default=None)
_names: set[str] = set()


def operation[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Name what `function` traces, what JAX derives from it included, `jax_ep.<function>`; and its errors."""
    name = function.__name__
    _names.add(name)
    return errors_begin_with(name)(jax.named_scope(f"jax_ep.{name}")(function))


@contextlib.contextmanager
def errors_begin_with(name: str) -> Iterator[None]:
    """In this block, or in a function decorated so, errors begin with `name`, also those of operations that it uses.

    In a block of another name, they begin with that one: it is the function that the user has called.
    """
    _names.add(name)
    if _called.get() is not None:
        yield
        return
    token = _called.set(name)
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (_begun_with(name, error.args[0]), *error.args[1:])
        raise
    finally:
        _called.reset(token)


def _begun_with(name: str, message: str) -> str:
    """The message with the name of the function in place of another one, or in front."""
    used = re.match(rf"(?:{'|'.join(_names)})(?=:| has no gradient| with QuantizedExperts)", message)
    return f"{name}: {message}" if used is None else name + message[used.end() :]


def called(function: str) -> str:
    """The operation that the user has called, for errors of what runs later; `function` where that is not known."""
    return _called.get() or function
