"""Tables of `PAGES`, from the reports in benchmarks/results: `python benchmarks/tables.py [--check]`.

A table is between `<!-- table NAME -->` and `<!-- end -->`. The newest report with a line counts. The figures of one
line, or of one number of GPUs, are from one report, since figures of different runs do not compare. Missing figures
leave their cells empty, and lines without any figure are left out. Tables are about one kind of GPU, `GPU`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_ep.tools.benchmark.plots import NAMES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / name for name in ("performance.md", "design/low_latency.md")]
NOT_YET = "Not measured yet: `make evidence` on two or more GPUs writes `{name}*.json`."
RANKS = (2, 4, 8)
GPU = "H200"

type Row = dict[str, Any]


class Found(NamedTuple):
    """Rows of one report by variant."""

    report: str
    rows: dict[str, Row]

    def us(self, variant: str) -> str:
        """Return the microseconds of a variant, or an empty string."""
        return f"{1e6 * self.rows[variant]['seconds']['median']:.0f}" if variant in self.rows else ""

    def ratio(self, slower: str, faster: str) -> str:
        """Return the time of one variant divided by that of another."""
        times = [self.rows[variant]["seconds"]["median"] for variant in (slower, faster)]
        return f"{times[0] / times[1]:.2f}"


class Reports:
    """Reports of a folder, the newest first, and those that tables have used."""

    def __init__(self, folder: Path) -> None:
        contents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        found = {name: content for name, content in contents.items() if "rows" in content and is_included(content)}
        newest = sorted(found, key=lambda name: found[name]["date"], reverse=True)
        self._contents: dict[str, dict[str, Any]] = {name: found[name] for name in newest}
        self.used: list[str] = []

    def find(self, beginning: str, required: Iterable[str], **keys: Any) -> Found | None:
        """Return the rows of the newest report with this prefix that has all required variants; see `rows_of`."""
        required = set(required)
        for name in self.named(beginning):
            found = self.rows_of(name, **keys)
            if required <= set(found.rows):
                if name not in self.used:
                    self.used.append(name)
                return found
        return None

    def named(self, beginning: str) -> list[str]:
        """Return the names of reports, the newest first."""
        return [name for name in self._contents if name.startswith(beginning)]

    def rows_of(self, name: str, *, graphs: bool = False, **keys: Any) -> Found:
        """Return the rows with these values, of a report with or without CUDA graphs."""
        content = self._contents[name]
        settings = content["settings"]
        if settings["quick"] or settings.get("graphs", False) != graphs:
            return Found(name, {})
        rows = [row for row in content["rows"] if "seconds" in row and _has(row, keys)]
        return Found(name, {row["variant"]: row for row in rows})

    def sources(self) -> str:
        """Name the reports used since the last call."""
        said = ", ".join(f"`{name}.json`" for name in self.used)
        self.used = []
        return f"From {said}."


def is_included(report: dict[str, Any]) -> bool:
    """Return whether a report is from CPU devices or from the kind of GPU that tables are about."""
    device = report.get("device", {"platform": "cpu"})
    return device["platform"] != "gpu" or GPU in device["kind"]


def _has(row: Row, keys: dict[str, Any]) -> bool:
    known = row | row["shape"]
    return all(known.get(key) == value for key, value in keys.items())


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Format a table in Markdown, without lines that have no figure."""
    filled = [line for line in lines if any(line[1:])]
    rule = ["---"] * len(columns)
    return [
        f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in (columns, rule, *filled)
    ]


# --- tables -----------------------------------------------------------------------------------------------------------

OURS, THEIRS = "jax_ep.moe", "all_to_all + einsum, capacity 1.25"
FORWARD, BOTH = "forward", "forward + backward"


def layer(reports: Reports) -> list[str]:
    """Compare the layer with what JAX offers, by model; the cells of one number of GPUs are from one report."""
    columns = [
        "us (times as fast); 4096 tokens per GPU",
        *(f"{n} GPUs: {way}" for n in RANKS for way in (FORWARD, BOTH)),
    ]
    lines = []
    for model, name in NAMES.items():
        for routing, suffix in (("uniform", ""), ("zipf", ", Zipf")):
            cells: list[str] = []
            for ranks in RANKS:
                keys = {"model": model, "routing": routing, "tokens_per_rank": 4096, "ranks": ranks}
                pair = [reports.find("moe_layer", (OURS, THEIRS), direction=way, **keys) for way in (FORWARD, BOTH)]
                whole = len({one and one.report for one in pair}) == 1
                cells += [f"{one.us(OURS)} ({one.ratio(THEIRS, OURS)})" if one and whole else "" for one in pair]
            lines.append([name + suffix, *cells])
    filled = [i for i in range(len(columns)) if i == 0 or any(line[i] for line in lines)]
    return table([columns[i] for i in filled], ([line[i] for i in filled] for line in lines))


