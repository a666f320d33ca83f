"""Compiles kernels to PTX and machine code: a request per line of its input, an answer per line of its output.

A process of its own, since a test process may be the parent of interpreters, in which kernels mean something else; and
one for all requests, since its imports take as long as compiling a kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import triton

from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels import compilation


def compile_kernel(module, function, types, constants, warps, stages, capability, max_registers):
    config = Config(1, warps, stages, max_registers)
    built = compilation.build(Kernel(module, function), types, config, constants, capability)
    report, code = assemble(built.asm["ptx"], capability)
    metadata = {"shared": built.metadata.shared, "scratch": built.metadata.global_scratch_size}
    return {"ptx": built.asm["ptx"], "report": report, "code": code, **metadata}


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
