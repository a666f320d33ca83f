"""What the links of a GPU carry by their specification, as the driver tells it."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple


class Links(NamedTuple):
    """NVLink of the GPU that has least of it.

    Attributes:
      bytes_per_s: of all its links together, in one direction; None where it is unknown.
      said: how many links of which rate, or why the rate is unknown.
    """

    bytes_per_s: float | None
    said: str


def nvlink() -> Links:
    """Asks `nvidia-smi nvlink --status`, which lists each link of each GPU with its rate in one direction."""
    command = ["nvidia-smi", "nvlink", "--status"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return Links(None, "unknown: there is no nvidia-smi")
    except subprocess.TimeoutExpired:
        return Links(None, "unknown: nvidia-smi nvlink --status does not answer")
    if done.returncode:
        return Links(None, f"unknown: nvidia-smi nvlink --status failed with exit status {done.returncode}")
    return parse(done.stdout)


def parse(status: str) -> Links:
    """The rate from what `nvidia-smi nvlink --status` prints; links that are inactive have none."""
    rates: list[list[float]] = []
    for line in status.splitlines():
        if line.startswith("GPU "):
            rates.append([])
        elif rates and (found := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            rates[-1].append(1e9 * float(found[1]))
    least = min(rates, key=sum, default=[])
    if not sum(least):
        return Links(None, "unknown: nvidia-smi lists no active NVLink on every GPU")
    each = sorted({f"{rate / 1e9:g} GB/s" for rate in least})
    return Links(sum(least), f"{len(least)} links of {' and '.join(each)}, by nvidia-smi")
