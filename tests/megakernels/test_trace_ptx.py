"""Overhead of traces in kernels: none if disabled, and no change to wide accesses or loops if enabled."""

import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compiling
import pytest
import test_fused_ptx as fused
import test_masked_ptx as masked
import test_ptx as rows
import test_rows_ptx as decode

import jax_ep

pytest.importorskip("triton")

PACKAGE = Path(jax_ep.__file__).parent
CALL = re.compile(r"^ *(began = stamp\(HEAP\)|trace\w*\(launch, .*\))\n", re.MULTILINE)
IMPORT = re.compile(r"^from \.trace import (\([^)]*\)|.*)\n", re.MULTILINE)
CASES = {
    "all_gather_i32": lambda: rows.test_ptx_small_exchange_kernel(90),
    "dispatch": lambda: rows.test_ptx_row_kernels("dispatch", None, "bfloat16", False, 90),
    "combine": lambda: rows.test_ptx_row_kernels("combine", None, "bfloat16", False, 90),
    "plan": lambda: rows.test_ptx_plan_kernel(256, 4096, 90),
    "dispatch_gemm": lambda: fused.test_fused_ptx_dispatch_gemm(fused.DEEPSEEK, False, True, False, 90, None),
    "gemm_combine": lambda: fused.test_fused_ptx_gemm_combine(fused.DEEPSEEK, False, True, 90, "", None),
    "low-latency dispatch": lambda: decode.built("dispatch", 128, False, 90),
    "low-latency combine": lambda: decode.built("combine", 128, True, 90),
    "low-latency gemm_combine": lambda: masked.test_masked_ptx_gemm_combine(64, False, True),
}


@pytest.fixture(scope="module")
def without_traces(tmp_path_factory):
    """Start a compiler for kernels without their trace lines."""
    folder = tmp_path_factory.mktemp("without_traces")
    shutil.copytree(PACKAGE, folder / "jax_ep", ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"))
    kernels = folder / "jax_ep" / "megakernels" / "kernels"
    (kernels / "trace.py").unlink()
    changed = 0
    for path in kernels.glob("*.py"):
        source = path.read_text()
        path.write_text(CALL.sub("", IMPORT.sub("", source)))
        changed += path.read_text() != source
        left = re.search(r"\b(stamp|trace\w*)\(|_EVENT\b", path.read_text())
        assert left is None, f"{path.name} still has {left}"
    assert changed >= 9
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, Path(__file__).with_name("compile_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


def instructions(ptx):
    """Return a kernel's instructions without source locations."""
    lines = (line.split("//")[0].strip() for line in ptx.partition("\t.section")[0].splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]


def depths(ptx):
    """Return the loop depth of each matmul, in order."""
    found, depth = [], 0
    for line in ptx.splitlines():
        if nested := re.search(r"(?:Inner |This )Loop.*Depth=(\d)|in Loop: Header=\S+ Depth=(\d)", line):
            depth = int(nested[1] or nested[2])
        elif re.match(r"\$L__BB|// %bb", line):
            depth = 0
        found += [depth] * ("wgmma.mma_async" in line)
    return found


@pytest.mark.parametrize("name", CASES)
def test_trace_ptx_overhead(name, without_traces, monkeypatch, request):
    if not name.startswith("low-latency"):
        request.getfixturevalue("on_h200")
    requests = []
    built = {}
    traced = True

    compile_kernel = compiling.build

    def build(module, function, types, constants, *options):
        heap = dataclasses.replace(constants["HEAP"], traced=traced)
        requests.append([module, function, types, constants | {"HEAP": heap}, *options])
        built[traced] = compile_kernel(*requests[-1])
        return built[traced]

    monkeypatch.setattr(compiling, "build", build)
    CASES[name]()  # The checks of the kernel's own test hold for both.
    traced = False
    CASES[name]()
    off, on = (built[one]["ptx"] for one in (False, True))
    pickle.dump(requests[-1], without_traces.stdin)
    without_traces.stdin.flush()  # type: ignore[union-attr]
    answer = pickle.load(without_traces.stdout)  # type: ignore[arg-type]
    assert "error" not in answer, answer["error"][-2000:]
    assert instructions(off) == instructions(answer["ptx"])
    assert "%smid" not in off
    assert on.count("%smid") >= 4 and on.count("%globaltimer") > off.count("%globaltimer") + on.count("%smid")
    assert depths(on) == depths(off), "the loops over tiles and over their depth are no longer one"
    for loop in (r"wgmma\.mma_async", r"cp\.async\.bulk", r"cp\.async\.cg", r"wgmma\.wait_group\S* 1;"):
        assert len(re.findall(loop, on)) == len(re.findall(loop, off)), f"{loop}: traces change how loops are pipelined"
