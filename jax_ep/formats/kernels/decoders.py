"""`getattr(decoders, S.decoder)` in a kernel is the module of that name in this folder.

This is a module rather than the package's `__init__.py`, which the interpreter's processes do not run.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # attributes that Triton queries on every module
        raise AttributeError(name)
    return importlib.import_module(f".{name}", __package__)
