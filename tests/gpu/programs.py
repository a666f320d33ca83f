"""Programs of this folder in processes of their own: what they provoke stays with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def environment(**changes: str) -> dict[str, str]:
    """For a program beside this one: it finds the tests' modules, and takes little of the memory that is left."""
    path = [str(FOLDER.parent.parent), str(FOLDER.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    return os.environ | own | changes


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Runs a program on the same devices; what it prints last, a line of JSON, and its output."""
    command = [sys.executable, str(FOLDER / name), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    output = f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, output
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"output": output}
