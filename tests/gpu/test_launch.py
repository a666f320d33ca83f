"""The custom call that launches kernels, on a GPU: its errors, and that programs contain their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from jax_ep import ffi
from jax_ep.core.kernel import Config, Kernel
from jax_ep.megakernels import activation, compile
from jax_ep.megakernels.compile import Parameter
from jax_ep.megakernels.kernels import rows as rows_kernels
from jax_ep.megakernels.kernels.gemm_structs import RowPass

pytestmark = pytest.mark.usefixtures("on_gpu", "one_process")

X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
INDEX = np.random.default_rng(0).integers(-1, 64, 32).astype(np.int32)
SIZES = np.array([20, 0, 7, 5], np.int32)
WANTED = np.where(INDEX[:, None] < 0, 0, X[INDEX])
RESULT = jax.ShapeDtypeStruct((32, 128), jnp.float32)


def gather(x, index, sizes, **changes):
    """Return `x[index]` by a call with one wrong number."""
    constants = {"S": RowPass(num_rows=32, width=128, num_groups=4, padded_groups=16, block_rows=16, block_columns=128)}
    parameters = tuple(Parameter(np.dtype(d)) for d in ("float32", "int32", "int32", "float32"))
    kernel, capability = Kernel(rows_kernels.gather_rows), compile.device_capability()
    compiled = compile.compile_kernel(kernel, parameters, Config(2, num_warps=4), constants, capability).result()
    numbers = {"num_programs": 2, "num_threads": 128, "shared_bytes": compiled.shared_bytes, "alignment": 16}
    numbers |= {"parameters": [ffi.by_address()] * 4} | changes
    return ffi.launch_kernel(compiled.name, compiled.code, (x, index, sizes), (RESULT,), **numbers)[0]


def test_launch_valid_call():
    np.testing.assert_array_equal(jax.jit(gather)(X, INDEX, SIZES), WANTED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alignment": 1 << 30}, "no multiple of 1073741824"),
        ({"parameters": [ffi.by_address()] * 3}, "3 arrays was called with another number"),
        ({"parameters": [(7,)] * 4}, "not what this library can read"),
        ({"num_programs": 0}, "cannot be launched with 0 programs"),
        ({"shared_bytes": 1 << 20}, "1048576 bytes of shared memory"),
        ({"num_threads": 4096}, "cuLaunchKernel failed"),
    ],
    ids=["alignment", "too few arrays", "unknown parameters", "no programs", "too much memory", "too many threads"],
)
def test_launch_mistakes(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda *arrays: gather(*arrays, **changes))(X, INDEX, SIZES).block_until_ready()
    np.testing.assert_array_equal(jax.jit(gather)(X, INDEX, SIZES), WANTED)  # The device is still usable.


def test_launch_program_contains_kernel():
    compiled = jax.jit(activation.gather_rows).lower(X, INDEX, SIZES).compile()
    packed = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(*packed, execution_devices=jax.devices()[:1])
    np.testing.assert_array_equal(again(X, INDEX, SIZES), WANTED)


def test_launch_vmap():
    xs = jnp.stack([X, 2 * X])
    got = jax.jit(jax.vmap(gather, in_axes=(0, None, None)))(xs, INDEX, SIZES)
    np.testing.assert_array_equal(got, np.stack([WANTED, 2 * WANTED]))
