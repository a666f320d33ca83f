"""Compile the FP8 kernel for sm_90, without a GPU, and print what the assembler made of it.

python benchmarks/gluon/compile.py
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import fp8_kernel
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

CONSTANTS = {"GROUPS": 64, "STAGES": 4, "BAND": 4, "DYNAMIC": True}
ALIGNED = ("sizes", "a_scales", "b_scales", "out", "queue", "M", "N", "K")


def described(dtype: str, bits: int, *block: int) -> str:
    """Return the type of a tensor descriptor."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


TYPES = {
    "a_desc": described("fp8e4nv", 8, 128, 128),
    "b_desc": described("fp8e4nv", 8, 256, 128),
    "out_desc": described("bf16", 16, 64, 128),
    "sizes": "*i32",
    "a_scales": "*fp32",
    "b_scales": "*fp32",
    "out": "*bf16",
    "queue": "*i32",
    **dict.fromkeys(("num_groups", "M", "N", "K"), "i32"),
    **dict.fromkeys(CONSTANTS, "constexpr"),
}


def compile_kernel(**constants: Any) -> Any:
    """Return the compiled kernel for 64 groups and sizes that are multiples of 16."""
    names = list(TYPES)
    values = {(names.index(key),): value for key, value in (CONSTANTS | constants).items()}
    multiples = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if key in ALIGNED}
    source = GluonASTSource(fp8_kernel.grouped_gemm_fp8, TYPES, constexprs=values, attrs=multiples)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def machine_code(compiled: Any) -> str:
    """Return the disassembled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    compiled = compile_kernel()
    code = machine_code(compiled)
    products = len(re.findall(r"\b[QH]GMMA", code))
    print("warps", compiled.metadata.num_warps, "shared bytes", compiled.metadata.shared)
    print("products", products, "spilled", len(re.findall(r"\b(?:LDL|STL)\b", code)))


if __name__ == "__main__":
    main()
