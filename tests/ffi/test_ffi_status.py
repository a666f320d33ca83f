"""The custom call `check_status`: a failure that a kernel recorded becomes an exception with its full message."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ffi_calls import FAILED, needs_gpu, new_id
from harness import make_mesh
from jax_ep import ffi
from jax_ep.ffi import library
from jax_ep.ffi.status import FIELDS, NUM_BYTES


@pytest.fixture
def status():
    """Create a context id and its cleared status records, one per device."""
    context = new_id()
    buffers = [ffi.alloc_status(*ffi.device_key(device)) for device in jax.devices()]
    for buffer in buffers:
        buffer.register(context)
    yield context, buffers
    ffi.unregister_status(context)
    for buffer in buffers:
        buffer.free()


TIMEOUT = ffi.StatusRecord(
    state=ffi.State.TIMEOUT, operation=ffi.Operation.COMBINE, rank=2, peer=1, expected=7, seen=6, task=12, detail=30_000
)


def names(function):
    return getattr(library.load(), function)().decode().split()


def test_status_layout_matches_library():
    assert names("jax_ep_status_fields") == list(FIELDS)
    assert names("jax_ep_status_states") == [state.name.lower() for state in ffi.State]
    assert names("jax_ep_status_operations") == [operation.name.lower() for operation in ffi.Operation]
    assert [*ffi.State] == list(range(len(ffi.State)))
    assert [*ffi.Operation] == list(range(len(ffi.Operation)))
    assert NUM_BYTES == 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "rank 2 timed out after 30 s in combine (task 12) waiting for rank 1: expected epoch 7, saw 6."),
        ({"task": -1}, "rank 2 timed out after 30 s in combine waiting for rank 1: expected epoch 7, saw 6."),
        ({"detail": 0, "peer": -1}, "rank 2 timed out in combine (task 12) waiting for its own tasks: expected"),
        ({"detail": 250}, "timed out after 0.25 s in"),
        ({"operation": 0}, "in an unknown operation (task 12)"),
        ({"operation": 77}, "in operation 77 (task 12)"),
        ({"state": 2, "detail": 1}, "rank 2 stopped in combine (task 12) waiting for rank 1: expected epoch 7, saw 6"),
        ({"state": 2, "detail": 1}, "because rank 1 had reported a failure (state 1)"),
        ({"state": 99}, "rank 2 reported the unknown state 99 in combine"),
    ],
)
def test_status_message(changes, expected):
    story = ffi.format_status(dataclasses.replace(TIMEOUT, **changes))
    assert expected in story
    assert story.startswith("jax_ep: rank 2 ")
    assert "jax_ep.finalize() and jax_ep.init()" in story


WRONG_MESH = dataclasses.replace(TIMEOUT, state=ffi.State.WRONG_MESH, peer=-1, expected=3, seen=0, task=-1, detail=0)


def test_status_message_states_and_operations():
    story = ffi.format_status(WRONG_MESH)
    assert "rank 2 is another device in combine than in the mesh given to jax_ep.init()" in story
    assert "expected device 3, got device 0" in story
    assert "Call jax_ep.finalize() and jax_ep.init(mesh) with the mesh that the program runs on" in story
    for state in (ffi.State.OK, ffi.State.WRITING):
        assert ffi.format_status(dataclasses.replace(TIMEOUT, state=state)) == "jax_ep: no failure recorded"
    for operation in list(ffi.Operation)[1:]:
        assert f" in {operation.name.lower()} " in ffi.format_status(dataclasses.replace(TIMEOUT, operation=operation))


def test_status_format_truncates():
    words = (ctypes.c_int32 * 8)(*dataclasses.astuple(TIMEOUT))
    text = ctypes.create_string_buffer(b"x" * 20)
    needed = library.load().jax_ep_format_status(words, text, 11)
    assert needed == len(ffi.format_status(TIMEOUT))
    assert text.raw == b"jax_ep: ra\0" + b"x" * 9 + b"\0"


def checked(context, wait=False):
    """Return a program over all devices whose output depends on the check."""
    mesh = make_mesh((jax.device_count(),), ("e",))

    @jax.checkpoint
    def layer(x):
        y = jnp.sin(x)
        return y + ffi.check_status(y, context, wait=wait).astype(y.dtype)

    def shard(x):
        x, _ = lax.scan(lambda carry, _: (layer(carry), None), x, None, length=2)
        return x

    def total(x):
        return jax.shard_map(shard, mesh=mesh, in_specs=P("e"), out_specs=P("e"))(x).sum()

    return jax.jit(jax.value_and_grad(total))


@pytest.mark.parametrize("wait", [False, True])
def test_status_check_passes_with_gradient(status, wait):
    context, _ = status
    x = jnp.linspace(0, 1, 2 * jax.device_count(), dtype=jnp.float32)
    value, gradient = checked(context, wait)(x)
    np.testing.assert_allclose(value, np.sin(np.sin(x)).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.cos(np.sin(x)) * np.cos(x), rtol=1e-5)


def test_status_check_raises_message(status):
    context, buffers = status
    run, x = checked(context), jnp.ones(jax.device_count(), jnp.float32)
    jax.block_until_ready(run(x))
    buffers[-1].write(TIMEOUT)
    assert buffers[-1].read() == TIMEOUT
    with pytest.raises(FAILED) as raised:
        jax.block_until_ready(run(x))
    assert "DEADLINE_EXCEEDED" in str(raised.value)
    assert ffi.format_status(TIMEOUT) in str(raised.value)
    buffers[-1].clear()
    jax.block_until_ready(run(x))


def test_status_check_states(status):
    """A record that is being written is no failure; a wrong mesh comes before timeouts."""
    context, buffers = status
    run = jax.jit(lambda x: ffi.check_status(x, context))
    buffers[0].write(dataclasses.replace(TIMEOUT, state=ffi.State.WRITING))
    assert run(jnp.ones(3)) == 0
    buffers[0].write(dataclasses.replace(TIMEOUT, state=ffi.State.ABORTED))
    with pytest.raises(FAILED, match=r"ABORTED: .*rank 2 stopped in combine"):
        jax.block_until_ready(run(jnp.ones(3)))
    buffers[0].write(TIMEOUT)
    buffers[-1].write(WRONG_MESH)
    with pytest.raises(FAILED, match=r"FAILED_PRECONDITION: .*rank 2 is another device"):
        jax.block_until_ready(run(jnp.ones(3)))


def test_status_check_without_context():
    unknown = new_id()
    with pytest.raises(FAILED, match=rf"FAILED_PRECONDITION.*context {unknown} has no status.*jax_ep\.init\(\)"):
        jax.block_until_ready(jax.jit(lambda x: ffi.check_status(x, unknown))(jnp.ones(3)))


@pytest.mark.parametrize("token", [jnp.ones((2, 3), jnp.bfloat16), jnp.zeros((), jnp.int32), jnp.ones(0, bool)])
def test_status_check_token_dtypes(status, token):
    result = jax.jit(lambda x: ffi.check_status(x, status[0]))(token)
    assert (result.shape, result.dtype, int(result[0])) == ((1,), np.int32, 0)


def test_status_check_vmap(status):
    context, buffers = status
    run = jax.jit(jax.vmap(lambda x: ffi.check_status(x, context)))
    np.testing.assert_array_equal(run(jnp.ones((4, 3))), np.zeros((4, 1), np.int32))
    buffers[0].write(TIMEOUT)
    with pytest.raises(FAILED, match="timed out"):
        jax.block_until_ready(run(jnp.ones((4, 3))))


def test_status_check_unused_is_removed(status):
    """An unused check is removed, because the call has no effect."""

    def unused(x):
        ffi.check_status(x, status[0])
        return x

    used = jax.jit(lambda x: x + ffi.check_status(x, status[0]).astype(x.dtype))
    assert library.CHECK_STATUS not in jax.jit(unused).lower(jnp.ones(3)).as_text()
    assert library.CHECK_STATUS in used.lower(jnp.ones(3)).as_text()


def test_status_free_registered_record():
    context, buffer = new_id(), ffi.alloc_status(*ffi.device_key(jax.devices()[0]))
    buffer.register(context)
    with pytest.raises(RuntimeError, match=f"context {context} .*still registered"):
        buffer.free()
    ffi.unregister_status(context)
    buffer.free()


def test_status_register_bad_address():
    for address in (0, 6):
        buffer = ffi.StatusBuffer(ffi.Platform.CPU, 0, address, address)
        with pytest.raises(ValueError, match=f"multiple of 4, got {address}"):
            buffer.register(new_id())


@needs_gpu
def test_status_memory_shared_by_host_and_device(status):
    """The record lies in pinned host memory that also has a device address."""
    _, buffers = status
    for buffer in buffers:
        assert buffer.platform is ffi.Platform.CUDA
        assert buffer.device_address != 0
        buffer.write(TIMEOUT)
        assert buffer.read() == TIMEOUT


@needs_gpu
def test_status_driver_errors():
    with pytest.raises(RuntimeError, match=r"cuDeviceGet\(4096\) failed with CUDA error 101"):
        ffi.alloc_status(ffi.Platform.CUDA, 4096)
