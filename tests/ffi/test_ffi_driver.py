"""State of the library when a CUDA driver call fails. The driver is a fake."""

import pytest

from ffi_calls import run_with_fake_driver

PROGRAM = """
import ctypes
from jax_ep.ffi import library

native, driver = library.load(), ctypes.CDLL("libcuda.so.1")
driver.first_word.restype = ctypes.c_int64
INVALID, PRECONDITION, INTERNAL = 1, 2, 3

def register(n, num_bytes=0, value=7):
    return native.jax_ep_register_table(1, 5, 0, (ctypes.c_int64 * n)(*[value] * n), n, num_bytes)

def unregister():
    assert native.jax_ep_hide_table(5) == 0
    return native.jax_ep_unregister_table(5)

def fail(call, times=1, after=0):
    driver.fail(call.encode(), after, times)

def is_visible(n):
    return register(n + 1) == INVALID

def check(num_allocations):
    assert driver.overflows() == 0, "a copy past the end"
    assert driver.num_allocations() == num_allocations, driver.num_allocations()
    assert driver.num_retained(0) == num_allocations, "one reference for each allocation"
    assert driver.num_pushed() == 0
"""
CALLS = ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemAlloc", "cuStreamSynchronize")


@pytest.mark.parametrize("call", CALLS)
def test_table_registration_fails(tmp_path, call):
    """The next attempt, of any size, and the removal stay within the allocation."""
    num_before = int(call == "cuStreamSynchronize")
    program = f"""
fail({call!r})
assert register(8) == INTERNAL
check({num_before})
assert register(4) == 0 and is_visible(4)
unregister()
fail({call!r})
assert register(64) == INTERNAL and unregister() == 0
assert register(64) == 0 and is_visible(64) and unregister() == 0
fail({call!r})
assert register(2) == INTERNAL and register(64, value=9) == 0 and is_visible(64)
assert unregister() == 0
check(driver.num_allocations())
"""
    run_with_fake_driver(tmp_path, PROGRAM + program)


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuMemcpyHtoD"])
def test_table_replacement_fails(tmp_path, call):
    """The device content is unknown after a failure, so the table is hidden; the next attempt reuses its memory."""
    program = f"""
assert register(8) == 0 and is_visible(8)
fail({call!r})
assert register(8, value=9) == INTERNAL
assert register(8, value=9) == 0 and is_visible(8)
assert driver.first_word(0) == 9
assert unregister() == 0 and driver.first_word(0) == 0 and register(8) == 0
fail({call!r})
assert register(8, value=11) == INTERNAL and register(3) == 0, "hidden: another size may take its place"
check(2)
"""
    run_with_fake_driver(tmp_path, PROGRAM + program)


def test_table_removal_fails_on_one_device(tmp_path):
    """The table is hidden on all devices even if the memory of one cannot be cleared."""
    program = """
one = (ctypes.c_int64 * 2)(3, 3)
assert [native.jax_ep_register_table(1, 5, device, one, 2, 0) for device in (0, 2)] == [0, 0]
fail("cuMemcpyHtoD", times=2)
assert native.jax_ep_unregister_table(5) == INTERNAL
three = (ctypes.c_int64 * 3)(3, 3, 3)
assert [native.jax_ep_register_table(1, 5, device, three, 3, 0) for device in (0, 2)] == [0, 0]
"""
    run_with_fake_driver(tmp_path, PROGRAM + program)


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemHostGetDevicePointer", "cuDeviceGet"])
def test_status_allocation_fails(tmp_path, call):
    program = f"""
from jax_ep.ffi import status

host, device = ctypes.c_void_p(), ctypes.c_uint64()
fail({call!r})
assert native.jax_ep_alloc_status(1, 0, ctypes.byref(host), ctypes.byref(device)) == INTERNAL and host.value is None
check(0)
record = status.alloc_status(library.Platform.CUDA, 0)
check(1)
fail("cuMemFreeHost")
try:
    record.free()
except RuntimeError:
    check(1)
record.free()
check(0)
"""
    run_with_fake_driver(tmp_path, PROGRAM + program)
