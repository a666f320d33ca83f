"""Compiles a kernel to PTX and that to machine code, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys

# Compiling imports Triton; in a process of its own, since a test process may be the parent of interpreters.
COMPILE = """
import importlib, json, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, function, types, constants, warps, stages, capability, max_registers = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(f"jax_ep.megakernels.kernels.{module}"), function)
names = kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
pointers = [i for i, name in enumerate(names) if types.get(name, "").startswith("*")]
aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": max_registers}
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(compiled.asm["ptx"])
    file.flush()
    ptxas = triton.knobs.nvidia.ptxas_blackwell.path or triton.knobs.nvidia.ptxas.path
    target = f"sm_{capability}" + ("a" if capability >= 90 else "")
    command = [ptxas, "-v", f"-arch={target}", file.name, "-o", "/dev/null"]
    report = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
nvdisasm = triton.knobs.nvidia.nvdisasm.path
with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    sass = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
metadata = {"sass": sass, "shared": compiled.metadata.shared, "scratch": compiled.metadata.global_scratch_size}
print(json.dumps({"ptx": compiled.asm["ptx"], "report": report, **metadata}))
"""


def build(module, function, types, constants, warps, stages, capability, max_registers=None):
    """PTX, ptxas's report, and bytes of shared and of scratch memory; `types` has Triton's name of each operand's."""
    request = json.dumps([module, function, types, constants, warps, stages, capability, max_registers])
    done = subprocess.run([sys.executable, "-c", COMPILE, request], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    assert not diverged_barriers(built["sass"])
    return built


def diverged_barriers(sass):
    """Barriers that a warp may reach in parts: one thread has loaded something, and the others are not waited for.

    The assembler makes a branch of a load by one thread. Where it joins the warp only behind the next barrier, programs
    were seen to hang in it.
    """
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    found = []
    for i, line in enumerate(lines):
        branch = re.search(r"@!?P\d BRA `\((\.L_\w+)\)", line)
        if branch is None or not i < labels[branch[1]] < i + 16:
            continue
        skipped, rest = lines[i : labels[branch[1]]], lines[labels[branch[1]] :]
        ending = next((x for x in rest if re.search(r"BSYNC|WARPSYNC|BAR\.SYNC|EXIT|BRA ", x)), "")
        whole = any("BAR.SYNC" in x for x in skipped)  # all threads take the same way
        if any("STRONG" in x for x in skipped) and not whole and "BAR.SYNC" in ending:
            found.append(line)
    return found
