"""`jax-ep trace`: what the kernels of an operation do, program by program; and what recorded files say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_ep import tracing
from jax_ep.tools import bench

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


def run(args: argparse.Namespace) -> int:
    """Records an operation, by the script of the benchmarks, or shows files."""
    if args.what == _SHOW:
        return _show_files(args.options)
    bench.call(bench.folder() / "trace.py", [args.what, *args.options], out="runs/trace.json")
    return 0


def _show_files(options: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"jax-ep trace {_SHOW}")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help="where to write them as one")
    parser.add_argument("--png", action="store_true", help="a picture of the last launch of each kernel, beside --out")
    args = parser.parse_args(options)
    try:
        trace = tracing.merge(tracing.Trace.load(path) for path in args.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(trace)
    if args.out is not None:
        trace.save(args.out)
        print(args.out)
    if args.png:
        for picture in draw(trace, args.out or args.files[0]):
            print(picture)
    return 0


def show(trace: tracing.Trace) -> None:
    """Prints the summary of a trace as tables.

    Raises:
      ImportError: rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("jax-ep trace needs rich: pip install 'jax-ep[tools]'") from error
    found = trace.summary()
    unit, scale = ("steps", 1) if trace.is_ordered_only else ("us", 1000)
    title = f"Kernels of {len(trace.devices)} device(s)" + (", in the interpreter: an order, no times" * (scale == 1))
    kernels = Table("kernel", "launches", f"{unit} each", "role", "programs", "busy", "waiting", "idle", title=title)
    kernels.add_column("overlap")
    kernels.add_column("slowest peer")
    kinds = Table("kernel", "event", "count", f"mean {unit}", "of all programs' time", title="Events")
    for name, kernel in found["kernels"].items():
        shares = [_percent(kernel[share]) for share in ("busy", "waiting", "idle")]
        last = [_percent(kernel["overlap"]), _text(kernel["slowest_peer"])]
        kernels.add_row(name, str(kernel["launches"]), f"{kernel['duration'] / scale:.1f}", "all", "", *shares, *last)
        for role, one in kernel["roles"].items():
            shares = [_percent(one[share]) for share in ("busy", "waiting", "idle")]
            kernels.add_row("", "", "", role, f"{one['programs']:.1f}", *shares)
        for kind, one in kernel["kinds"].items():
            kinds.add_row(name, kind, str(one["count"]), f"{one['mean'] / scale:.2f}", _percent(one["share"]))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(kernels)
    console.print(kinds)
    console.print(_clocks(found, scale))


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
