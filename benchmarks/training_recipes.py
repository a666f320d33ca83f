"""Loss curves of the example's training with several expert layers; needs no GPU.

    python benchmarks/training_recipes.py                                          # recipe "fp8" next to bfloat16
    python benchmarks/training_recipes.py --variants bf16 xla --devices 4 --steps 2000 --suffix _4_gpus

Writes results/training_recipes.json and a plot. All trainings have the same data and the same initial parameters.
Attention, embeddings and the router compute in bfloat16 in all of them, so differences come from the experts. A second
training of the first variant, from another seed, shows which differences are significant.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.tools import command
from jax_ep.tools.benchmark import harness, plots

EXAMPLES = Path(__file__).parent.parent / "examples"
VARIANTS = {"bf16": "", "fp8": "--recipe fp8", "xla": "--implementation xla"}  # options of the example
SIZES = "--layers 2 --hidden 128 --intermediate 128 --batch-size 16 --length 64 --learning-rate 3e-3"
OTHER_SEED = "another seed"
SMOOTHED = 20  # steps of a mean, in the plot and in the reported differences


def train(variant: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the loss of each step, and the loss of the held-out windows at the end."""
    import train_moe_flax

    steps = f"--steps {args.steps} --evaluate-every {args.steps} --checkpoint-every {args.steps}"
    devices = f"--devices {args.devices} --expert-parallel {args.devices}"
    with tempfile.TemporaryDirectory() as out:
        command = f"--out {out} {steps} {devices} {args.sizes} --seed {seed} {VARIANTS[variant]}"
        found = train_moe_flax.main(command.split())
    return {"losses": [row["loss"] for row in found["train"]], "held_out": found["held_out"][-1]["loss"]}


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Return means of `SMOOTHED` steps."""
    return np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), "valid")


def differences(curves: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest difference of each smoothed curve from the first one, in nats."""
    first, *others = ((name, smooth(curve["losses"])) for name, curve in curves.items())
    return {name: float(np.abs(losses - first[1]).max()) for name, losses in others}


def draw(path: Path, curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the curves, and below them the difference of each from the first."""
    figure, grid = plots.make_figure(2, 1, (7.5, 6), sharex=True, height_ratios=(2, 1))
    if figure is None:
        return
    above, below = grid.flat
    first, *_ = curves
    exact = smooth(curves[first]["losses"])
    steps = np.arange(SMOOTHED, len(exact) + SMOOTHED)
    for name, curve in curves.items():
        losses = smooth(curve["losses"])
        style: dict[str, Any] = {"color": "0.7", "zorder": 0} if name == OTHER_SEED else {"alpha": 0.8}
        above.plot(steps, losses, label=name, **style)
        below.plot(steps, losses - exact, label=name, **style)
    above.set_ylabel(f"loss in nats per byte,\nmean of {SMOOTHED} steps")
    below.set_ylabel(f"minus that of {first}")
    below.set_xlabel("step")
    above.legend()
    below.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train each variant, and the first one from a second seed."""
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16", "fp8"])
    parser.add_argument("--sizes", default=SIZES, help="options of the example (default: %(default)s)")
    parser.add_argument("--suffix", default="", help="of the report's name, such as _4_gpus")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.steps < 2 * SMOOTHED:
        parser.error(f"--steps {args.steps}: expected at least {2 * SMOOTHED}")
    sys.path.append(str(EXAMPLES))
    curves = {variant: train(variant, 0, args) for variant in args.variants}
    curves[OTHER_SEED] = train(args.variants[0], 1, args)
    name = "training_recipes" + args.suffix
    settings = {"steps": args.steps, "devices": args.devices, "sizes": args.sizes, "smoothed_steps": SMOOTHED}
    content = harness.heading(name, "training_recipes", settings)
    content |= {"largest_differences": differences(curves), "curves": curves}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(args.out / f"{name}.png", curves)
    print(content["largest_differences"], {variant: curve["held_out"] for variant, curve in curves.items()})


if __name__ == "__main__":
    harness.run(main)
