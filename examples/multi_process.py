"""Train an expert layer in several processes, with experts sharded over the devices of all of them.

    python examples/multi_process.py --local 2          # two processes on this machine, with one command
    python examples/multi_process.py --coordinator host:1234 --num-processes 2 --process-id 0     # in each process
    srun python examples/multi_process.py               # SLURM, and mpirun of Open MPI: JAX finds the processes

Process 0 prints the loss and the tokens per second. Without accelerators each process has four virtual CPU devices.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from jax_ep.tools.command import Parser, count_or_zero, run
from lm.devices import prepare_cpu_devices

if TYPE_CHECKING:
    import jax

Params = dict[str, Any]
_MOST_ON_CPU = 64


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local", type=int, metavar="N", help="start N processes on this machine that connect to each other")
    add(
        "--coordinator", type=address, metavar="HOST:PORT", help="address of process 0; default: from SLURM or Open MPI"
    )
    add("--num-processes", type=int, metavar="N")
    add("--process-id", type=count_or_zero, metavar="I", help="number of this process, from 0")
    add(
        "--local-device",
        type=count_or_zero,
        metavar="I",
        help="the one GPU of this process; default: from SLURM, or all",
    )
    add("--timeout", type=int, default=60, metavar="SECONDS", help="for connecting the processes")
    add("--devices", type=int, default=4, help="virtual CPU devices of each process, without accelerators")
    add(
        "--nodes",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="a jax_ep.Topology of N nodes instead of one axis; without N, each process is a node",
    )
    add("--steps", type=int, default=20)
    add("--tokens", type=int, default=256, help="per device")
    add("--hidden", type=int, default=128)
    add("--intermediate", type=int, default=256, help="width of one expert")
    add("--experts", type=int, default=16)
    add("--top-k", type=int, default=2)
    add("--learning-rate", type=float, default=1.0)
    add("--implementation", help="jax_ep implementation, e.g. xla; default: the best that fits")
    args = parser.parse_args(arguments)
    plain = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in plain) and None in plain:
        parser.error(
            "--coordinator, --num-processes and --process-id go together; SLURM and Open MPI need none of them"
        )
    if args.local is not None and args.coordinator is not None:
        parser.error("--local chooses the coordinator itself: leave --coordinator out")
    return args


def address(text: str) -> str:
    """Check the form of an address."""
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r}, expected HOST:PORT with a port below 65536")
    return text


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.local is not None:
        return start_here(args.local, sys.argv[1:] if arguments is None else arguments)
    prepare_cpu_devices(args.devices)
    join(args)
    train(args)
    import jax

    import jax_ep

    jax_ep.finalize()
    jax.distributed.shutdown()
    return 0


def start_here(count: int, arguments: list[str]) -> int:
    """Start the processes, and end all if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    at = next(i for i, argument in enumerate(arguments) if argument.startswith("--local"))
    others = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    gpus = number_of_gpus()
    if count > (gpus or _MOST_ON_CPU):
        raise SystemExit(f"--local {count} needs a GPU for each process, or at most {_MOST_ON_CPU} without GPUs")
    command = [sys.executable, __file__, *others, "--coordinator", address, "--num-processes", str(count)]
    own = [["--process-id", str(i), *(["--local-device", str(i)] if gpus else [])] for i in range(count)]
    processes = [subprocess.Popen([*command, *mine]) for mine in own]
    try:
        while any(process.poll() is None for process in processes):
            failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed:
                time.sleep(2)  # Give the others time to report it.
                print(f"processes {failed} have failed: ending the others", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    return max(abs(process.returncode) for process in processes)


def number_of_gpus() -> int:
    """Count NVIDIA GPUs without JAX, which would reserve their memory."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def join(args: argparse.Namespace) -> None:
    """Join the other processes, or explain why that is not possible."""
    own: dict[str, Any] = {"initialization_timeout": args.timeout}
    if args.local_device is not None:
        own["local_device_ids"] = [args.local_device]
    if args.coordinator is not None:
        if not 0 <= args.process_id < args.num_processes:
            raise SystemExit(f"--process-id {args.process_id}, expected 0 to {args.num_processes - 1}")
        if args.process_id:
            wait_for_coordinator(args.coordinator, args.timeout)
        own |= {"coordinator_address": args.coordinator, "cluster_detection_method": "deactivate"}
        own |= {"num_processes": args.num_processes, "process_id": args.process_id}
    import jax

    try:
        jax.distributed.initialize(**own)
    except ValueError as error:
        raise ValueError(f"{error} Pass --local N or --coordinator, or start it with srun or mpirun.") from error


def wait_for_coordinator(address: str, timeout_s: float) -> None:
    """Check the connection first, because JAX aborts the process without an explanation."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"nothing answers at {address} within {timeout_s:g} s ({error}): start process 0 on that host, and"
                    " let its port through firewalls"
                ) from error
        time.sleep(0.1)


