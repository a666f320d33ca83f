"""Programs of this folder in separate processes, which contain their side effects."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def environment(**changes):
    """Return an environment for a second program, with the tests' modules and little GPU memory."""
    path = [str(FOLDER.parent.parent), str(FOLDER.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    return os.environ | own | changes


def run(name, *arguments):
    """Run a program on the same devices; return the last line of its output, parsed from JSON, and its output."""
    command = [sys.executable, str(FOLDER / name), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    output = f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, output
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"output": output}
