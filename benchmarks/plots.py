"""Draw the plots of a folder of reports again: python benchmarks/plots.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from jax_ep.tools.benchmark import plots


def main() -> None:
    """Draw the plots that the folder has, and that of all layers."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")
    drawn = [plots.draw(path) for path in sorted(folder.glob("*.json")) if path.with_suffix(".png").exists()]
    for path in (*drawn, plots.draw_layers(folder)):
        if path is not None:
            print(path)


if __name__ == "__main__":
    main()
