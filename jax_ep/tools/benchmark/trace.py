"""Record the kernels of an operation program by program, on one time line for all GPUs (docs/tracing.md).

    jax-ep trace moe --model deepseek-v3 --tokens 4096 --out trace.json --png

Each operation runs some times, and is then recorded for `--calls` calls. The command writes a file for ui.perfetto.dev,
prints where the time went, kernel by kernel, and compares the time of a call with and without the recording, as the
host sees it. `dispatch` and `combine` each show their own kernels of a round trip. `--processes N` uses one process per
GPU, and writes one file. Without a GPU the kernels run in Triton's interpreter at tiny sizes, which gives an order but
no times.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import tracing
from jax_ep.core.files import check_writable
from jax_ep.tools import command
from jax_ep.tools.benchmark import harness, processes
from jax_ep.tools.benchmark.inputs import DEFAULT, MODELS, QUICK, Model, expert_mesh, make_weights, on_ranks, routing
from jax_ep.tracing import picture

TOKENS = {"dispatch": 4096, "combine": 4096, "moe": 4096, "low-latency": 128}
QUICK_TOKENS = 8
WARMUP, ROUNDS = 3, 16
Function = Callable[..., Any]


def layers(num_experts: int, args: argparse.Namespace) -> dict[str, Function]:
    """Return functions of one rank's tokens, ids, router weights and expert weights."""
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
        return jax_ep.low_latency_moe(x, ids, weights, gate_up, down, **options)

    return {"moe": moe, "dispatch": round_trip, "combine": round_trip, "low-latency": low_latency}


def inputs(what: str, mesh: jax.sharding.Mesh, model: Model, args: argparse.Namespace) -> tuple[Array, ...]:
    """Return the arguments of these functions, for all ranks."""
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS[what])
    ids = routing(args.routing, mesh.size * tokens, model, np.random.default_rng(0))
    sharding = jax.NamedSharding(mesh, P("expert"))
    weights = np.full(ids.shape, 1 / model.top_k, np.float32)
    placed = [jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index]) for a in (ids, weights)]
    matrices = make_weights(mesh, model) if what in ("moe", "low-latency") else ()
    return (on_ranks(mesh, (tokens, model.hidden), 2), *placed, *matrices)


def recorded(what: str, mesh: jax.sharding.Mesh, model: Model, args: argparse.Namespace) -> tracing.Trace:
    """Trace some calls of an operation, and print the cost of recording."""
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
    trace = merged(recording.trace)
    if what in ("dispatch", "combine"):
        kernels = {launch.kernel for launch in trace.launches.values()}
        of_combine = {name for name in kernels if name.startswith("combine")}
        return trace.only(*(of_combine if what == "combine" else kernels - of_combine))
    return trace


def show_cost(what: str, call: Function, traced: Function, args: argparse.Namespace) -> None:
    """Print the time of a call: without a recording, with kernels that can record, and with a recording."""
    plain = harness.measure_interleaved({"off": call, "compiled in": traced}, ROUNDS)
    with tracing.record(events_per_program=args.events):
        recording = harness.measure_interleaved({"off": call, "recording": traced}, ROUNDS)
    rows = [("off", plain["off"], 1.0)]
    rows.append(("compiled in, not recording", plain["compiled in"], plain["compiled in"].ratio_to(plain["off"])))
    rows.append(("recording", recording["recording"], recording["recording"].ratio_to(recording["off"])))
    cells = [[name, *timing.microseconds(1), f"{ratio:.3f}"] for name, timing, ratio in rows]
    harness.show_table(f"{what}: cost of a trace", ["kernels", "us per call", "quartiles", "of off"], cells)