EXCHANGE = {
    "plan": "triton plan",
    "dispatch to rows": "triton dispatch to rows",
    "combine": "triton combine",
    "dispatch to rows, FP8 wire": "triton dispatch to rows, FP8 wire",
    "combine, FP8 wire": "triton combine, FP8 wire",
    "dispatch to rows, 24 programs": "triton dispatch to rows, 24 programs",
    "combine, 24 programs": "triton combine, 24 programs",
    "`xla`: dispatch to rows": "xla dispatch to rows",
    "`xla`: combine": "xla combine",
    "JAX: `all_to_all`, padded": "all_to_all, padded",
    "the empty chain, part of each row": "chain alone",
}


def exchange(reports: Reports) -> list[str]:
    """List dispatch and combine by number of GPUs and of tokens."""
    return _by_tokens(reports, "dispatch_combine", EXCHANGE, (128, 1024, 4096, 32768), {"routing": "uniform"})


DECODE = {
    "FP8, GEMM and combine in one kernel": "low latency, fp8",
    "FP8, in two kernels": "low latency, separate, fp8",
    "bfloat16, one kernel": "low latency, bf16",
    "bfloat16, two kernels": "low latency, separate, bf16",
    "`moe`, bfloat16": "moe",
}


def decode_layer(reports: Reports) -> list[str]:
    """List the layer of decode-sized batches."""
    return _by_tokens(reports, "decode_layer", DECODE, (1, 8, 32, 128), {}, "us per layer")


def _by_tokens(
    reports: Reports,
    beginning: str,
    names: dict[str, str],
    tokens: Sequence[int],
    keys: dict[str, Any],
    unit: str = "us",
) -> list[str]:
    """Make a column per number of GPUs and of tokens; those of one number of GPUs are from one report."""
    columns, found = [f"{unit}; tokens per rank:"], []
    for ranks in RANKS:
        there: list[tuple[int, Found]] = []
        for name in reports.named(beginning):
            every = [(n, reports.rows_of(name, tokens_per_rank=n, ranks=ranks, **keys)) for n in tokens]
            of_one = [(n, one) for n, one in every if set(names.values()) & set(one.rows)]
            there = max(there, of_one, key=len)  # of the newest, where several have as many
        if there:
            columns += [f"{ranks} GPUs: {there[0][0]}", *(str(n) for n, _ in there[1:])]
            found += [one for _, one in there]
    reports.used = list(dict.fromkeys(one.report for one in found))
    return table(columns, ([label, *(one.us(variant) for one in found)] for label, variant in names.items()))


SHAPES = {
    "32768 rows in 64, 7168x4096": (32768, 7168, 4096, 64),
    "64, 2048x7168": (32768, 2048, 7168, 64),
    "Qwen3-235B up: 32, 4096x3072": (32768, 4096, 3072, 32),
    "Mixtral down: 8192 rows in 2, 14336x4096": (8192, 14336, 4096, 2),
    "131072 rows in 16, 2048x1536": (131072, 2048, 1536, 16),
    "16, 768x2048": (131072, 768, 2048, 16),
}
PRODUCTS = {
    "forward, `triton`": ("triton", FORWARD),
    "forward, Gluon": ("triton, Gluon", FORWARD),
    "forward, `pallas`": ("pallas", FORWARD),
    "weight gradient, `triton`": ("triton", "weight gradient"),
    "weight gradient, Gluon": ("triton, Gluon", "weight gradient"),
    "weight gradient, `pallas`": ("pallas", "weight gradient"),
    "weight gradient in FP8, Gluon": ("triton, FP8, Gluon", "weight gradient"),
    "forward in FP8, Gluon": ("triton, FP8, Gluon", FORWARD),
    "PyTorch's `_grouped_mm`, bf16": ("PyTorch _grouped_mm", FORWARD),
    "PyTorch's `_scaled_grouped_mm`, FP8, a scale per row": (
        "PyTorch _scaled_grouped_mm, FP8, a scale per row",
        FORWARD,
    ),
    "portable loop of `xla`, forward": ("portable loop", FORWARD),
}


