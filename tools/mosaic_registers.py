"""Compile the kernels of `pallas` for Hopper GPUs without a GPU, and report their registers.

    .venv/bin/python tools/mosaic_registers.py [NAME...] [--keep FOLDER]

Neither Mosaic's interpreter nor its lowering shows that accumulators spill, or that the assembler serializes wgmma
instructions; a GPU runs such kernels at half of the speed. This script fails if a kernel does so. `--keep` keeps the
PTX and the assembler's output.

JAX compiles such kernels in its CUDA plugin. The script downloads the plugin of the installed JAX version with pip, 130
MB, into build/mosaic, and builds a fake driver there that reports a GPU of compute capability 9.0. The assembler is the
`ptxas` of a CUDA toolkit in PATH. No kernel runs, so the plugin's messages about missing host symbols do not matter.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/mosaic"
DRIVER = r"""
int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int what, int device) { *value = what == 75 ? 9 : 0; return 0; }
"""  # 75: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
SERIALIZED = "wgmma.mma_async instructions are serialized"
ROWS, GROUPS = 32768, 64

type Call = tuple[partial[Any], tuple[jax.ShapeDtypeStruct, ...]]


def calls() -> Iterator[tuple[str, Call]]:
    """Return kernels with operands of models' shapes, and of shapes that select other tiles."""
    sys.path.insert(0, str(ROOT))
    from jax_ep import Experts
    from jax_ep.pallas import gemm_activation, grouped_gemm, tiling

    array, bf16 = jax.ShapeDtypeStruct, jnp.dtype(jnp.bfloat16)
    sizes, f32 = array((GROUPS,), jnp.int32), jnp.float32
    for out_dtype in (bf16, jnp.dtype(f32)):
        static = {"out_dtype": out_dtype, "interpret": False}
        suffix = f"to {out_dtype}"
        run = partial(grouped_gemm._launch_gradient, tiles=tiling.weight_tiles(4096, out_dtype.itemsize), **static)
        operands = [array((ROWS, 7168), bf16), array((ROWS, 4096), bf16), sizes]
        yield f"weights {suffix}", (run, tuple(operands))
        yield f"weights in two arrays {suffix}", (partial(run, num_home=GROUPS - 2), tuple(operands))
        for transpose in (False, True):
            matrices = array((GROUPS, 4096, 7168) if transpose else (GROUPS, 7168, 4096), bf16)
            tiles = tiling.forward_tiles(ROWS, GROUPS)
            run = partial(grouped_gemm._launch_forward, transpose=transpose, tiles=tiles, **static)
            name, rows = f"forward{' transposed' * transpose}", array((ROWS, 7168), bf16)
            yield f"{name} {suffix}", (run, (rows, matrices, sizes))
            two = (
                matrices.update(shape=(GROUPS - 2, *matrices.shape[1:])),
                matrices.update(shape=(2, *matrices.shape[1:])),
            )
            yield f"{name} in two arrays {suffix}", (run, (rows, *two, sizes))
    tiles = tiling.activated_tiles()
    run = partial(gemm_activation._launch_activated, experts=Experts(), tiles=tiles, interpret=False)
    operands = [array((ROWS, 2048), bf16), array((GROUPS, 2048, 1536), bf16), sizes, array((ROWS,), f32)]
    yield "activated", (run, tuple(operands))
    operands[1:2] = [array((groups, 2048, 1536), bf16) for groups in (GROUPS - 2, 2)]
    yield "activated in two arrays", (run, tuple(operands))


# --- compilation ----------------------------------------------------------------------------------------------------


def compiler() -> Callable[[bytes, int], Any]:
    """Return the compiler of the CUDA plugin of the installed JAX version."""
    folder = FOLDER / jax.__version__
    if not (folder / "jax_plugins").exists():
        package = f"jax-cuda13-pjrt=={jax.__version__}"
        pip = [sys.executable, "-P", "-m", "pip", "install", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), package], check=True)
    driver = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o", str(driver)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    (plugin,) = folder.glob("jax_plugins/xla_cuda*/xla_cuda_plugin.so")
    compile_module = ctypes.CDLL(str(plugin)).MosaicGpuCompile
    compile_module.argtypes, compile_module.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    return compile_module


def modules(call: Call) -> list[bytes]:
    """Return the modules of a call that Mosaic compiles."""
    run, operands = call
    launch = partial(inspect.unwrap(run.func), **run.keywords)  # not what it is exported as
    lowered = jax.jit(launch).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found: list[bytes] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
            found.append(operation.attributes["mhlo.backend_config"]["module"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.operation.walk(visit)
    return found


def main() -> None:
    """Compile the requested kernels and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only calls whose names begin with one of these")
    parser.add_argument("--keep", type=Path, help="new folder for what is compiled")
    args = parser.parse_args()
    if args.keep is not None and args.keep.exists():
        parser.error(f"--keep {args.keep}: it exists; name a new folder.")
    compile_module, bad = compiler(), 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, call in calls():
            if args.names and not name.startswith(tuple(args.names)):
                continue
            folder = (args.keep or Path(temporary)) / name.replace(" ", "_")
            folder.mkdir(parents=True)
            os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(folder)}
            own = modules(call)
            for module in own:
                compile_module(module, len(module))
            logs = sorted(folder.glob("*.ptxas"))
            if not own or len(logs) != len(own):
                raise SystemExit(f"{name}: {len(logs)} of {len(own)} kernels compiled. Is ptxas of CUDA 13 in PATH?")
            for log in logs:
                said = log.read_text()
                spilled = max(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))
                serialized = SERIALIZED in said
                bad += spilled > 0 or serialized
                verdict = ", products one after another" * serialized
                print(f"{name}: {log.stem.rpartition('_')[0]}: {spilled} bytes spilled{verdict}", flush=True)
    if bad:
        raise SystemExit(f"{bad} kernels spill registers or wait for each product.")


if __name__ == "__main__":
    main()
