"""Compile the kernel of `fp8_kernel.py` for sm_90, without a GPU, and print what the assembler made of it.

python benchmarks/gluon/compile.py
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import fp8_kernel
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

CONSTANTS = {"GROUPS": 64, "STAGES": 4, "BAND": 4, "DYNAMIC": True}
ALIGNED = ("sizes", "a_scales", "b_scales", "out", "queue", "M", "N", "K")


def compile_kernel(**constants):
    """Return the compiled kernel for 64 groups and sizes that are multiples of 16."""
    of_bytes, of_halves = (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)
    )
    types = {
        "a_desc": f"tensordesc<fp8e4nv[128, 128],{of_bytes!r}>",
        "b_desc": f"tensordesc<fp8e4nv[256, 128],{of_bytes!r}>",
        "out_desc": f"tensordesc<bf16[64, 128],{of_halves!r}>",
        "sizes": "*i32",
        "a_scales": "*fp32",
        "b_scales": "*fp32",
        "out": "*bf16",
        "queue": "*i32",
        **dict.fromkeys(("num_groups", "M", "N", "K"), "i32"),
        **dict.fromkeys(CONSTANTS, "constexpr"),
    }
    names = list(types)
    constants = {(names.index(name),): value for name, value in (CONSTANTS | constants).items()}
    multiples = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ALIGNED}
    source = GluonASTSource(fp8_kernel.grouped_gemm_fp8, types, constexprs=constants, attrs=multiples)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def machine_code(compiled) -> str:
    """Return the disassembled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    compiled = compile_kernel()
    code = machine_code(compiled)
    print("warps", compiled.metadata.num_warps, "shared bytes", compiled.metadata.shared)
    print("products", code.count("QGMMA"), "spilled", len(re.findall(r"\b(?:LDL|STL)\b", code)))


if __name__ == "__main__":
    main()
