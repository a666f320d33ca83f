"""`jax-ep trace`: what the kernels of an operation do, program by program; and what recorded files say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_ep import tracing
from jax_ep.core.files import check_writable
from jax_ep.tools import bench, command

_RECORDED = {
    "dispatch": "of the round trip of tokens, the launches up to the rows of the experts",
    "combine": "of the same, the launch that brings them back",
    "moe": "the expert layer, with --backward and its gradients",
    "low-latency": "the layer for a few tokens per rank",
}
_SHOW = "show"


def add_command(commands: Any) -> None:
    """Adds `trace` to the command line."""
    summary = "record what each program of a kernel does, and show where the time goes"
    listed = "\n".join(f"  {name:13} {what}" for name, what in _RECORDED.items())
    parser = commands.add_parser(
        "trace",
        help=summary,
        description=f"{summary}.\n\n{listed}\n  {_SHOW:13} recorded files: FILE... [--out MERGED] [--png]; those of"
        " several processes are merged",
        epilog="Options of a recording: jax-ep trace moe --help. ui.perfetto.dev opens the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*_RECORDED, _SHOW], metavar="WHAT")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="such as --model, --tokens, --out, --png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Record an operation, by the script of the benchmarks, or show files."""
    if args.what == _SHOW:
        _show_files(args.options)
    else:
        bench.call("trace.py", [args.what, *args.options], program="jax-ep trace", out="runs/trace.json")


def _show_files(options: list[str]) -> None:
    parser = command.Parser(prog=f"jax-ep trace {_SHOW}")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help="where to write them as one")
    parser.add_argument("--png", action="store_true", help="a picture of the last launch of each kernel, beside --out")
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
        for picture in draw(trace, args.out or args.files[0]):
            print(picture)


def require_triton() -> None:
    """Raise an ImportError that names the remedy where Triton, in which kernels are written, is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError("the kernels need Triton: pip install '.[cuda13]', or triton without a GPU") from error


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
    title = f"Kernels of {len(trace.devices)} device(s)" + (", in the interpreter: an order, no times" * (scale == 1))
    columns = ["kernel", "launches", f"{unit} each", "role", "programs", "busy", "waiting", "idle", "overlap"]
    show_table = bench.library("harness").show_table
    show_table(title, [*columns, "slowest peer"], kernels)
    show_table("Events", ["kernel", "event", "count", f"mean {unit}", "of all programs' time"], kinds)
    print(_clocks(found, scale))


def _shares(sums: dict[str, Any]) -> list[str]:
    return [_percent(sums[share]) for share in ("busy", "waiting", "idle")]


def _clocks(found: dict[str, Any], scale: int) -> str:
    """What the reader must know of the times."""
    lines = []
    if scale > 1:
        errors = [error for error in found["error_ns"].values() if error is not None]
        error_us = max(errors, default=0) / scale
        lines.append(f"clocks aligned by the exchange, to {error_us:.2f} us; their step is {found['step_ns']} ns")
        lost = [device for device, error in found["error_ns"].items() if error is None]
        lines += [
            f"device {device} has exchanged nothing with the first one: its clock is not aligned" for device in lost
        ]
        if found["relaxed_ns"]:
            lines.append(f"clocks drifted by {found['relaxed_ns'] / scale:.2f} us in the recording")
    if dropped := sum(found["num_dropped"].values()):
        lines.append(f"{dropped} events had no room: raise --events, or record fewer calls")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _text(value: object) -> str:
    return "" if value is None else f"device {value}"


def draw(trace: tracing.Trace, path: Path) -> Iterator[Path]:
    """Pictures of the last launch of each kernel, beside `path`."""
    for kernel in sorted({launch.kernel for launch in trace.launches.values()}):
        name = path.name.removesuffix(".gz").removesuffix(".json")
        picture = path.with_name(f"{name}_{kernel}.png")
        trace.only(kernel, last=1).plot(picture)
        yield picture
