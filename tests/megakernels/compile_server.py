"""Compiles kernels to PTX and machine code: a request per line of its input, an answer per line of its output.

A process of its own, since a test process may be the parent of interpreters, in which kernels mean something else; and
one for all requests, since importing Triton takes as long as compiling a kernel.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_kernel(module, function, types, constants, warps, stages, capability, max_registers):
    kernel = getattr(importlib.import_module(f"jax_ep.megakernels.kernels.{module}"), function)
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    pointers = [i for i, name in enumerate(names) if types.get(name, "").startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    report, code = assemble(ptx, capability)
    metadata = {"shared": compiled.metadata.shared, "scratch": compiled.metadata.global_scratch_size}
    return {"ptx": ptx, "report": report, "code": code, **metadata}


def assemble(ptx, capability):
    """The assembler's report, and the machine code as text."""
    ptxas = triton.knobs.nvidia.ptxas_blackwell.path or triton.knobs.nvidia.ptxas.path
    target = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = run(ptxas, "-v", f"-arch={target}", source, "-o", binary)
        return report, run(triton.knobs.nvidia.nvdisasm.path, "-c", binary)


def run(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


answers, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no answer
for line in sys.stdin:
    try:
        answer = compile_kernel(*json.loads(line))
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
