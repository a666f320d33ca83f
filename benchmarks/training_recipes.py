"""Loss curves of the example's training with experts in bfloat16 and with recipe "fp8"; needs no GPU.

    python benchmarks/training_recipes.py [--steps 400] [--seeds 2] [--devices 1]

Writes results/training_recipes.json and a plot. All trainings have the same data; a seed gives the initial parameters.
Attention, embeddings and the router compute in bfloat16 in all of them, so differences come from the experts. The
difference between two seeds of one recipe shows which differences are significant.
"""

from __future__ import annotations

import argparse
import datetime
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
RECIPES = ("bf16", "fp8")
SIZES = "--layers 2 --hidden 128 --intermediate 128 --batch-size 16 --length 64 --learning-rate 3e-3"
SMOOTHED = 20  # steps of a mean, in the plot and in the reported differences


def train(recipe: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the loss of each step, and the loss of the held-out windows at the end."""
    import train_moe_flax

    steps = f"--steps {args.steps} --evaluate-every {args.steps} --checkpoint-every {args.steps}"
    devices = f"--devices {args.devices} --expert-parallel {args.devices}"
    with tempfile.TemporaryDirectory() as out:
        command = f"--out {out} {steps} {devices} {SIZES} --seed {seed}"
        command += " --recipe fp8" if recipe == "fp8" else ""
        found = train_moe_flax.main(command.split())
    return {"losses": [row["loss"] for row in found["train"]], "held_out": found["held_out"][-1]["loss"]}


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Return means of `SMOOTHED` steps."""
    return np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), "valid")


def differences(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return the largest differences of smoothed losses, in nats: of a recipe from bf16, and of seeds in bf16."""
    of_seeds = [smooth(curve["losses"]) for curve in curves["bf16"]]
    found = {"bf16, another seed": max(float(np.abs(of_seeds[0] - other).max()) for other in of_seeds[1:])}
    for recipe in RECIPES[1:]:
        pairs = zip(curves[recipe], of_seeds, strict=True)
        found[recipe] = max(float(np.abs(smooth(curve["losses"]) - exact).max()) for curve, exact in pairs)
    return found


def draw(path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the curves, and below them the difference of "fp8" from bf16."""
    if plots.matplotlib() is None:
        return
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.5, 6), sharex=True, height_ratios=(2, 1), layout="tight")
    steps = np.arange(SMOOTHED, len(curves["bf16"][0]["losses"]) + 1)
    exact = smooth(curves["bf16"][0]["losses"])
    for recipe, style in zip(RECIPES, ("-", "--"), strict=True):
        losses = smooth(curves[recipe][0]["losses"])
        above.plot(steps, losses, style, label=recipe)
        below.plot(steps, losses - exact, style, label=recipe)
    below.plot(steps, smooth(curves["bf16"][1]["losses"]) - exact, color="0.7", zorder=0, label="bf16, another seed")
    above.set_ylabel(f"loss in nats per byte,\nmean of {SMOOTHED} steps")
    below.set_ylabel("minus that of bf16")
    below.set_xlabel("step")
    above.legend()
    below.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Train with each recipe and each seed."""
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2, help="at least 2")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training_recipes.json")
    args = parser.parse_args()
    if args.seeds < 2 or args.steps < 2 * SMOOTHED:
        parser.error(f"--seeds {args.seeds} --steps {args.steps}: expected at least 2, and {2 * SMOOTHED}")
    sys.path.append(str(EXAMPLES))
    curves = {recipe: [train(recipe, seed, args) for seed in range(args.seeds)] for recipe in RECIPES}
    content = {
        "name": "training_recipes",
        "script": "benchmarks/training_recipes.py",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": harness.versions(),
        "device": harness.device(),
        "settings": {"steps": args.steps, "devices": args.devices, "sizes": SIZES, "smoothed_steps": SMOOTHED},
        "largest_differences": differences(curves),
        "curves": curves,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    draw(args.out.with_suffix(".png"), curves)
    print(content["largest_differences"], {name: [c["held_out"] for c in found] for name, found in curves.items()})


if __name__ == "__main__":
    harness.run(main)
