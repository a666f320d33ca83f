"""Kernel launches without a GPU: when code is loaded, and which parameters are valid. The driver is a fake."""

import pytest

from ffi_calls import run_with_fake_driver

# The stage that creates an executable uses no device: XLA's CPU runtime calls it as its GPU runtime does.
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

def compile(code, parameters=(0, 0)):
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    call = jax.ffi.ffi_call("launch", x)
    parameters = np.array(parameters, np.int64)
    jax.jit(lambda x: call(x, name="f", code=code, parameters=parameters, **numbers)).lower(x).compile()
    return [driver.load(i) for i in range(driver.num_loads())]
"""


def test_launch_code_loaded_on_all_devices(tmp_path):
    """Loading at the first launch is too late: a peer may be waiting already. Equal code is loaded once per device."""
    shown = run_with_fake_driver(tmp_path, PROGRAM + 'print(compile(b"one"), compile(b"one"), compile(b"other"))')
    assert shown.split("\n")[-2] == "[100, 102] [100, 102, 102] [100, 102, 102, 100, 102]"


@pytest.mark.parametrize(
    ("call", "again"),
    [
        ("cuModuleLoadData", [100, 102]),
        ("cuModuleGetFunction", [102]),  # The loaded module is used.
        ("cuFuncSetAttribute", [102]),
        ("cuThreadExchangeStreamCaptureMode", [100, 102]),
    ],
)
def test_launch_code_loaded_once_after_failure(tmp_path, call, again):
    """Modules are never unloaded, so a device with temporary failures must not fill up with them."""
    program = f"""
driver.fail({call!r}.encode(), 0, 1)
first = compile(b"one")
second = compile(b"one")
print(second[len(first):], compile(b"one")[len(second):], driver.num_pushed(), driver.capture_mode())
"""
    assert run_with_fake_driver(tmp_path, PROGRAM + program).split("\n")[-2] == f"{again} [102] 0 0"


WRONG = {
    "rank": [6, *[1] * 21],
    "truncated": [1, 0, 4, 0, 8, 1],
    "element type": [1, 1 << 32, 4, 0, 8, 1, 8],
    "element size": [1, 0, 1 << 62, 0, 8, 1, 8],
    "swizzle": [1, 0, 4, 1 << 32, 8, 1, 8],
    "size of zero": [1, 0, 4, 0, 0, 1, 8],
    "size": [1, 0, 4, 0, 1 << 31, 1, 8],
    "stride": [2, 0, 4, 0, 8, 8, 1 << 62, 1, 8, 8],
    "negative stride": [2, 0, 4, 0, 8, 8, -8, 1, 8, 8],
    "box": [1, 0, 4, 0, 8, 1, (1 << 32) + 8],
    "arrays": [0] * 49,
    "descriptors": [1, 0, 4, 0, 8, 1, 8] * 9,
}


def test_launch_invalid_parameters(tmp_path):
    """Reject numbers that a cast or a product would change; accept the limits."""
    program = f"""
def refused(parameters):
    try:
        compile(b"one", parameters)
    except jax.errors.JaxRuntimeError as error:
        return "parameters of a kernel are not" in str(error)
    return False

print([name for name, parameters in {WRONG!r}.items() if not refused(parameters)])
print(refused([5, 0, 4, 0, *[8] * 15] * 8 + [0] * 40), refused([1, 0, 4, 0, 8, 1, 8]), refused([0] * 48))
"""
    assert run_with_fake_driver(tmp_path, PROGRAM + program).split("\n")[-3:-1] == ["[]", "False False False"]