def merged(trace: tracing.Trace) -> tracing.Trace:
    """Merge the traces of all processes, in each process."""
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


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command.Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=TOKENS)
    parser.add_argument("--model", choices=MODELS, help=f"default: {DEFAULT}; --quick: {QUICK}")
    parser.add_argument("--tokens", type=int, help=f"per rank (default: {TOKENS}; --quick: {QUICK_TOKENS})")
    parser.add_argument("--ranks", type=int, help="devices, the first of the machine (default: all)")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--dispatch-mode", choices=["fused", "serial"], help="of moe (default: by the cost model)")
    parser.add_argument("--combine-mode", choices=["scatter", "serial"], help="of moe")
    parser.add_argument("--backward", action="store_true", help="moe with its gradients")
    parser.add_argument("--calls", type=int, default=2, help="calls to record (default: 2)")
    parser.add_argument("--events", type=int, default=1024, help="events to keep of each program (default: 1024)")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="the file, or its folder; .gz compresses")
    parser.add_argument("--png", action="store_true", help="plot the last launch of each kernel, next to the file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; always on without GPUs")
    processes.add_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Record an operation, write the trace and print its tables."""
    parser = options(prog)
    args = parser.parse_args(arguments)
    harness.require_triton()
    if args.png:
        picture.require_matplotlib()
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    if processes.enter(args.processes, float) is None:  # no figure is needed
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
    show(trace)
    print(path)
    if args.png:
        for drawn in draw(trace, path):
            print(drawn)
    jax_ep.finalize()


# --- tables and plots -----------------------------------------------------------------------------------------------


def show(trace: tracing.Trace) -> None:
    """Print the summary of a trace as tables."""
    found = trace.summary()
    unit, scale = ("steps", 1) if trace.is_ordered_only else ("us", 1000)
    kernels, kinds = [], []
    for name, kernel in found["kernels"].items():
        last = [_percent(kernel["overlap"]), _text(kernel["slowest_peer"])]
        duration = f"{kernel['duration'] / scale:.1f}"
        kernels.append([name, kernel["launches"], duration, "all", "", *_shares(kernel), *last])
        for role, one in kernel["roles"].items():
            kernels.append(["", "", "", role, f"{one['programs']:.1f}", *_shares(one), "", ""])
        for kind, one in kernel["kinds"].items():
            kinds.append([name, kind, one["count"], f"{one['mean'] / scale:.2f}", _percent(one["share"])])
    title = f"Kernels of {len(trace.devices)} device(s)" + (", in the interpreter: order, no times" * (scale == 1))
    columns = ["kernel", "launches", f"{unit} each", "role", "programs", "busy", "waiting", "idle", "overlap"]
    harness.show_table(title, [*columns, "slowest peer"], kernels)
    harness.show_table("Events", ["kernel", "event", "count", f"mean {unit}", "of all programs' time"], kinds)
    print(_clocks(found, scale))


def _shares(sums: dict[str, Any]) -> list[str]:
    return [_percent(sums[share]) for share in ("busy", "waiting", "idle")]


def _clocks(found: dict[str, Any], scale: int) -> str:
    """Describe how exact the times are."""
    lines = []
    if scale > 1:
        errors = [error for error in found["error_ns"].values() if error is not None]
        error_us = max(errors, default=0) / scale
        lines.append(f"clocks aligned by the all-to-all, to {error_us:.2f} us; their step is {found['step_ns']} ns")
        lost = [device for device, error in found["error_ns"].items() if error is None]
        lines += [f"device {device} has no all-to-all with the first one: its clock is not aligned" for device in lost]
        if found["relaxed_ns"]:
            lines.append(f"clocks drifted by {found['relaxed_ns'] / scale:.2f} us during the recording")
    if dropped := sum(found["num_dropped"].values()):
        lines.append(f"{dropped} events were dropped: raise --events, or record fewer calls")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _text(value: object) -> str:
    return "" if value is None else f"device {value}"


def draw(trace: tracing.Trace, path: Path) -> Iterator[Path]:
    """Plot the last launch of each kernel, next to `path`."""
    for kernel in sorted({launch.kernel for launch in trace.launches.values()}):
        name = path.name.removesuffix(".gz").removesuffix(".json")
        picture = path.with_name(f"{name}_{kernel}.png")
        trace.only(kernel, last=1).plot(picture)
        yield picture
