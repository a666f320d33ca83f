"""The custom call `pointer_table`: every device gets its own table, under every transformation."""

import ctypes
import functools
import itertools
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P

from ffi_calls import FAILED, ON_GPU, cxx_compiler, needs_gpu, new_id
from harness import make_mesh
from jax_ep import ffi
from jax_ep.ffi import library

N = 5


def values_of(device, salt=0):
    """Return values that no other device has, with addresses that need all 64 bits."""
    return [(1 << 62) + salt * 10**9 + device.id * 1000 + i for i in range(N)]


@pytest.fixture
def table_id():
    """Register a table on every device."""
    table = new_id()
    for device in jax.devices():
        ffi.register_table(table, device, values_of(device))
    yield table
    ffi.unregister_table(table)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", ["one_axis", "two_axes"])
def test_table_per_device(table_id, check_vma, shape):
    count = jax.device_count()
    if shape == "two_axes" and count % 2:
        pytest.skip("needs an even number of devices")
    mesh = make_mesh((count,), ("e",)) if shape == "one_axis" else make_mesh((2, count // 2), ("d", "e"))
    fetch = jax.shard_map(
        lambda: ffi.pointer_table(table_id, N)[None], mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names),
        check_vma=check_vma,
    )  # fmt: skip
    got = jax.jit(fetch)()
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, [values_of(device) for device in mesh.devices.flat])


def test_table_varies_over_mesh_axes(table_id):
    mesh = make_mesh((jax.device_count(),), ("e",))

    def shard():
        table = ffi.pointer_table(table_id, N)
        assert jax.typeof(table).manual_axis_type.varying == {"e"}
        return table

    with pytest.raises(ValueError, match="require replication"):
        jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=(), out_specs=P()))


def test_table_some_axes_manual(table_id):
    if jax.device_count() % 2:
        pytest.skip("needs an even number of devices")
    mesh = make_mesh((jax.device_count() // 2, 2), ("e", "auto"))
    fetch = jax.shard_map(
        lambda: ffi.pointer_table(table_id, N)[None], mesh=mesh, in_specs=(), out_specs=P("e"), axis_names={"e"}
    )
    got = jax.jit(fetch)()
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.ravel(shard.data), values_of(shard.device))


def test_table_scan_remat_grad(table_id):
    """The call is recomputed in the backward pass inside a scan, which an effect would prevent."""
    mesh = make_mesh((jax.device_count(),), ("e",))
    steps = 3

    @jax.checkpoint
    def step(x, _):
        words = lax.bitcast_convert_type(ffi.pointer_table(table_id, N), jnp.int32)  # no int64 arithmetic without x64
        low = (words[0, 0] & 0xFFFFF).astype(x.dtype)
        return x * low, low[None]

    def loss(x):
        x, lows = lax.scan(step, x, None, length=steps)
        return x.sum(), lows

    def shard(x):
        gradient, lows = jax.grad(loss, has_aux=True)(x)
        return gradient, lows

    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("e"), out_specs=(P("e"), P(None, "e"))))
    gradient, lows = run(jnp.ones(jax.device_count(), jnp.float32))
    expected = np.array([values_of(device)[0] & 0xFFFFF for device in mesh.devices.flat], np.float32)
    np.testing.assert_array_equal(lows, np.tile(expected, (steps, 1)))
    np.testing.assert_array_equal(gradient, expected**steps)


def test_table_replaced_without_recompilation(table_id):
    device = jax.devices()[0]
    fetch = jax.jit(functools.partial(ffi.pointer_table, table_id, N))
    np.testing.assert_array_equal(fetch(), values_of(device))
    ffi.register_table(table_id, device, values_of(device, salt=1))
    np.testing.assert_array_equal(fetch(), values_of(device, salt=1))
    with pytest.raises(ValueError, match=rf"table {table_id} .*has {N} entries .* by one of {N + 1}"):
        ffi.register_table(table_id, device, [0] * (N + 1))


def test_table_unknown_id():
    unknown = new_id()
    name = "CUDA" if ON_GPU else "CPU"
    with pytest.raises(FAILED, match=rf"FAILED_PRECONDITION.*table {unknown} of {name} device 0.*jax_ep\.init\(\)"):
        jax.block_until_ready(jax.jit(lambda: ffi.pointer_table(unknown, N))())


def test_table_unknown_device():
    table, mesh = new_id(), make_mesh((2,), ("e",))
    ffi.register_table(table, mesh.devices.flat[0], values_of(mesh.devices.flat[0]))
    try:
        fetch = jax.shard_map(lambda: ffi.pointer_table(table, N), mesh=mesh, in_specs=(), out_specs=P("e"))
        ordinal = ffi.device_key(mesh.devices.flat[1])[1]
        with pytest.raises(FAILED, match=rf"table {table} of \w+ device {ordinal} is not registered"):
            jax.block_until_ready(jax.jit(fetch)())
    finally:
        ffi.unregister_table(table)


