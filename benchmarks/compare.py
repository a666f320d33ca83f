"""Compare the speed of the public operations of this checkout with that of another.

    git worktree add ../before COMMIT
    python benchmarks/compare.py --against ../before

Processes of both checkouts alternate in the order a b b a, so that neither has the cooler GPU. Each times all
operations as chains of calls, with the benchmark of this checkout. Writes results/compare.json. An operation counts as
slower from `--tolerance` on, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.harness import Report, Timing

MODEL, TOKENS, DECODED_TOKENS = "qwen3-235b", 4096, 128
QUICK = ("tiny", 32, 8)
HERE = Path(__file__).resolve().parents[1]
NAMES = ("this", "other")


def run(checkout: Path, sizes: tuple[str, int, int], rounds: int) -> dict[str, list[float]]:
    """Measure samples of each operation, in a process that imports the package from a checkout."""
    script = HERE / "benchmarks" / "public_operations.py"
    path = [str(checkout), os.environ.get("PYTHONPATH", "")]
    values = zip(("--model", "--tokens", "--decoded-tokens", "--rounds"), (*sizes, rounds), strict=True)
    command = [sys.executable, str(script), *(str(word) for pair in values for word in pair)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"compare.py: the operations of {checkout} ended with exit status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    if Path(found["package"]).resolve() != checkout:
        sys.exit(f"compare.py: the jax_ep of {found['package']} was imported instead of that of {checkout}")
    return found["samples"]


def main() -> None:
    """Run the processes of both checkouts, and compare their times."""
    options = harness.parser(__doc__, "compare", rounds=12)
    options.add_argument("--against", type=Path, required=True, metavar="FOLDER", help="the other checkout")
    options.add_argument(
        "--tolerance", type=float, default=1.03, help="ratio of times that counts as slower (default: 1.03)"
    )
    args = harness.parse(options)
    sizes = QUICK if args.quick else (MODEL, TOKENS, DECODED_TOKENS)
    checkouts = dict(zip(NAMES, (HERE, args.against.resolve()), strict=True))
    if not (checkouts["other"] / "jax_ep" / "__init__.py").is_file():
        options.error(f"--against={args.against}: it contains no jax_ep, expected a checkout; see git worktree")
    turns = [run(checkouts[name], sizes, args.rounds) for name in (*NAMES, *NAMES[::-1])]
    samples = {name: [turns[i], turns[3 - i]] for i, name in enumerate(NAMES)}
    sys.exit(report(args, sizes, samples))


def report(args: argparse.Namespace, sizes: tuple[str, int, int], samples: dict[str, Any]) -> int:
    """Write and print the comparison; return the exit status."""
    settings = {"against": args.against.resolve().name, "tolerance": args.tolerance}
    settings |= {"rounds": 2 * args.rounds}
    written = Report("compare", args, settings)
    shape = dict(zip(("model", "tokens", "decoded_tokens"), sizes, strict=True)) | {"dtype": "bfloat16"}
    table, slower = [], []
    for operation in samples["this"][0]:
        times = {name: Timing(tuple(s for turn in samples[name] for s in turn[operation])) for name in NAMES}
        ratio = times["this"].median / times["other"].median
        for name in NAMES:
            written.add(f"{operation}, {name}", shape, times[name])
        written.summarize(**{operation: round(ratio, 4)})
        table.append([operation, *(cell for name in NAMES for cell in times[name].microseconds()), f"{ratio:.3f}"])
        if ratio >= args.tolerance:
            slower.append(operation)
    columns = ["operation", "us, this", "quartiles", "us, other", "quartiles", "this / other"]
    harness.show_table(f"this checkout against {settings['against']}", columns, table)
    print(f"{len(slower)} slower by {args.tolerance - 1:.0%} or more" + "".join(f"\n  {name}" for name in slower))
    return 1 if slower and not args.quick else 0


if __name__ == "__main__":
    harness.run(main)
