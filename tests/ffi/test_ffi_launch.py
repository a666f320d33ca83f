"""Launches of kernels without a GPU: when their code is loaded, and into which devices. The driver is a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Three devices. Nobody has made a context on the second, and the third cannot take the code. `loads` has the contexts
# into which code was to be loaded, in order.
DRIVER = r"""
#include <cstddef>
#include <cstdint>

static thread_local intptr_t stack[8];
static thread_local int depth = 0;
static intptr_t seen[16];
static int count = 0;

extern "C" {
int num_loads() { return count; }
int64_t load(int i) { return seen[i]; }
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) { return *name = "FAKE", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetCount(int* out) { return *out = 3, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned*, int* active) { return *active = device != 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(static_cast<intptr_t>(100 + device)), 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = reinterpret_cast<intptr_t>(context), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = reinterpret_cast<void*>(stack[--depth]), 0; }
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(depth ? stack[depth - 1] : 0), 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuModuleLoadData(void** module, const void*) {
  seen[count++] = depth ? stack[depth - 1] : 0;
  return *module = module, seen[count - 1] == 102 ? 209 : 0;
}
int cuModuleGetFunction(void** function, void* module, const char*) { return *function = module, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
#define UNUSED(name) int name() { return 1; }
UNUSED(cuMemAlloc_v2) UNUSED(cuMemHostAlloc) UNUSED(cuMemHostGetDevicePointer_v2) UNUSED(cuMemFreeHost)
UNUSED(cuMemcpyHtoD_v2) UNUSED(cuMemcpyDtoDAsync_v2) UNUSED(cuMemsetD8Async) UNUSED(cuStreamSynchronize)
UNUSED(cuTensorMapEncodeTiled) UNUSED(cuLaunchKernel)
}
"""

# The stage in which an executable is made takes no device: XLA's CPU runtime calls it as that for GPUs does.
PROGRAM = """
import ctypes, sys
import jax, jax.numpy as jnp
import numpy as np
from jax_ep.ffi import library

jax.devices()  # what is registered later is registered at once, and in this order
native, driver = library.load(), ctypes.CDLL("libcuda.so.1")
driver.load.restype = ctypes.c_int64
parts = {"type_id": native.jax_ep_launch_type_id(), "type_info": native.jax_ep_launch_type_info()}
parts = {name: jax.ffi.pycapsule(ctypes.c_void_p(address)) for name, address in parts.items()}
jax.ffi.register_ffi_type("launch", parts, platform="cpu")
stages = {"instantiate": native.jax_ep_launch_kernel_instantiate_cuda, "execute": native.jax_ep_launch_kernel_cuda}
stages = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
jax.ffi.register_ffi_target("launch", stages, platform="cpu")
numbers = {name: np.int32(1) for name in ("num_programs", "num_threads", "shared_bytes", "alignment")}

def compile(code):
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    call = jax.ffi.ffi_call("launch", x)
    jax.jit(lambda x: call(x, name="f", code=code, parameters=np.zeros(2, np.int64), **numbers)).lower(x).compile()
    return [driver.load(i) for i in range(driver.num_loads())]

print(compile(b"one"), compile(b"one"), compile(b"other"))
"""


def test_code_is_loaded_into_every_device_when_an_executable_is_made(tmp_path: Path) -> None:
    """Not by the first launch: a peer may then wait already. Equal code is loaded once into a device that takes it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform == "darwin":
        pytest.skip("needs a C++ compiler, and the names of Linux")
    source, library = tmp_path / "driver.cc", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[100, 102] [100, 102, 102] [100, 102, 102, 100, 102]"
