"""`jax-ep trace`: record what each program of a kernel does, and show recorded files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jax_ep import tracing
from jax_ep.core.files import check_writable
from jax_ep.tools import command

_RECORDED = {
    "dispatch": "the kernels of a dispatch, up to the rows of the experts",
    "combine": "the kernel of a combine",
    "moe": "the expert layer, with --backward also its gradients",
    "low-latency": "the layer for a few tokens per rank",
}
_SHOW = "show"
_OUT = "runs/trace.json"


def add_command(commands: Any) -> None:
    """Add `trace` to the command line."""
    summary = "record what each program of a kernel does, and show where the time goes"
    listed = "\n".join(f"  {name:13} {what}" for name, what in _RECORDED.items())
    parser = commands.add_parser(
        "trace",
        help=summary,
        description=f"{summary}.\n\n{listed}\n  {_SHOW:13} recorded files: FILE... [--out MERGED] [--png]; files of"
        " several processes are merged",
        epilog="Options of a recording: jax-ep trace moe --help. ui.perfetto.dev opens the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*_RECORDED, _SHOW], metavar="WHAT")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="such as --model, --tokens, --out, --png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Record an operation, or show files."""
    from jax_ep.tools.benchmark import trace as recording

    if args.what == _SHOW:
        _show_files(args.options)
        return
    given = any(option == "--out" or option.startswith("--out=") for option in args.options)
    recording.main([args.what, *args.options, *([] if given else ["--out", _OUT])], "jax-ep trace")


def _show_files(options: list[str]) -> None:
    from jax_ep.tools.benchmark.trace import draw, show

    parser = command.Parser(prog=f"jax-ep trace {_SHOW}")
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
        for picture in draw(trace, args.out or args.files[0]):
            print(picture)
