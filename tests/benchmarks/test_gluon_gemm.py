"""The Gluon probes compile for Hopper without a GPU, and keep all sums in registers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gluon/compile.py"


@pytest.mark.parametrize(("name", "products"), [("fp8", 48), ("bf16", 112)])
def test_gluon_kernel_compiles_without_spills(name: str, products: int) -> None:
    done = subprocess.run([sys.executable, SCRIPT, name], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = {key: int(value) for key, value in re.findall(r"(warps|products|spilled) (\d+)", done.stdout)}
    assert facts == {"warps": 12, "products": products, "spilled": 0}, done.stdout
