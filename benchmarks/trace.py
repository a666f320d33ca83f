"""What the kernels of an operation do, program by program, on one time line for all GPUs (docs/tracing.md).

    python benchmarks/trace.py moe --model deepseek-v3 --tokens 4096 --out trace.json --png   # also: jax-ep trace moe

Each operation runs some times before it is recorded, and then `--calls` times. It writes a file for ui.perfetto.dev,
prints where the time went, kernel by kernel, and how long a call takes with and without the recording, as the host
sees it, in turns. `dispatch` and `combine` are apart from products and from each other: of the round trip, the launches
of one of the two. With `--processes N` there is a process per GPU, and one file. Without a GPU the kernels run in
Triton's interpreter, on tiny sizes: there is an order and no times.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import tracing
from jax_ep.core.files import check_writable
from jax_ep.tools import bench, command
from jax_ep.tools import trace as tool
from jax_ep.tracing import picture
from lib import harness, processes
from lib.inputs import DEFAULT, MODELS, QUICK, Model, expert_mesh, make_weights, on_ranks, routing

TOKENS = {"dispatch": 4096, "combine": 4096, "moe": 4096, "low-latency": 128}
QUICK_TOKENS = 8
WARMUP, ROUNDS = 3, 16
Function = Callable[..., Any]


def layers(num_experts: int, args: argparse.Namespace) -> dict[str, Function]:
    """Functions of one rank's tokens, ids, weights and matrices."""
    options: dict[str, Any] = {"num_experts": num_experts, "implementation": "triton"}
    schedule = jax_ep.Schedule(dispatch_mode=args.dispatch_mode, combine_mode=args.combine_mode)

    def moe(x: Array, ids: Array, weights: Array, gate_up: Array, down: Array) -> Any:
        layer = partial(jax_ep.moe, schedule=schedule, **options)
        if not args.backward:
            return layer(x, ids, weights, gate_up, down)
        y, transposed = jax.vjp(lambda x, *matrices: layer(x, ids, weights, *matrices), x, gate_up, down)
        return y, transposed(y)

    def round_trip(x: Array, ids: Array, *_: Array) -> Array:
        sent = jax_ep.dispatch(x, ids, **options)
        return jax_ep.combine(sent.tokens, sent.handle, implementation="triton")

    def low_latency(x: Array, ids: Array, weights: Array, gate_up: Array, down: Array) -> Array:
        matrices = [jnp.swapaxes(w, 1, 2) for w in (gate_up, down)]
        return jax_ep.low_latency_moe(x, ids, weights, *matrices, **options)

    return {"moe": moe, "dispatch": round_trip, "combine": round_trip, "low-latency": low_latency}


def inputs(what: str, mesh: jax.sharding.Mesh, model: Model, args: argparse.Namespace) -> tuple[Array, ...]:
    """What these functions take, of all ranks."""
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS[what])
    ids = routing(args.routing, mesh.size * tokens, model, np.random.default_rng(0))
    sharding = jax.NamedSharding(mesh, P("expert"))
    weights = np.full(ids.shape, 1 / model.top_k, np.float32)
    placed = [jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index]) for a in (ids, weights)]
    matrices = make_weights(mesh, model) if what in ("moe", "low-latency") else ()
    return (on_ranks(mesh, (tokens, model.hidden), 2), *placed, *matrices)


