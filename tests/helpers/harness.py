"""Run per-rank functions on stacked arrays: `[W, ...]` in, `[W, ...]` out, one leading axis per mesh axis.

With several processes (run_processes.py), each creates the same inputs, holds its device's part of them, and gathers
the full results, so that each process compares everything.
"""

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep import tuning

EXPERT = "expert"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0
"""Time limit of waits that must not expire: slow machines do not fail, and hangs end before the test's time limit."""

STRICT_PYTHON = (sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
"""A Python command that treats warnings as errors, like pytest."""


def run_command(*command, cwd=None, **environment):
    """Run a command on CPU devices, with this package and without the virtual devices of the tests."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    own |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | environment
    return subprocess.run(command, env=own, cwd=cwd, capture_output=True, text=True, check=False)


def make_mesh(sizes, names, axis_type=AxisType.Auto):
    """Create a mesh over the first devices, whose axes are of one kind, or of one kind each.

    Skip if there are too few devices, or other processes would have nothing to do.
    """
    needed = math.prod(sizes)
    if needed > jax.device_count():
        pytest.skip(f"needs {needed} devices, {jax.device_count()} present")
    if needed < jax.device_count() and jax.process_count() > 1:
        pytest.skip(f"a mesh of {needed} devices leaves out some of {jax.process_count()} processes")
    kinds = axis_type if isinstance(axis_type, tuple) else (axis_type,) * len(sizes)
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=kinds, devices=jax.devices()[:needed])


def per_rank(fn, mesh, *, axes=None, replicated=(), check_vma=True):
    """Map `fn` over shards; the leading axes of its arguments and results are the mesh axes.

    Args:
      fn: a function of one rank's arrays to a pytree of one rank's arrays.
      mesh: the mesh.
      axes: how each leading axis is split: mesh axis names or tuples of them; default: every mesh axis.
      replicated: positions of arguments that every rank gets in full, without leading axes.
      check_vma: see `jax.shard_map`.
    """
    axes = tuple(mesh.axis_names) if axes is None else tuple(axes)
    whole = frozenset(replicated)
    spec = PartitionSpec(*axes)

    def body(*args):
        shards = [arg if i in whole else _drop_axes(arg, len(axes)) for i, arg in enumerate(args)]
        return jax.tree.map(lambda leaf: leaf.reshape((1,) * len(axes) + leaf.shape), fn(*shards))

    def stacked(*args):
        in_specs = tuple(PartitionSpec() if i in whole else spec for i in range(len(args)))
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=check_vma)(*args)

    return stacked


def _drop_axes(tree, count):
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[count:]), tree)


def to_numpy(tree):
    """Return results as NumPy arrays, including those of other processes' devices."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if _is_here(leaf) else _gather(leaf), tree)


def _is_here(leaf):
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _gather(leaf):
    """Bit for bit: collectives of some backends do not support every dtype."""
    bits = jnp.dtype(f"u{leaf.dtype.itemsize}")
    everywhere = leaf.sharding.update(spec=PartitionSpec())
    whole = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, bits), out_shardings=everywhere)(leaf)
    return np.asarray(whole).view(leaf.dtype)


def place(tree, mesh, spec):
    """Place arrays that all processes have on the mesh; global arrays stay unchanged."""
    sharding = NamedSharding(mesh, spec)

    def put(leaf):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(put, tree)


_OLD_GPU = "needs GPUs of compute capability"
REFUSALS = {
    "triton": (
        *(_OLD_GPU, "cannot write to the memory of", "its fused kernels", "are not whole 16-byte words"),
        *("it has no masked grouped GEMM", "takes bfloat16 and float16 without FP8 on the wire"),
        "tensor cores lack the precision of float32; xla: reproducible=True",
    ),
    "pallas": ("its kernels are for compute capability", "it has no ", "its GEMMs support", "reproducible=True"),
    "xla": ("it has no fused kernels", "its operations are separate kernels", "reproducible=True"),
}
"""Parts of the reasons for which each implementation may refuse a call of a test of it; other refusals are failures."""
tested = None  # The implementation that the running test has as its parameter; set by tests/conftest.py.


@contextlib.contextmanager
def refusals_skip():
    """Skip if the tested implementation does not support the call, for a reason in `REFUSALS`."""
    try:
        yield
    except NotImplementedError as error:
        message = str(error)
        is_of_tested = f"no implementation of ('{tested}',) supports this call: " in message
        if not (is_of_tested and any(reason in message for reason in REFUSALS[tested])):
            raise
        pytest.skip(message)


def in_gluon(*operations):
    """Return a fixture that runs all tests of its module with the Gluon kernels of these operations."""

    @pytest.fixture(autouse=True)
    def in_gluon():
        with contextlib.ExitStack() as overrides:
            for operation in operations:
                overrides.enter_context(tuning.override(operation, gluon=True))
            yield

    return in_gluon


def in_turn(calls):
    """Run several calls in one program, each after the previous one, and return their results.

    Kernels of a group of ranks need one order on all devices. A GPU's stream provides it; the CPU runtime starts
    independent calls in any order, different on each device.
    """
    results = []
    for fn, args in calls:
        x, *rest = args
        if results:  # A barrier does not work: XLA removes it before it orders the calls.
            x = x + (jax.tree.leaves(results[-1])[0].reshape(-1)[0] == 12345.678).astype(x.dtype)
        results.append(fn(x, *rest))
    return results


def run(fn, mesh, *args, **options):
    """Compile `fn` under `per_rank`, run it once, and return the results as NumPy arrays."""
    return compiled(fn, mesh, **options)(*args)


def compiled(fn, mesh, **options):
    """Compile `fn` like `run`, for several calls: one compilation per set of shapes."""
    jitted = jax.jit(per_rank(fn, mesh, **options))
    axes, whole = options.get("axes") or mesh.axis_names, frozenset(options.get("replicated", ()))
    specs = (PartitionSpec(*axes), PartitionSpec())

    def call(*args):
        if jax.process_count() > 1:
            args = tuple(place(arg, mesh, specs[i in whole]) for i, arg in enumerate(args))
        with refusals_skip():  # Also here, because a subtest would report the error before the test's own hook.
            return to_numpy(jitted(*args))

    return call


def check_directional_derivatives(value_and_gradients, arguments, rng, *, tolerance=1e-7):
    """Compare gradients with central differences along random directions, argument by argument.

    Args:
      value_and_gradients: returns a scalar and one gradient per argument.
      arguments: float64 arrays.
      rng: source of the directions.
      tolerance: relative to the size of the derivative.
    """
    step, (_, gradients) = 1e-6, to_numpy(value_and_gradients(*arguments))
    for i, gradient in enumerate(gradients):
        assert np.abs(gradient).max() > 0, f"the gradient of argument {i} vanishes: nothing is tested"
        for _ in range(2):
            direction = rng.standard_normal(arguments[i].shape)
            ends = []
            for sign in (1, -1):
                moved = list(arguments)
                moved[i] = arguments[i] + sign * step * direction
                ends.append(float(to_numpy(value_and_gradients(*moved)[0])))
            numeric = (ends[0] - ends[1]) / (2 * step)
            exact = float(np.vdot(gradient, direction))
            scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
            assert abs(numeric - exact) <= tolerance * scale, f"argument {i}: difference {numeric}, gradient {exact}"


def words_of(heap, generation, device):
    """Return the int32 control words of a device in shared memory: those of `heap.data` or of `heap.buffers`."""
    memory = heap._memory.pool.heap(device, generation.allocation)[generation.start :]
    return memory[: heap.layout.flags].view(np.int32)
