"""Tiles to measure: a kernel's default, and each change of one field of it. `jax-ep tune` searches combinations."""

from __future__ import annotations

import dataclasses
from typing import Any


def variations[Tiles: Any](default: Tiles) -> dict[str, Tiles]:
    """Return the default and all tiles that differ from it in one candidate, by name."""
    found = {"default": default}
    for name, values in default.candidates.items():
        others = [value for value in values if value != getattr(default, name)]
        found |= {f"{name}={value}": dataclasses.replace(default, **{name: value}) for value in others}
    return found
