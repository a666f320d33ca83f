"""Draw the plot of the expert layer by model again: python benchmarks/plots.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from jax_ep.tools.benchmark import plots

if __name__ == "__main__":
    print(plots.draw_layers(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")))