def make_mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    """Create a mesh with all devices on the expert axis, or with an axis for nodes and one for devices of a node."""
    import jax

    devices, processes = jax.device_count(), jax.process_count()
    if args.experts % devices:
        raise SystemExit(
            f"--experts {args.experts} is not divisible by the {devices} devices of {processes} processes:"
            f" expected a multiple of {devices}"
        )
    if devices != processes * jax.local_device_count():
        raise SystemExit(
            f"process {jax.process_index()} has {jax.local_device_count()} of {devices} devices, expected the same"
            f" number in each of the {processes} processes"
        )
    # Automatic axes: arguments are resharded to what the layer needs.
    automatic = jax.sharding.AxisType.Auto
    if args.nodes is not None:
        nodes = args.nodes or processes
        if processes % nodes:
            raise SystemExit(f"--nodes {nodes} does not divide the {processes} processes: expected a divisor")
        return jax.make_mesh((nodes, devices // nodes), ("node", "expert"), axis_types=(automatic,) * 2)
    return jax.make_mesh((devices,), ("expert",), axis_types=(automatic,))


def train(args: argparse.Namespace) -> None:
    """Fit the layer to a fixed function of random tokens, by gradient descent."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_ep
    from jax_ep.sharding import MeshAxes, sharded_moe

    mesh = make_mesh(args)
    # Tokens go once to each node, and from there to the ranks inside it.
    axis_name = "expert" if args.nodes is None else jax_ep.Topology(node="node", local="expert")
    context = jax_ep.init(mesh, axis_name=axis_name)  # All processes meet here, with the same arguments.
    axes = MeshAxes(axis_name)
    specs = axes.specs
    layer = sharded_moe(mesh, num_experts=args.experts, axes=axes, implementation=args.implementation)
    shardings = {
        "router": jax.NamedSharding(mesh, jax.P()),
        "w_gate_up": jax.NamedSharding(mesh, specs.w_gate_up),
        "w_down": jax.NamedSharding(mesh, specs.w_down),
    }
    tokens = jax.NamedSharding(mesh, specs.tokens)

    @partial(jax.jit, out_shardings=shardings)
    def start(key: jax.Array) -> Params:
        keys, hidden, size = jax.random.split(key, 3), args.hidden, args.intermediate
        return {
            "router": jax.random.normal(keys[0], (hidden, args.experts)) * hidden**-0.5,
            "w_gate_up": jax.random.normal(keys[1], (args.experts, hidden, 2 * size)) * hidden**-0.5,
            "w_down": jax.random.normal(keys[2], (args.experts, size, hidden)) * size**-0.5,
        }

    def loss(params: Params, x: jax.Array) -> jax.Array:
        routing = jax_ep.topk_router(x @ params["router"], args.top_k)
        y = layer(x, routing.topk_idx, routing.topk_weights, params["w_gate_up"], params["w_down"])
        return jnp.mean((y - jnp.roll(jnp.tanh(x), 1, axis=1)) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        scale = args.learning_rate * args.experts
        return jax.tree.map(lambda p, g: p - scale * g, params, gradients), value

    params = start(jax.random.key(0))
    number = args.tokens * jax.device_count()
    rng = np.random.default_rng(jax.process_index())  # Each process has its own tokens.
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    say(
        f"{jax.process_count()} processes with {jax.local_device_count()} {jax.devices()[0].device_kind} each, mesh"
        f" {dict(mesh.shape)}, transport {context.transport}",
        flush=True,
    )
    for i in range(args.steps):
        local = rng.standard_normal((args.tokens * jax.local_device_count(), args.hidden), np.float32)
        # With the global shape, so that a process with another number of tokens gets an error.
        x = jax.make_array_from_process_local_data(tokens, local, (number, args.hidden))
        begin = time.perf_counter()
        params, value = step(params, x)
        value.block_until_ready()
        rate = number / (time.perf_counter() - begin)
        note = " (with compilation)" if i == 0 else ""
        say(f"step {i}: loss {float(value):.4f}, {rate:,.0f} tokens/s{note}", flush=True)


if __name__ == "__main__":
    run("multi_process.py", main)
