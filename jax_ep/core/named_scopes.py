"""Names of the public functions in profiles, lowered programs and error messages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax

_called: ContextVar[str | None] = ContextVar("jax_ep_called", default=None)
_names: set[str] = set()


def operation[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a public function: trace it in the scope `jax_ep.<function>`, and start its errors with its name."""
    name = function.__name__
    _names.add(name)
    return errors_begin_with(name)(jax.named_scope(f"jax_ep.{name}")(function))


@contextlib.contextmanager
def errors_begin_with(name: str) -> Iterator[None]:
    """Start errors raised in this block, or in a decorated function, with `name`.

    Nested blocks keep the outermost name, which is the function that the user called.
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
    """Prefix a message with the function's name, or replace the name of another function at its start."""
    used = re.match(rf"(?:{'|'.join(_names)})(?=:| has no gradient| with QuantizedWeights)", message)
    return f"{name}: {message}" if used is None else name + message[used.end() :]


def called(function: str) -> str:
    """Return the public function that the user called, or `function` if unknown."""
    return _called.get() or function
