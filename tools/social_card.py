"""Draw docs/images/social_card.png, the picture of links to the site, from the logo: `python tools/social_card.py`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import patches
from matplotlib import pyplot as plt
from matplotlib.path import Path as Curve

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BACKGROUND, WIDTH, HEIGHT, DPI = "#3f51b5", 1200, 630, 100
LOGO_X, LOGO_Y, LOGO_SCALE = 90, 175, 4.4  # pixels; the logo's viewBox has 64 units
TEXT_X = 440
TEXT = (
    (270, 64, "bold", "jax_ep"),
    (360, 27, "normal", "Expert parallelism for"),
    (408, 27, "normal", "Mixture-of-Experts layers in JAX"),
)


def shape(element: ET.Element, stroke_width: float) -> patches.Patch:
    """Return a circle, rectangle or cubic curve of the logo, in pixels of the card."""
    x, y = (lambda value: LOGO_X + LOGO_SCALE * float(value)), (lambda value: LOGO_Y + LOGO_SCALE * float(value))
    style = {"facecolor": element.get("fill", "none"), "edgecolor": "white", "linewidth": stroke_width * 72 / DPI}
    value = element.attrib
    match element.tag.split("}")[1]:
        case "circle":
            return patches.Circle((x(value["cx"]), y(value["cy"])), LOGO_SCALE * float(value["r"]), zorder=2, **style)
        case "rect":
            width, height, radius = (LOGO_SCALE * float(value[name]) for name in ("width", "height", "rx"))
            box = patches.BoxStyle.Round(pad=0, rounding_size=radius)
            return patches.FancyBboxPatch((x(value["x"]), y(value["y"])), width, height, box, zorder=2, **style)
        case _:
            numbers = value["d"].replace("M", "").replace("C", "").split()
            points = [(x(a), y(b)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
            return patches.PathPatch(Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3]), capstyle="round", **style)


def main() -> None:
    """Draw the card: the logo on the left, name and description on the right."""
    figure = plt.figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor=BACKGROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    for group in ET.parse(IMAGES / "logo.svg").getroot():
        for element in group:
            axes.add_patch(shape(element, LOGO_SCALE * float(group.attrib["stroke-width"])))
    for y, size, weight, text in TEXT:
        axes.text(TEXT_X, y, text, color="white", fontsize=size, weight=weight, va="baseline")
    figure.savefig(IMAGES / "social_card.png", dpi=DPI, facecolor=BACKGROUND)


if __name__ == "__main__":
    main()
