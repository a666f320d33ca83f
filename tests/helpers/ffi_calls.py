"""What the tests of the custom calls share."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
# JAX's fast path, from a compiled function's second call on, raises ValueError for what fails at once on the CPU.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

_ids = itertools.count(1000)  # no context gets so far


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs on GPUs only."""
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="needs a GPU")(test))


def new_id() -> int:
    """An id of a table or a context that nobody uses."""
    return next(_ids)


def run_with_fake_driver(folder: Path, program: str) -> str:
    """What a Python program prints whose CUDA driver is `tests/ffi/fake_driver.cc`, built in `folder`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform == "darwin":
        pytest.skip("needs a C++ compiler, and the names of Linux")
    source, library = Path(__file__).parents[1] / "ffi" / "fake_driver.cc", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    environment = {"LD_LIBRARY_PATH": str(folder), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
