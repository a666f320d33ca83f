"""The files of `examples/cluster`: they parse, and start `examples/multi_process.py` with arguments that fit."""

import re
import shlex
import subprocess
import tomllib

import pytest

import multi_process
from harness import ROOT

CLUSTER = ROOT / "examples" / "cluster"
pytestmark = pytest.mark.skipif(not CLUSTER.is_dir(), reason="not a source checkout")
INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR", "CMD", "ENV", "ARG", "ENTRYPOINT", "EXPOSE", "LABEL", "USER"}


def arguments_of(command, **variables):
    """Return the parsed arguments of the program that a shell command starts."""
    for name, value in variables.items():
        command = command.replace(f"${name}", value)
    program, *arguments = re.search(r"python (.*)", command)[1].split()
    assert (ROOT / program).is_file()
    return multi_process.parse(shlex.split(" ".join(arguments)))


def test_cluster_sbatch():
    path = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = {name: int(number) for name, number in re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE)}
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # JAX gives a process of SLURM one GPU
    args = arguments_of(text.splitlines()[-1], SLURM_NNODES=str(options["nodes"]))
    assert args.nodes == options["nodes"] and args.coordinator is None
    assert args.experts % (options["nodes"] * options["gpus-per-node"]) == 0


def test_cluster_jobset():
    jobset = pytest.importorskip("yaml").safe_load((CLUSTER / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,), name = jobset["spec"]["replicatedJobs"], jobset["metadata"]["name"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    shell, option, command = container["command"]
    assert (shell, option, spec["completionMode"]) == ("bash", "-c", "Indexed")
    args = arguments_of(command, JOB_COMPLETION_INDEX="1")
    (port,) = (entry["containerPort"] for entry in container["ports"])
    assert args.coordinator == f"{name}-{job['name']}-0-0.{name}:{port}"  # the name of the first pod
    assert args.num_processes == spec["parallelism"] == spec["completions"]
    assert (args.process_id, args.nodes) == (1, 0)
    assert args.experts % (args.num_processes * container["resources"]["limits"]["nvidia.com/gpu"]) == 0
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_cluster_dockerfile():
    lines = [line for line in (CLUSTER / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    commands = [line.split() for line in lines]
    assert {instruction for instruction, *_ in commands} <= INSTRUCTIONS and commands[0][0] == "FROM"
    sources = [rest[0] for instruction, *rest in commands if instruction == "COPY" and rest[0][:2] != "--"]
    assert sources and all((ROOT / source).exists() for source in sources)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"whl\)\[([\w,]+)\]", "\n".join(lines))
    assert len(asked) == 1 and set(asked[0].split(",")) <= set(extras)