def recorded(what: str, mesh: jax.sharding.Mesh, model: Model, args: argparse.Namespace) -> tracing.Trace:
    """The trace of some calls of an operation; prints what recording costs."""
    arrays = inputs(what, mesh, model, args)
    function = layers(model.experts, args)[what]
    per_rank = jax.shard_map(function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    call = partial(jax.jit(per_rank).lower(*arrays).compile(), *arrays)
    with tracing.record(events_per_program=args.events):
        traced = partial(jax.jit(per_rank).lower(*arrays).compile(), *arrays)
        for _ in range(WARMUP):
            jax.block_until_ready(traced())
    with tracing.record(events_per_program=args.events) as recording:
        for _ in range(args.calls):
            jax.block_until_ready(traced())
    if jax.default_backend() == "gpu":
        show_cost(what, call, traced, args)
    trace = together(recording.trace)
    if what in ("dispatch", "combine"):
        kernels = {launch.kernel for launch in trace.launches.values()}
        of_combine = {name for name in kernels if name.startswith("combine")}
        return trace.only(*(of_combine if what == "combine" else kernels - of_combine))
    return trace


def show_cost(what: str, call: Function, traced: Function, args: argparse.Namespace) -> None:
    """How long a call takes: without a recording, with kernels that could record, and with those that do."""
    plain = harness.measure_interleaved({"off": call, "compiled in": traced}, ROUNDS)
    with tracing.record(events_per_program=args.events):
        recording = harness.measure_interleaved({"off": call, "recording": traced}, ROUNDS)
    rows = [("off", plain["off"], 1.0)]
    rows.append(("compiled in, not recording", plain["compiled in"], plain["compiled in"].ratio_to(plain["off"])))
    rows.append(("recording", recording["recording"], recording["recording"].ratio_to(recording["off"])))
    cells = [[name, *timing.microseconds(1), f"{ratio:.3f}"] for name, timing, ratio in rows]
    harness.show_table(f"{what}: what a trace costs", ["kernels", "us per call", "quartiles", "of off"], cells)


def together(trace: tracing.Trace) -> tracing.Trace:
    """The traces of all processes as one, in each of them."""
    if jax.process_count() == 1:
        return trace
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        trace.save(path)
        data = np.frombuffer(gzip.compress(path.read_bytes()), np.uint8)
        sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).reshape(-1)
        padded = np.zeros((sizes.max(),), np.uint8)
        padded[: data.size] = data
        parts = []
        for size, part in zip(sizes, multihost_utils.process_allgather(padded), strict=True):
            path.write_bytes(np.asarray(part, np.uint8)[:size].tobytes())
            parts.append(tracing.Trace.load(path))
    return tracing.merge(parts)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = command.Parser(
        prog=bench.program_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=TOKENS)
    parser.add_argument("--model", choices=MODELS, help=f"default: {DEFAULT}; --quick: {QUICK}")
    parser.add_argument("--tokens", type=int, help=f"per rank (default: {TOKENS}; --quick: {QUICK_TOKENS})")
    parser.add_argument("--ranks", type=int, help="devices, the first of the machine (default: all)")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--dispatch-mode", choices=["fused", "serial"], help="of moe (default: what should be fastest)")
    parser.add_argument("--combine-mode", choices=["scatter", "serial"], help="of moe")
    parser.add_argument("--backward", action="store_true", help="moe with its gradients")
    parser.add_argument("--calls", type=int, default=2, help="calls that are recorded (default: 2)")
    parser.add_argument("--events", type=int, default=1024, help="kept of each program (default: 1024)")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="the file, or its folder; .gz compresses")
    parser.add_argument("--png", action="store_true", help="a picture of the last launch of each kernel beside it")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; what a machine without GPUs does anyway")
    processes.add_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Records, writes and prints."""
    parser = options()
    args = parser.parse_args(arguments)
    tool.require_triton()
    if args.png:
        picture.require_matplotlib()
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    if processes.enter(args.processes, float) is None:  # no figure is needed beforehand
        return
    on_gpus = jax.default_backend() == "gpu"
    args.quick |= not on_gpus
    mesh, model = (
        expert_mesh(args.ranks or jax.device_count()),
        MODELS[args.model or (QUICK if args.quick else DEFAULT)],
    )
    if model.experts % mesh.size:
        parser.error(f"--ranks: {mesh.size} ranks, which must divide the {model.experts} experts of the model")
    path = args.out / "trace.json" if args.out.is_dir() else args.out
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    if args.processes == 1:
        jax_ep.init(mesh, transport=None if on_gpus else "shared_memory")
    trace = recorded(args.what, mesh, model, args)
    trace.save(path)
    tool.show(trace)
    print(path)
    if args.png:
        for drawn in tool.draw(trace, path):
            print(drawn)
    jax_ep.finalize()


if __name__ == "__main__":
    harness.run(main)
