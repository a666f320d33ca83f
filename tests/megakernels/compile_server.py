"""Compiles kernels to PTX and machine code: a request per line of its input, an answer per line of its output.

A process of its own, since a test process may be the parent of interpreters, in which kernels mean something else; and
one for all requests, since its imports take as long as compiling a kernel.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import traceback

import triton

from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels import compilation

triton.knobs.compilation.always_compile = True  # what comes from the cache comes without the assembler's report
triton.knobs.nvidia.dump_ptxas_log = True


def compile_kernel(module, function, types, constants, warps, stages, capability, max_registers):
    config = Config(1, warps, stages, max_registers)
    with contextlib.redirect_stdout(io.StringIO()) as report:
        built = compilation.build(Kernel(module, function), types, config, constants, capability)
    metadata = {"shared": built.metadata.shared, "scratch": built.metadata.global_scratch_size}
    code = disassemble(built.asm["cubin"])
    return {"ptx": built.asm["ptx"], "report": report.getvalue(), "code": code, **metadata}


def disassemble(binary):
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


answers, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no answer
for line in sys.stdin:
    try:
        answer = compile_kernel(*json.loads(line))
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
