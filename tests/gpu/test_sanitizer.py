"""compute-sanitizer finds no errors in a dispatch and a combine on one GPU."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import programs
import pytest

ERRORS = 86  # The exit status if errors were found.
KERNELS = ("dispatch", "combine", "plan")
TOOLS = {
    "memcheck": ["--leak-check", "no", "--report-api-errors", "no"],  # JAX makes driver calls that fail.
    "racecheck": [option for name in KERNELS for option in ("--kernel-name", f"kernel_substring={name}")],
    # initcheck must see all writes, so it also checks XLA's kernels, and some of these read uninitialized memory.
    "initcheck": ["--print-limit", "1000"],
}


def places():
    """Yield paths where compute-sanitizer may be."""
    if found := shutil.which("compute-sanitizer"):
        yield Path(found)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for pattern in ("cuda*/bin", "cuda*/compute-sanitizer", "cuda*/extras/compute-sanitizer"):
        yield from (folder / "compute-sanitizer" for folder in sorted(Path("/usr/local").glob(pattern)))
    yield from sorted(packages.glob("**/bin/compute-sanitizer"))
    yield from sorted(Path("/opt/nvidia").glob("**/compute-sanitizer"))


@pytest.fixture
def sanitizer(on_gpu):
    found = next((path for path in places() if path.is_file()), None)
    if found is None:
        pytest.skip("there is no compute-sanitizer on this machine")
    return str(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_no_errors(tool, one_process, sanitizer):
    options = ["--tool", tool, "--error-exitcode", str(ERRORS), *TOOLS[tool]]
    options += ["--target-processes", "application-only"]  # Not the assembler that JAX starts.
    command = [sanitizer, *options, sys.executable, str(programs.FOLDER / "one_rank.py")]
    # Give every array a separate allocation, so that accesses past its end are invalid.
    environment = programs.environment(CUDA_VISIBLE_DEVICES="0", XLA_PYTHON_CLIENT_ALLOCATOR="platform")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    output = f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    print(output)
    for reason in ("Device not supported", "not supported on this", "Unable to find injection library"):
        if reason in output:
            pytest.skip(f"compute-sanitizer cannot work here: {reason}")
    assert '{"right": [true, true, true]}' in done.stdout, output
    ours = [line for line in done.stdout.splitlines() if re.search(rf"\bat ({'|'.join(KERNELS)})\+0x", line)]
    assert not ours, output
    if tool != "initcheck":
        assert done.returncode == 0, output
        assert re.search("ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", done.stdout), output