def test_table_size_mismatch(table_id):
    with pytest.raises(FAILED, match=rf"INVALID_ARGUMENT.*has {N} entries.*asks for {N + 2}"):
        jax.block_until_ready(jax.jit(lambda: ffi.pointer_table(table_id, N + 2))())


def test_table_program_needs_more_memory(table_id):
    """The error states the bytes that the program was compiled for, and those of the table."""
    device = jax.devices()[0]
    fetch = {size: jax.jit(functools.partial(ffi.pointer_table, table_id, N, num_bytes=size)) for size in (100, 101)}
    ffi.register_table(table_id, device, values_of(device), 100)
    np.testing.assert_array_equal(fetch[100](), values_of(device))
    message = r"FAILED_PRECONDITION.*stands for 100 bytes .* compiled for 101\. .*init\(heap_bytes=\.\.\.\)"
    with pytest.raises(FAILED, match=message):
        jax.block_until_ready(fetch[101]())
    ffi.register_table(table_id, device, values_of(device), 101)
    np.testing.assert_array_equal(fetch[101](), values_of(device))


def test_table_shrunk_below_used_bytes(table_id):
    """A captured graph may be replayed at any time without a check, also after the table was registered again."""
    device = jax.devices()[0]
    ffi.register_table(table_id, device, values_of(device), 100)
    assert ffi.used_bytes(table_id, device) == ffi.used_bytes(new_id(), device) == 0
    jax.block_until_ready(jax.jit(lambda: ffi.pointer_table(table_id, N, num_bytes=50))())
    assert ffi.used_bytes(table_id, device) == 50
    ffi.register_table(table_id, device, values_of(device), 50)
    with pytest.raises(RuntimeError, match=r"uses 50 bytes .* for 49\. Use a new table id"):
        ffi.register_table(table_id, device, values_of(device), 49)
    ffi.unregister_table(table_id)
    with pytest.raises(RuntimeError, match="uses 50 bytes"):
        ffi.register_table(table_id, device, values_of(device), 49)
    ffi.register_table(table_id, device, values_of(device), 50)
    fetch = jax.jit(lambda: ffi.pointer_table(table_id, N))
    np.testing.assert_array_equal(fetch(), values_of(device))


def test_table_hidden_until_registered(table_id):
    device = jax.devices()[0]
    fetch = jax.jit(lambda: ffi.pointer_table(table_id, N))
    np.testing.assert_array_equal(fetch(), values_of(device))
    for remove in (ffi.hide_table, ffi.unregister_table):
        remove(table_id)
        with pytest.raises(FAILED, match="is not registered"):
            jax.block_until_ready(fetch())
    ffi.register_table(table_id, device, values_of(device))
    np.testing.assert_array_equal(fetch(), values_of(device))


def test_table_deserialized_executable_needs_larger_heap(table_id):
    """Use JAX's serialization, as between processes."""
    device = jax.devices()[0]
    ffi.register_table(table_id, device, values_of(device), 1000)
    compiled = jax.jit(lambda: ffi.pointer_table(table_id, N, num_bytes=1000)).lower().compile()
    parts = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*parts, execution_devices=[device])
    ffi.register_table(table_id, device, values_of(device), 999)
    with pytest.raises(FAILED, match=r"stands for 999 bytes .* compiled for 1000"):
        jax.block_until_ready(loaded())


@pytest.mark.parametrize("entries", [0, -1])
def test_table_empty(entries):
    with pytest.raises(ValueError, match=f"at least 1, got {entries}"):
        ffi.pointer_table(1, entries)
    with pytest.raises(ValueError, match=r"got 0 entries .* expected 1 to"):
        ffi.register_table(new_id(), jax.devices()[0], [])


@pytest.mark.parametrize("arguments", [(2**63, [1]), (1, [2**64]), (1, [-(2**63) - 1]), (1, [1], 2**63)], ids=str)
def test_table_numbers_beyond_64_bits(arguments):
    with pytest.raises(OverflowError):
        ffi.register_table(arguments[0], jax.devices()[0], *arguments[1:])


@pytest.mark.parametrize(
    "call", [ffi.hide_table, ffi.unregister_table, ffi.unregister_status], ids=lambda f: f.__name__
)
def test_ids_beyond_64_bits(call):
    """An id that ctypes would wrap does not name the table of another id."""
    table_id = new_id()
    ffi.register_table(table_id, jax.devices()[0], [1, 2])
    for wrong in (table_id + 2**64, table_id - 2**64, float(table_id)):
        with pytest.raises(ctypes.ArgumentError, match=r"does not fit in 64 bits|cannot be interpreted as an integer"):
            call(wrong)
    assert np.asarray(jax.jit(lambda: ffi.pointer_table(table_id, 2))()).tolist() == [1, 2]


