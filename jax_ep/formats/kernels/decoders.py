"""The decoder of a format, by name: `getattr(decoders, S.DECODER)` in a kernel is one of the modules of this folder.

Each one has `load_scales`, `add_product`, `add_fp8_product` and `scale_columns`, see quantized.py, and
`add_prepacked_pair` where its format can be prepacked.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what Triton asks every module for
        raise AttributeError(name)
    return importlib.import_module(f".{name}", __package__)
