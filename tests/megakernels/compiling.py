"""Compile kernels to PTX and machine code, without a GPU."""

from __future__ import annotations

import functools
import pickle
import re
import subprocess
import sys
from pathlib import Path


def build(module, function, types, constants, warps, stages, capability, max_registers=None):
    """Return PTX, the assembler's report and code, shared and scratch bytes; `types` are Triton's names."""
    server = _server()
    request = [module, function, types, constants, warps, stages, capability, max_registers]
    pickle.dump(request, server.stdin)
    server.stdin.flush()
    built = pickle.load(server.stdout)
    assert "error" not in built, built["error"][-2000:]
    assert not diverged_barriers(built["code"])
    return built


@functools.cache
def _server():
    """Start one server for this process; it ends with its stdin."""
    command = [sys.executable, Path(__file__).with_name("compile_server.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def diverged_barriers(code):
    """Return barriers that only part of a warp may reach: one thread loads something while the others do not wait.

    The assembler turns a load by one thread into a branch. If the branch rejoins the warp only after the next barrier,
    programs can hang.
    """
    lines = [line.strip() for line in code.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    found = []
    for i, line in enumerate(lines):
        branch = re.search(r"@!?P\d BRA `\((\.L_\w+)\)", line)
        if branch is None or not i < labels[branch[1]] < i + 16:
            continue
        skipped, rest = lines[i : labels[branch[1]]], lines[labels[branch[1]] :]
        ending = next((x for x in rest if re.search(r"BSYNC|WARPSYNC|BAR\.SYNC|EXIT|BRA ", x)), "")
        whole = any("BAR.SYNC" in x for x in skipped)  # All threads take the same path.
        if any("STRONG" in x for x in skipped) and not whole and "BAR.SYNC" in ending:
            found.append(line)
    return found
