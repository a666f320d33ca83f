"""What more ranks would bring: times of dispatch and combine by a model that published reports of exchange.py set.

The model has three figures per variant, all from measured cases with uniform routing: a launch takes
`start + tokens * max(bytes / rate, local)`. Start and the time per token are a straight line through the measured
numbers of tokens; rate is what the largest measured number of ranks reaches; local is the time per token with the
fewest ranks, where the link is used least: a rank has as many rows to read and to write whatever the number of ranks.
It assumes a switch that serves all pairs at once, as in a node with NVSwitch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lib import harness

VARIANTS = (
    "triton dispatch to rows",
    "triton combine",
    "triton dispatch to rows, FP8 wire",
    "triton combine, FP8 wire",
)
RESULTS = tuple(harness.RESULTS / f"dispatch_combine_{ranks}_gpus.json" for ranks in (2, 4))
GROUP = 128  # columns that share a float32 scale in FP8


class Line(NamedTuple):
    """Time of a launch over tokens per rank: seconds that do not depend on them, and seconds per token."""

    start: float
    per_token: float


def bytes_per_token(num_ranks: int, *, experts: int, top_k: int, hidden: int, fp8: bool) -> float:
    """What a token costs on the link: once for each other rank that has one of its `top_k` different experts."""
    elsewhere = experts - experts // num_ranks
    missed = math.comb(elsewhere, top_k) / math.comb(experts, top_k)
    return (num_ranks - 1) * (1 - missed) * (hidden + 4 * (hidden // GROUP) if fp8 else 2 * hidden)


def fit(times: Mapping[int, float]) -> Line:
    """The line through `{tokens: seconds}` with the least squares of relative errors, and no negative start."""
    tokens, seconds = (np.asarray(list(part), float) for part in (times.keys(), times.values()))
    (start, per_token), *_ = np.linalg.lstsq(np.stack([1 / seconds, tokens / seconds], 1), np.ones_like(tokens))
    return Line(max(0.0, float(start)), float(per_token))


def predict(lines: Mapping[int, Line], link_bytes: Mapping[int, float], num_ranks: int, tokens: int) -> float:
    """Seconds on `num_ranks`; `lines` and `link_bytes` (per token) are by number of ranks."""
    fewest, most = min(lines), max(lines)
    link = link_bytes[num_ranks] * lines[most].per_token / link_bytes[most]
    return lines[most].start + tokens * max(link, lines[fewest].per_token)


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Reports of one model on different numbers of ranks as one: what the first one says, and the rows of all."""
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"--results: no {', '.join(missing)}; published reports come with a source checkout")
    contents = [json.loads(path.read_text()) for path in paths]
    models = {tuple(content["settings"][size] for size in ("experts", "top_k")) for content in contents}
    if len(models) > 1:
        raise ValueError(
            f"--results: these reports have experts and top-k of {sorted(models)}; pass those of one model."
        )
    return contents[0] | {"rows": [row for content in contents for row in content["rows"]]}


def measured_times(content: Mapping[str, Any], variant: str) -> dict[int, dict[int, float]]:
    """`{ranks: {tokens: seconds}}` of a variant with uniform routing."""
    found: dict[int, dict[int, float]] = {}
    for row in content["rows"]:
        shape = row["shape"]
        if row["variant"] == variant and shape["routing"] == "uniform" and "seconds" in row:
            found.setdefault(shape["ranks"], {})[shape["tokens_per_rank"]] = row["seconds"]["median"]
    return found


def table(content: Mapping[str, Any], variant: str, ranks: Iterable[int]) -> list[list[str]]:
    """A line for each number of ranks and tokens."""
    settings, hidden = content["settings"], content["rows"][0]["shape"]["hidden"]
    peak = content["summary"]["copy_engine_bytes_per_s"]
    times = measured_times(content, variant)
    lines = {num_ranks: fit(by_tokens) for num_ranks, by_tokens in times.items()}
    sizes = {"experts": settings["experts"], "top_k": settings["top_k"], "hidden": hidden, "fp8": "FP8" in variant}
    link_bytes = {n: bytes_per_token(n, **sizes) for n in {*ranks, *times}}
    cells = []
    for num_ranks in ranks:
        for tokens in settings["tokens"]:
            sent = tokens * link_bytes[num_ranks]
            measured = times.get(num_ranks, {}).get(tokens)
            expected = predict(lines, link_bytes, num_ranks, tokens)
            cells.append(
                [
                    str(num_ranks),
                    str(tokens),
                    f"{sent / 1e6:.1f}",
                    f"{1e6 * sent / peak:.0f}",
                    "" if measured is None else f"{1e6 * measured:.0f}",
                    f"{1e6 * expected:.0f}",
                    f"{sent / (expected if measured is None else measured) / 1e9:.0f}",
                ]
            )
    return cells


COLUMNS = ["ranks", "tokens/rank", "MB sent", "us at the copy engine's rate", "measured us", "model us", "wire GB/s"]


def show(paths: Iterable[Path], variants: Iterable[str], ranks: Iterable[int]) -> None:
    """Prints a table for each variant.

    Raises:
      ValueError: reports that do not belong together or have too few cases, and ranks that no model can have.
    """
    paths, ranks = list(paths), list(ranks)
    content = read(paths)
    experts = content["settings"]["experts"]
    if unfit := [n for n in ranks if n < 2 or experts % n]:
        raise ValueError(f"--predict {unfit[0]}: {experts} experts need two or more ranks, a number that divides them")
    for variant in variants:
        if len(measured_times(content, variant)) < 2:
            names = ", ".join(map(str, paths))
            raise ValueError(f"{names}: not two numbers of ranks for {variant!r}; run exchange.py")
        harness.show_table(f"{variant} ({content['date'][:10]})", COLUMNS, table(content, variant, ranks))