def test_table_registered_while_programs_run(table_id):
    """Registrations from other threads neither tear nor deadlock a running program's reads."""
    device, stop = jax.devices()[0], threading.Event()
    possible = [values_of(device, salt) for salt in range(4)]

    def register():
        for salt in itertools.cycle(range(4)):
            ffi.register_table(table_id, device, possible[salt])
            if stop.is_set():
                return

    thread = threading.Thread(target=register)
    thread.start()
    try:
        fetch = jax.jit(lambda: ffi.pointer_table(table_id, N))
        seen = [np.asarray(fetch()).tolist() for _ in range(200)]
    finally:
        stop.set()
        thread.join()
    # On a GPU, the replacement copies into memory that a program may be reading; only words are atomic there.
    if not ON_GPU:
        assert all(one in possible for one in seen)
    assert {word for one in seen for word in one} <= {word for one in possible for word in one}


def test_table_vmap_token(table_id):
    """All elements share one table at any nesting depth: the handler knows the shape of one table only."""

    def program(tokens):
        return jax.vmap(jax.vmap(lambda token: ffi.pointer_table(table_id, N, token=token)))(tokens)

    compiled = jax.jit(program).lower(jnp.ones((4, 3, 2))).compile()
    assert compiled.as_text().count(f'custom_call_target="{library.POINTER_TABLE}"') == 1
    want = values_of(jax.devices()[0])
    np.testing.assert_array_equal(compiled(jnp.ones((4, 3, 2))), np.broadcast_to(want, (4, 3, N)))


def test_table_calls_with_same_token_merge(table_id):
    """Calls with different tokens, or without one, stay separate."""

    def program(x, y):
        return [ffi.pointer_table(table_id, N, token=token) for token in (x, x, y, None, None)]

    compiled = jax.jit(program).lower(jnp.ones(3), jnp.zeros((2, 2), jnp.bfloat16)).compile()
    assert compiled.as_text().count(f'custom_call_target="{library.POINTER_TABLE}"') == 4
    tables = compiled(jnp.ones(3), jnp.zeros((2, 2), jnp.bfloat16))
    assert len({np.asarray(table).tobytes() for table in tables}) == 1


@needs_gpu
def test_table_graph_replay_after_unregister(table_id):
    """The copy in device memory keeps its address."""
    fetch = jax.jit(lambda x: (ffi.pointer_table(table_id, N), jnp.cumsum(jnp.sin(x) @ jnp.cos(x).T)),
                    compiler_options={"xla_gpu_graph_min_graph_size": 1})  # fmt: skip
    x, device = jnp.ones((64, 64), jnp.float32), jax.devices()[0]
    for salt in range(4):
        ffi.register_table(table_id, device, values_of(device, salt))
        for _ in range(3):
            np.testing.assert_array_equal(fetch(x)[0], values_of(device, salt))
        ffi.unregister_table(table_id)
    ffi.register_table(table_id, device, values_of(device))


PROGRAM = r"""
#include <dlfcn.h>
#include <cstdio>

#include "xla/ffi/api/c_api.h"

// Asks a handler for its metadata, as XLA does when it is registered.
int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::puts(dlerror()), 1;
  for (int i = 2; i < argc; ++i) {
    auto* handler = reinterpret_cast<XLA_FFI_Error* (*)(XLA_FFI_CallFrame*)>(dlsym(library, argv[i]));
    XLA_FFI_Metadata metadata{XLA_FFI_Metadata_STRUCT_SIZE};
    metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    XLA_FFI_Metadata_Extension extension{};
    extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
    extension.extension_base.type = XLA_FFI_Extension_Metadata;
    extension.metadata = &metadata;
    XLA_FFI_CallFrame frame{XLA_FFI_CallFrame_STRUCT_SIZE};
    frame.extension_start = &extension.extension_base;
    if (handler == nullptr || handler(&frame) != nullptr) return std::puts("no metadata"), 1;
    const bool recordable = metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    std::printf("%s %d\n", argv[i], recordable);
  }
  return 0;
}
"""
HANDLERS = {f"jax_ep_{call}_{place}": False for call in ("pointer_table", "check_status") for place in ("cpu", "cuda")}
HANDLERS["jax_ep_launch_kernel_cuda"] = False


def test_custom_calls_command_buffer_traits(tmp_path):
    """A replayed check would return the result of the time of recording."""
    source, program = tmp_path / "traits.cc", tmp_path / "traits"
    source.write_text(PROGRAM)
    command = [cxx_compiler(), "-std=c++17", f"-I{jax.ffi.include_dir()}", source, "-o", program, "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    command = [program, library.load()._name, *HANDLERS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {name: bool(int(value)) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert found == HANDLERS | {"jax_ep_pointer_table_cuda": True, "jax_ep_launch_kernel_cuda": True}
