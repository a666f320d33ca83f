"""Decoders of quantized weights in kernels: `getattr(kernels, S.decoder)` in a kernel is the module of that name."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # attributes that Triton queries on every module
        raise AttributeError(name)
    return importlib.import_module(f".{name}", __package__)
