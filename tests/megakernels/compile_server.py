"""Compile kernels to PTX and machine code in a process without the interpreter: pickled requests and answers."""

import contextlib
import importlib
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import triton

from jax_ep.core.kernel import Kernel
from jax_ep.megakernels import compile


def compile_kernel(module, function, types, constants, config, capability):
    kernels = importlib.import_module(module)
    built = compile.build(Kernel(getattr(kernels, function)), types, config, constants, capability)
    ptx = built.asm["ptx"]
    report, code = assemble(ptx, capability, triton.knobs.nvidia.ptxas_blackwell)
    older_code = ""
    if capability == 90 and "add.s16x2" in ptx:
        older = re.sub(r"\.version [\d.]+", ".version 8.8", ptx)  # the newest that ptxas 12.9 reads
        _, older_code = assemble(older, capability, triton.knobs.nvidia.ptxas)
    metadata = {"shared": built.metadata.shared, "scratch": built.metadata.global_scratch_size}
    return {"ptx": ptx, "report": report, "code": code, "older_code": older_code, **metadata}


def assemble(ptx, capability, ptxas):
    """Return the assembler's report, and the machine code as text."""
    target = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = run(ptxas.path, "-v", f"-arch={target}", source, "-o", binary)
        return report, run(triton.knobs.nvidia.nvdisasm.path, "-c", binary)


def run(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


answers, sys.stdout = sys.stdout.buffer, sys.stderr  # Output of compilers is not an answer.
with contextlib.suppress(EOFError):
    while True:
        request = pickle.load(sys.stdin.buffer)
        try:
            answer = compile_kernel(*request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        pickle.dump(answer, answers)
        answers.flush()
