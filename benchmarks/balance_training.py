"""Rows of the busiest rank in the example's training, with and without copies of experts; needs no GPU.

    python benchmarks/balance_training.py

Writes results/balance_training.json and the plot of the training with copies. Both trainings have the same data and the
same initial parameters; the one without copies is the baseline of losses and times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.tools import command
from jax_ep.tools.benchmark import harness

EXAMPLES = Path(__file__).parent.parent / "examples"
VARIANTS = {"experts on their ranks": "--balance-rows 0", "balance": ""}  # options of the example


def train(variant: str, steps: int, plot: Path) -> dict[str, Any]:
    """Return held-out losses, seconds, and with balance the busiest rank over the mean, in the worst layer."""
    import train_moe_flax

    with tempfile.TemporaryDirectory() as out:
        found = train_moe_flax.main([*f"--out {out} --steps {steps}".split(), *VARIANTS[variant].split()])
        shutil.copy(Path(out) / "curves.png", plot)
    result = {"held_out": found["held_out"], "seconds": found["seconds"]}
    for name in ("rows_before", "rows_after"):
        if name in found["train"][0]:
            rows = np.array([row[name] for row in found["train"]], np.float64)  # [steps, layers, ranks]
            busiest = (rows.max(axis=2) / rows.mean(axis=2)).max(axis=1)
            result[name] = {"mean": float(busiest.mean()), "max": float(busiest.max()), "steps": busiest.tolist()}
    return result


def main() -> None:
    """Train both variants and write the report."""
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=command.count, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    sys.path.append(str(EXAMPLES))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "balance_training.json"
    variants = {variant: train(variant, args.steps, path.with_suffix(".png")) for variant in VARIANTS}
    settings = {"steps": args.steps, "example": "train_moe_flax.py", "devices": 8, "expert_ranks": 4}
    content = harness.heading(path.stem, "balance_training", settings) | {"variants": variants}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    harness.run(main)
