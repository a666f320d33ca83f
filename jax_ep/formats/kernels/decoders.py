"""`getattr(decoders, S.DECODER)` in a kernel is the module of that name in this folder."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what Triton asks every module for
        raise AttributeError(name)
    return importlib.import_module(f".{name}", __package__)
