"""Compile kernels to PTX and machine code, without a GPU."""

import functools
import pickle
import re
import subprocess
import sys
from pathlib import Path

from jax_ep.core.kernel import Config


def build(module, function, types, constants, config, capability):
    """Return PTX, the assembler's report and code, shared and scratch bytes; `types` are Triton's names."""
    server = _server()
    request = [module, function, types, constants, config, capability]
    pickle.dump(request, server.stdin)
    server.stdin.flush()
    built = pickle.load(server.stdout)
    assert "error" not in built, built["error"][-2000:]
    assert not diverged_barriers(built["code"])
    # Where one half of a packed sum is not used, ptxas 12.9 and 13.0 drop the constant of the addition.
    assert not re.search(r"VIADD\.16x2 .*, 0x0 ;", built["older_code"])
    return built


TENSOR_CORES = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}


def compiled(kernel, types, constants, config, capability=90, *, product=None, wide=True, spills=0, programs=1):
    """Compile a kernel and check what all kernels have in common.

    Args:
      kernel: the `Kernel`.
      types: Triton's names of types; None: the argument is None.
      constants: `tl.constexpr` arguments.
      config: warps, stages, and maybe a limit of registers.
      capability: the architecture.
      product: a regular expression of the tensor core instruction; matrices are then read by TMA.
      wide: whether it stores rows, 16 bytes at a time.
      spills: bytes of spilled registers that are known and allowed.
      programs: programs that must fit on a multiprocessor.
    """
    constants = constants | {name: None for name, kind in types.items() if kind is None}
    types = {name: kind for name, kind in types.items() if kind is not None}
    if not isinstance(config, Config):
        config = Config(1, config.num_warps, config.num_stages)
    built = build(kernel.body.fn.__module__, kernel.name, types, constants, config, capability)
    ptx, report = built["ptx"], built["report"]
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", report))) <= spills, report
    if product:
        assert re.search(product, ptx), "the tensor cores are not used"
        assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx), "matrices are not read by TMA"
        assert "serialized" not in report, report  # Matmuls that do not overlap.
    if wide:
        assert re.search(r"st\.global\.v4\.b32", ptx), "rows are not stored 16 bytes at a time"
        assert not re.search(r"st\.global\.b(8|16)\b", ptx), "short stores: an alignment hint was lost"
    assert built["scratch"] == 0
    assert programs * (built["shared"] + 1024) <= 228 << 10  # The driver needs 1 KB per program.
    assert programs * config.num_warps * 32 * registers(built) <= 65536
    return built


def registers(built):
    """Return the registers per thread."""
    return int(re.findall(r"Used (\d+) registers", built["report"])[0])


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
