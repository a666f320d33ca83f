"""Compiles kernels to PTX and machine code: pickled requests at its input, pickled answers at its output.

A process of its own, since a test process may be the parent of interpreters, in which kernels mean something else; and
one for all requests, since its imports take as long as compiling a kernel.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import tempfile
import traceback

import triton

from jax_ep.core.kernel import Config, Kernel
from jax_ep.megakernels import compile

triton.knobs.compilation.always_compile = True  # what comes from the cache comes without the assembler's report
triton.knobs.nvidia.dump_ptxas_log = True


def compile_kernel(module, function, types, constants, warps, stages, capability, max_registers):
    config = Config(1, warps, stages, max_registers)
    with contextlib.redirect_stdout(io.StringIO()) as report:
        built = compile.build(Kernel(module, function), types, config, constants, capability)
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


answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what compilers print is no answer
with contextlib.suppress(EOFError):
    while True:
        request = pickle.load(sys.stdin.buffer)
        try:
            answer = compile_kernel(*request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        pickle.dump(answer, answers)
        answers.flush()
