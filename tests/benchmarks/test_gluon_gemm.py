"""The Gluon probe compiles for Hopper without a GPU, and keeps all sums in registers."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/gluon/compile.py"


def test_gluon_kernel_compiles_without_spills() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = {key: int(value) for key, value in re.findall(r"(warps|products|spilled) (\d+)", done.stdout)}
    assert facts == {"warps": 12, "products": 48, "spilled": 0}, done.stdout
