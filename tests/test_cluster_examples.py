"""Files of examples/cluster parse, and start commands that the example understands."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import multi_process

FOLDER = Path(multi_process.__file__).parent / "cluster"


def arguments(command: str) -> list[str]:
    """What follows `examples/multi_process.py` in a shell command."""
    words = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "1"))
    return words[words.index("examples/multi_process.py") + 1 :]


def test_sbatch_is_a_script_that_runs_the_example() -> None:
    path = FOLDER / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    (command,) = (line for line in path.read_text().splitlines() if line.startswith("srun"))
    assert multi_process.parse(arguments(command)).nodes


def test_jobset_runs_the_example_in_every_pod() -> None:
    yaml = pytest.importorskip("yaml")
    jobset: Any = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    parsed = multi_process.parse(arguments(container["command"][-1]))
    assert parsed.num_processes == job["template"]["spec"]["completions"]
    host, port = parsed.coordinator.split(":")
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(port) == container["ports"][0]["containerPort"]


def test_dockerfile_installs_extras_that_exist() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert all(f"\n{name} = [" in project for name in extras.split(","))
