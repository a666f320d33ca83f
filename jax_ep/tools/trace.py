"""`jax-ep trace`: record what each program of a kernel does, on one time line for all GPUs, and show recorded files.

    jax-ep trace moe --model deepseek-v3 --tokens 4096 --out trace.json --png

Each operation runs some times, and is then recorded for `--calls` calls. The command writes a file for ui.perfetto.dev,
prints where the time went, kernel by kernel, and compares the time of a call with and without the recording, as the
host sees it. `dispatch` and `combine` each show their own kernels of a round trip. `--processes N` uses one process per
GPU, and writes one file. Without a GPU the kernels run in Triton's interpreter at tiny sizes, which gives an order but
no times. See docs/tracing.md.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

import jax_ep
from jax_ep import tracing
from jax_ep.core.files import check_writable
from jax_ep.tools import command, processes
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.chains import on_each_rank
from jax_ep.tools.benchmark.inputs import DEFAULT, MODELS, Model, expert_mesh, initialize, make_case, make_weights
from jax_ep.tools.command import Default
from jax_ep.tracing import picture

WARMUP, ROUNDS = 3, 16
TOKENS = {"dispatch": 4096, "combine": 4096, "moe": 4096, "low-latency": 128}
_RECORDED = {
    "dispatch": "the kernels of a dispatch, up to the rows of the experts",
    "combine": "the kernel of a combine",
    "moe": "the expert layer, with --backward also its gradients",
    "low-latency": "the layer for a few tokens per rank",
}
_SHOW = "show"

Function = Callable[..., Any]


def add_command(commands: Any) -> None:
    """Add `trace` to the command line."""
    summary = "record what each program of a kernel does, and show where the time goes"
    shown = "recorded files: FILE... [--out MERGED] [--png]; files of several processes are merged"
    epilog = "Options of a recording: jax-ep trace moe --help. ui.perfetto.dev opens the file."
    options = "such as --model, --tokens, --out, --png"
    choices = {**_RECORDED, _SHOW: shown}
    parser = command.add_choice(commands, "trace", summary, choices, epilog=epilog, options=options)
    parser.set_defaults(run=lambda args: (show_files if args.what == _SHOW else record)(args.what, args.options))


def show_files(what: str, options: list[str]) -> None:
    """Print the tables of recorded files; merge and plot them as the options say."""
    parser = command.Parser(prog=f"jax-ep trace {what}")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help="file to merge them into")
    parser.add_argument("--png", action="store_true", help="plot the last launch of each kernel, next to --out")
    args = parser.parse_args(options)
    if args.out is not None:
        check_writable(args.out)
    try:
        trace = tracing.merge(tracing.Trace.load(path) for path in args.files)
    except OSError as error:
        raise ValueError(command.in_one_line(error)) from error
    show(trace)
    if args.out is not None:
        trace.save(args.out)
        print(args.out)
    if args.png:
        draw(trace, args.out or args.files[0])


# --- recording --------------------------------------------------------------------------------------------------------


def recording_options(what: str) -> argparse.ArgumentParser:
    """Return the command line of a recording."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = command.Parser(prog=f"jax-ep trace {what}", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", choices=MODELS, default=DEFAULT, help="default: %(default)s")
    add("--tokens", type=int, default=Default(TOKENS[what], 8), help="per rank (default: %(default)s)")
    add("--ranks", type=int, help="devices, the first of the machine (default: all)")
    add("--routing", choices=["uniform", "zipf"], default="uniform")
    add("--dispatch-mode", choices=["fused", "serial"], help="of moe (default: by the cost model)")
    add("--combine-mode", choices=["scatter", "serial"], help="of moe")
    add("--backward", action="store_true", help="moe with its gradients")
    add("--calls", type=int, default=2, help="calls to record (default: 2)")
    add("--events", type=int, default=1024, help="events to keep of each program (default: 1024)")
    out = "the file, or its folder (default: %(default)s); .gz compresses"
    add("--out", type=Path, default=Path("runs/trace.json"), help=out)
    add("--png", action="store_true", help="plot the last launch of each kernel, next to the file")
    add("--quick", action="store_true", help="tiny sizes; always on without GPUs")
    add("--processes", type=int, default=1, metavar="N", help="one process for each of N GPUs")
    return parser


def record(what: str, options: list[str]) -> None:
    """Record an operation, write the trace and print its tables."""
    parser = recording_options(what)
    args = parser.parse_args(options)
    harness.require_triton()
    if args.png:
        picture.require_matplotlib()
    jax.config.update("jax_num_cpu_devices", harness.CPU_DEVICES)
    if not processes.enter(args.processes):
        return
    on_gpus = jax.default_backend() == "gpu"
    command.fill_in(args, quick=args.quick or not on_gpus)
    mesh = expert_mesh(args.ranks or jax.device_count())
    model = MODELS[args.model]
    if model.experts % mesh.size:
        parser.error(f"--ranks: {mesh.size} ranks, which must divide the {model.experts} experts of the model")
    path = args.out / "trace.json" if args.out.is_dir() else args.out
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    if args.processes == 1:
        initialize(mesh)
    trace = recorded(what, mesh, model, args)
    trace.save(path)
    show(trace)
    print(path)
    if args.png:
        draw(trace, path)
    jax_ep.finalize()


def function_of(what: str, num_experts: int, args: argparse.Namespace) -> Function:
    """Return the operation, a function of one rank's tokens, ids, router weights and expert weights."""
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

    def low_latency(*arrays: Array) -> Array:
        return jax_ep.low_latency_moe(*arrays, **options)

    return {"moe": moe, "low-latency": low_latency}.get(what, round_trip)


def recorded(what: str, mesh: jax.sharding.Mesh, model: Model, args: argparse.Namespace) -> tracing.Trace:
    """Trace some calls of an operation, and print the cost of recording."""
    case = make_case(mesh, args.routing, args.tokens, model)
    weights = make_weights(mesh, model) if what in ("moe", "low-latency") else ()
    arrays = (case.x, case.topk_idx, case.topk_weights, *weights)
    per_rank = on_each_rank(mesh, function_of(what, model.experts, args))
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
    cells = [[name, *timing.microseconds(), f"{ratio:.3f}"] for name, timing, ratio in rows]
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


# --- tables and plots -----------------------------------------------------------------------------------------------


def show(trace: tracing.Trace) -> None:
    """Print the summary of a trace as tables."""
    found = trace.summary()
    unit, scale = ("steps", 1) if trace.is_ordered_only else ("us", 1000)
    kernels, kinds = [], []
    for name, kernel in found["kernels"].items():
        peer = kernel["slowest_peer"]
        last = [_percent(kernel["overlap"]), "" if peer is None else f"device {peer}"]
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


def draw(trace: tracing.Trace, path: Path) -> None:
    """Plot the last launch of each kernel, next to `path`, and print the files."""
    for kernel in sorted({launch.kernel for launch in trace.launches.values()}):
        name = path.name.removesuffix(".gz").removesuffix(".json")
        picture = path.with_name(f"{name}_{kernel}.png")
        trace.only(kernel, last=1).plot(picture)
        print(picture)
