"""The Gluon emulator: grouped GEMMs against NumPy in float64, and that broken synchronization does not pass."""

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

import oracle
import oracle_quantized
from jax_ep.core.kernel import Descriptor
from jax_ep.interpreter import gluon
from jax_ep.megakernels.grouped_gemm import gluon_sizes
from jax_ep.megakernels.kernels import gluon_gemm

SOURCE = Path(gluon_gemm.__file__)
_names = itertools.count()


def load(path):
    """Import a changed kernel from a file that Triton can read, as if it were in the package."""
    spec = importlib.util.spec_from_file_location(f"{gluon_gemm.__package__}.changed_{next(_names)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def multiply(kernel, rng, sizes, k, n, *, programs, seed, spare=0, **changes):
    """Return the relative error of grouped rows `[M, K]` times `[G, N, K]`; NaN if an element is not written."""
    groups, rows, steps = len(sizes), sum(sizes) + spare, k // 128
    lhs, rhs = (rng.standard_normal(s).astype(ml_dtypes.float8_e4m3fn) for s in ((rows, k), (groups, n, k)))
    padded = np.full(steps * rows + 128, 7.0, np.float32)
    padded[:-128] = rng.random(steps * rows) + 0.5
    rhs_scales = (rng.random((groups, n // 128, steps)) + 0.5).astype(np.float32)
    out, taken = np.full((rows, n), np.nan, ml_dtypes.bfloat16), np.zeros(1, np.int32)
    shape, strides, block = Descriptor(jax.ShapeDtypeStruct(out.shape, jnp.bfloat16), (64, 128), bounded=True).blocks
    operands = gluon.Descriptor(lhs, (128, 128)), gluon.Descriptor(rhs.reshape(groups * n, k), (256, 128))
    arrays = padded, rhs_scales, np.array(sizes, np.int32), taken, gluon.Descriptor(out, block, shape, strides), taken
    options = dataclasses.replace(gluon_sizes(rows, n, k, groups, 2, group_m=4), **{"stages": 2} | changes)
    gluon.run(kernel, programs, *operands, *arrays, seed=seed, S=options)
    rows = oracle.dequantize(lhs, padded[:-128].reshape(steps, rows).T, np.float64)
    want = oracle.grouped_gemm(rows, oracle_quantized.dequantize(rhs, rhs_scales, "fp8").swapaxes(1, 2), sizes)
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("sizes", "k", "n", "programs", "options"),
    [
        ([128], 256, 256, 1, {}),
        ([100, 0, 37, 200], 384, 256, 3, {}),
        ([64, 65, 191], 256, 512, 2, {"stages": 3, "group_m": 1}),
        ([10, 300, 1], 128, 256, 2, {}),
    ],
)
def test_fp8_grouped_gemm(rng, sizes, k, n, programs, options):
    kernel, seed = gluon_gemm.grouped_gemm_fp8, int(rng.integers(1 << 30))
    error = multiply(kernel, rng, sizes, k, n, programs=programs, seed=seed, **options)
    assert error < 3e-3  # bfloat16 rounds to 2**-9.


WAIT_FOR_STEP = "    wait(pipeline.full.index(slot), (count // S.stages) & 1)\n"
WAIT_FOR_STAGE = "                wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)\n"
FIRST_WAVE, RELEASE = "        # First wave of the next step.\n", "        arrive(pipeline.empty.index(slot))\n"
STORED = "    tma.store_wait(0)\n\n\n@gluon.jit\ndef produce"
ZEROS = "        if group < S.num_groups:\n            arrive(tiles.empty"
WAIT_FOR_TILE = "    wait(tiles.full.index(number % 2), (number // 2) & 1)\n"
MISTAKES = {
    "no wait for operands": (f"{WAIT_FOR_STEP}    part", "    part"),
    "no wait for a free stage": (WAIT_FOR_STAGE, ""),
    "stage released too early": (FIRST_WAVE, RELEASE),
    "no wait for the store before": ("    tma.store_wait(0)  # the store before has read `staging`\n", ""),
    "no fence": ("    fence_async_shared()\n", ""),
    "too many arrivals expected": ("init(pipeline.empty.index(s), count=8)", "init(pipeline.empty.index(s), count=9)"),
    "wrong number of bytes": ("(S.tile_m + S.tile_n) * STEP)", "(S.tile_m + S.tile_n) * STEP + 1)"),
    "no wait at the end": (STORED, STORED.removeprefix("    tma.store_wait(0)\n")),
    "rows of the next group": ("    tma.async_store(output", "    end += 9\n    tma.async_store(output"),
    "no wait for the first tile": (WAIT_FOR_TILE, f"    if number > 0:\n    {WAIT_FOR_TILE}"),
    "no wait for the next tile": (WAIT_FOR_TILE, f"    if number == 0:\n    {WAIT_FOR_TILE}"),
    "no arrival in a group of zeros": ("        arrive(tiles.empty", ZEROS),
    "sizes past the last row": ("min(max(size, 0), S.M - start)", "size"),
}


def check_mistake(source, mistake, folder, orders, limit, error_of, *errors):
    """Check that a mistake in a kernel gives an error, or wrong numbers, for one of a few orders.

    Args:
      source: the file of the kernel.
      mistake: what stands in the file, and what stands there in its place.
      folder: an empty folder.
      orders: the number of orders.
      limit: the error of right numbers.
      error_of: a function of the changed module and a seed to the error.
      errors: exceptions other than those of the emulator.
    """
    text, path = source.read_text(), folder / "broken_kernel.py"
    assert mistake[0] in text, "the kernel has changed: update the mistake"
    path.write_text(text.replace(*mistake))
    broken = load(path)
    for seed in range(orders):
        try:
            error = error_of(broken, seed)
        except (gluon.EmulationError, *errors):
            return
        if not error < limit:
            return
    pytest.fail(f"{orders} orders gave the right numbers")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake, tmp_path, rng):
    def error_of(broken, seed):
        sizes, spare = [150, (128, 130)[seed % 2]], 300 * (seed % 2)
        return multiply(broken.grouped_gemm_fp8, rng, sizes, 512, 256, programs=1, seed=seed, spare=spare)

    check_mistake(SOURCE, MISTAKES[mistake], tmp_path, 6, 3e-3, error_of)