def grouped_gemm(reports: Reports) -> list[str]:
    """List grouped GEMMs in percent of cuBLAS, for equal, multinomial and Zipf groups."""

    def found(size: tuple[int, ...], variant: str, direction: str, distribution: str) -> Row | None:
        shape = dict(zip(("rows", "k", "n", "groups"), size, strict=True))
        one = reports.find("grouped_gemm_gpu", (variant,), direction=direction, distribution=distribution, **shape)
        return None if one is None else one.rows[variant]

    def shares(size: tuple[int, ...], variant: str, direction: str) -> str:
        rows = [found(size, variant, direction, kind) for kind in ("equal", "multinomial", "zipf")]
        return ", ".join(f"{100 * row['of_cublas']:.0f}" for row in rows if row is not None)

    def rate(size: tuple[int, ...]) -> str:
        rows = [found(size, "cuBLAS batched", direction, "equal") for direction in (FORWARD, "weight gradient")]
        return ", ".join(f"{row['tflops']:.0f}" for row in rows if row is not None)

    lines = [[label, *(shares(size, *which) for size in SHAPES.values())] for label, which in PRODUCTS.items()]
    lines.append(["cuBLAS, TFLOP/s: forward, weight gradient", *map(rate, SHAPES.values())])
    return table(["", *SHAPES], lines)


ONE_DEVICE = {
    "bfloat16": "fused_moe, bfloat16",
    "FP8 by blocks": "fused_moe, fp8",
    "INT8": "fused_moe, int8",
    "PyTorch's `_grouped_mm`, bfloat16": "PyTorch, _grouped_mm",
}
FOUR_BITS = {"INT4, prepacked": "int4_prepacked", "MXFP4, prepacked": "mxfp4_prepacked"}


def one_device(reports: Reports) -> list[str]:
    """List the layer of one device by model and tokens, with its share of the memory read rate.

    A single token of 4-bit weights is from Triton's kernel, more are from the one in Gluon.
    """
    cases = [(model, tokens) for model in ("qwen3-30b", "mixtral-8x7b", "gpt-oss-120b") for tokens in (1, 16, 64)]

    def cell(one: Found | None, variant: str) -> str:
        if one is None or variant not in one.rows:
            return ""
        row = one.rows[variant]
        shown = not variant.startswith("PyTorch") and "of_read_rate" in row
        return one.us(variant) + (f", {100 * row['of_read_rate']:.0f} %" if shown else "")

    def of_case(needs: set[str], model: str, tokens: int) -> Found | None:
        return reports.find("fused_moe", needs, model=model, tokens=tokens, graphs=True)

    needs = {"fused_moe, int8", "fused_moe, bfloat16", "a step of the chain"}
    found = [of_case(needs, *case) for case in cases]
    lines = [[label, *(cell(one, variant) for one in found)] for label, variant in ONE_DEVICE.items()]
    for label, expert_format in FOUR_BITS.items():
        ways = ["fused_moe" if tokens == 1 else "one launch in Gluon" for _, tokens in cases]
        variants = [f"{way}, {expert_format}" for way in ways]
        found = [of_case({variant}, *case) for variant, case in zip(variants, cases, strict=True)]
        lines.append([label, *map(cell, found, variants)])
    columns = [f"{NAMES[model]}, 1" if tokens == 1 else str(tokens) for model, tokens in cases]
    return table(["us; model, tokens:", *columns], lines)


TABLES: dict[str, Callable[[Reports], list[str]]] = {
    "layer": layer,
    "exchange": exchange,
    "grouped_gemm": grouped_gemm,
    "one_device": one_device,
    "decode_layer": decode_layer,
}


def made(name: str, reports: Reports) -> str:
    """Return a table with its sources, or a note that nothing is measured yet."""
    reports.used = []
    lines = TABLES[name](reports)
    if len(lines) == 2:
        return NOT_YET.format(name=name)
    sources = textwrap.wrap(reports.sources(), 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, "", *sources])


def filled(page: str, reports: Reports) -> str:
    """Return the page with new tables.

    Raises:
      ValueError: the page names an unknown table.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise ValueError(f"<!-- table {match[1]} -->: unknown table, expected one of {', '.join(TABLES)}")
        return f"<!-- table {match[1]} -->\n\n{made(match[1], reports)}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> None:
    """Write the pages, or with `--check` exit with status 1 if a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page differs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for page in PAGES:
        before = page.read_text()
        after = filled(before, Reports(args.results))
        if not args.check:
            page.write_text(after)
        elif after != before:
            sys.exit(f"{page}: its tables are not those of {args.results}; run make tables")


if __name__ == "__main__":
    main()
