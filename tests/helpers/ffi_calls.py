"""Helpers of the tests of custom calls."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
# From a compiled function's second call on, JAX's fast path raises ValueError for immediate failures on the CPU.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

_ids = itertools.count(1000)  # Beyond the ids of any context.


def needs_gpu(test):
    """Mark a test that runs on GPUs only."""
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="needs a GPU")(test))


def new_id():
    """Return an unused id of a table or a context."""
    return next(_ids)


def cxx_compiler():
    """Return the command of a C++ compiler, or skip the test."""
    return shutil.which("c++") or shutil.which("g++") or pytest.skip("needs a C++ compiler")


def run_with_fake_driver(folder, program):
    """Run a Python program with `tests/ffi/fake_driver.cc` as CUDA driver, built in `folder`; return its output."""
    if sys.platform == "darwin":
        pytest.skip("needs the names of Linux")
    source, library = Path(__file__).parents[1] / "ffi" / "fake_driver.cc", folder / "libcuda.so.1"
    subprocess.run([cxx_compiler(), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    environment = {"LD_LIBRARY_PATH": str(folder), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
