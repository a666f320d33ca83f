"""What is launched, and how: names and numbers, so that implementations need not import Triton to speak of kernels."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel by name, so that naming it imports nothing.

    Attributes:
      module: a module of `jax_ep.megakernels.kernels`, or, in the interpreter, the absolute path of a file.
      function: the `triton.jit` function in it.
    """

    module: str
    function: str

    @property
    def path(self) -> Path:
        """The source file."""
        if Path(self.module).is_absolute():
            return Path(self.module)
        return Path(__file__).parent / "megakernels" / "kernels" / f"{self.module}.py"

    def load(self) -> Any:
        """The `triton.jit` function; needs Triton."""
        return getattr(importlib.import_module(f"jax_ep.megakernels.kernels.{self.module}"), self.function)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    Attributes:
      num_programs: size of the one-dimensional grid.
      num_warps: warps per program.
      num_stages: depth of software pipelining.
    """

    num_programs: int
    num_warps: int = 8
    num_stages: int = 3
