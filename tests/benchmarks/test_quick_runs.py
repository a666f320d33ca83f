"""Quick runs of the benchmarks' scripts on CPU devices: every variant is called, and the reports are complete."""

import itertools
import json
import math
import shlex
from pathlib import Path

import pytest
from reports import ROOT, arguments, check_report, run, run_quickly

import compare
from jax_ep.tools.benchmark import harness, layer

EXCHANGE = {
    *("triton dispatch to rows", "triton dispatch to rows, FP8 wire", "triton dispatch to rows, 24 programs"),
    *("triton combine", "triton combine, FP8 wire", "triton combine, 24 programs", "triton plan"),
    *("xla dispatch to rows", "xla combine", "xla plan", "all_to_all, padded", "chain alone"),
}
LOW_LATENCY = {
    *("dispatch, fp8", "dispatch, bf16", "dispatch of no tokens", "combine, fp8", "combine, bf16"),
    *("round trip, fp8 back", "round trip, bf16 back", "all_to_all, padded, bf16", "one word"),
}
DECODE = {"moe"} | {f"low latency{how}, {dtype}" for how in ("", ", separate") for dtype in ("fp8", "bf16")}


def variants(rows):
    return {row["variant"] for row in rows}


def check_rate(row, name, amount):
    """A rate is that of the median time, and is left out if the chains resolve no time."""
    median = row["seconds"]["median"]
    assert row.get(name) == (pytest.approx(amount / median) if median > harness._SHORTEST_S else None)


def check_exchange(rows, content):
    assert variants(rows) == EXCHANGE
    failed = {row["variant"] for row in rows if "failed" in row}
    assert failed <= {"chain alone"}
    for row in rows:
        if "failed" not in row and row["wire"] is not None:
            for name in ("logical_bytes", "wire_bytes"):
                check_rate(row, f"{name}_per_s", row[name])
            share = row["wire_bytes"] / row["logical_bytes"]
            assert {"bf16": share == 1, "fp8": 0.5 < share < 0.53, "padded": share >= 1}[row["wire"]]


def check_low_latency(rows, content):
    cases = {}
    for row in rows:
        cases.setdefault((row["shape"]["ranks"], row["shape"]["tokens_per_rank"]), {})[row["variant"]] = row
    assert set(cases) == {(2, tokens) for tokens in content["settings"]["tokens"]}
    for found in cases.values():
        assert set(found) == LOW_LATENCY
        word = found["one word"]["seconds"]["median"]
        for name, row in found.items():
            check_rate(row, "wire_bytes_per_s", row["wire_bytes"])
            sending = row["wire_bytes"] / content["summary"]["copy_engine_bytes_per_s"]
            assert row["floor_seconds"] == pytest.approx((2 if "round trip" in name else 1) * word + sending)


def check_decode(rows, content):
    assert variants(rows) == DECODE
    for row in rows:
        assert (row["error"] > 0.01) == ("fp8" in row["variant"])
        assert row["shape"]["ranks"] == 4


def check_layer(rows, content):
    assert {row["shape"]["routing"] for row in rows} == {"one-hot"}
    for direction in layer.DIRECTIONS:
        found = {row["variant"]: row for row in rows if row["direction"] == direction}
        names = {layer.LAYERS[key] for key in ("moe", "dropless", "capacity")}
        assert "ragged-all-to-all" in found.pop(layer.LAYERS["ragged"])["failed"]
        assert set(found) == names
        for row in found.values():
            assert (row["shape"]["model"], row["shape"]["ranks"], row["shape"]["capacity"]) == ("tiny", 4, 128)
            assert row["temporary_bytes"] > 0
            flops = 2 * 16 * 2 * 128 * 128 * 3 * (3 if "backward" in direction else 1)
            check_rate(row, "tflops", 1e-12 * flops)
        assert {name for name, row in found.items() if "difference" in row} == names - {
            layer.LAYERS["moe"],
            layer.LAYERS["capacity"],
        }


def check_grouped_gemm(rows, content):
    for variant in ("triton", "pallas", "portable loop", "cuBLAS batched"):
        measured = {(row["direction"], row["distribution"]) for row in rows if row["variant"] == variant}
        distributions = ("equal",) if variant == "cuBLAS batched" else ("equal", "multinomial", "zipf")
        assert measured == set(itertools.product(GEMMS, distributions)), variant
    for row in rows:
        flop = 2 * row["shape"]["rows"] * row["shape"]["k"] * row["shape"]["n"]
        check_rate(row, "tflops", 1e-12 * flop)
        assert 0 <= row["error"] < (0.4 if "FP8" in row["variant"] or "activated" in row["direction"] else 0.1)
        assert row.get("of_cublas", 1) > 0


def check_fused_moe(rows, content):
    names = {"fused_moe, bfloat16", "several launches, mxfp4", "ragged_dot", "moe_sort", "batched einsum"}
    assert names <= variants(rows)
    assert content["summary"]["read_bytes_per_s"] > 0


def check_serve(rows, content):
    """Without PyTorch, the baseline fails and the others have their rows."""
    baseline, *measured = rows
    assert "torch" in baseline["failed"] and baseline["variant"] == "transformers"
    found = [(row["variant"], row["shape"]["phase"], row["shape"]["batch"]) for row in measured]
    cases = [("prefill", 1), ("decode", 1), ("decode", 2)]
    assert found == [(f"jax_ep, {name}", *case) for name in ("bfloat16", "mxfp4") for case in cases]
    for row in measured:
        tokens = row["shape"]["batch"] * (row["shape"]["length"] if row["shape"]["phase"] == "prefill" else 1)
        check_rate(row, "tokens_per_s", tokens)
        if row["shape"]["phase"] == "decode":
            assert 2 <= row["touched_experts"] <= 2 * row["shape"]["batch"]
            read = row["dense_bytes"] + row["experts_bytes"] + row["cache_bytes"]
            assert row["floor_seconds"] == pytest.approx(read / content["summary"]["read_bytes_per_s"])


def check_serve_on_two_devices(rows, content):
    """There is no baseline; a batch of 1 runs on both devices, and counts once."""
    assert [(row["shape"]["phase"], row["shape"]["batch"]) for row in rows] == [("prefill", 2), ("decode", 1)]
    check_rate(rows[0], "tokens_per_s", 2 * 64)
    check_rate(rows[1], "tokens_per_s", 1)
    assert 1 <= rows[1]["touched_experts"] <= 2


def check_compile_times(rows, content):
    """Compiled programs are found again; they are traced again."""
    found = {(row["variant"], row["direction"]): row for row in rows}
    assert set(found) == {(cache, way) for cache in ("cold", "cached") for way in ("forward", "forward + backward")}
    assert all(min(row["trace_s"], row["lower_s"], row["compile_s"]) > 0 for row in rows)
    both = [found[cache, "forward + backward"]["compile_s"] for cache in ("cold", "cached")]
    assert both[1] < both[0]


def check_placement(rows, content):
    assert variants(rows) == {"contiguous", "packed", "global"}
    assert all([found["drift"] for found in row["most_loaded_over_mean"]] == [0, 0.5] for row in rows)


def check_balance(rows, content):
    assert [row["shape"]["ranks"] for row in rows] == [2, 4]
    for row in rows:
        assert row["most_loaded_over_mean"] > 1 and row["most_passes"] >= 1
        assert row["copies_of_fullest_rank"] <= 1 and row["copies"] <= row["shape"]["ranks"]
        assert all(found["on"] > 0 for found in row["predicted_seconds"].values())


def check_nodes(rows, content):
    assert {row["shape"]["routing"] for row in rows} == {"uniform", "zipf", "at most 4 nodes"}


TRAIN = ["jax_ep", "jax_ep balance", "padded"]
GEMMS = ["forward, activated", "weight gradient"]


def check_train(rows, content):
    """The steps of all layers agree; the padded layer drops some tokens."""
    assert [row["variant"] for row in rows] == TRAIN
    for row in rows:
        assert row["donated_bytes"] == row["state_bytes"]
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=5e-3)
    assert abs(rows[0]["losses"][0] - math.log(256)) < 2


LAYERS = "--layers moe dropless capacity ragged"
GPT_OSS = "--model tiny-gpt-oss --devices 2"
RUNS = [
    ("exchange.py --ranks 2 --routing uniform", "dispatch_combine", "8 tokens/rank", check_exchange),
    ("low_latency.py --parts exchange --ranks 2", "low_latency", "2 tokens/rank, 2 ranks", check_low_latency),
    ("low_latency.py --parts layer", "decode_layer", "2 tokens/rank, 4 ranks", check_decode),
    (f"layer.py --tokens 16 --routing one-hot {LAYERS}", "moe_layer", "TFLOP/s", check_layer),
    (
        f"grouped_gemm.py --directions {shlex.join(GEMMS)}",
        "grouped_gemm_cpu",
        "72x128x24 in 2, weight gradient, zipf",
        check_grouped_gemm,
    ),
    ("fused_moe.py --shard 2 --routing zipf --formats mxfp4", "fused_moe", "tiny, 16 tokens", check_fused_moe),
    ("serve.py --formats bfloat16 mxfp4", "serve", "of floor", check_serve),
    (f"serve.py {GPT_OSS} --formats mxfp4 --batches 1", "serve", "of floor", check_serve_on_two_devices),
    ("compile_times.py", "compile_times", "seconds to compile", check_compile_times),
    ("placement.py --exponents 1 --drifts 0 0.5", "placement", "", check_placement),
    ("balance.py --exponents 1 --spare 1", "balance", "", check_balance),
    (f"train.py --variants {shlex.join(TRAIN)}", "train", "", check_train),
    ("nodes.py", "nodes", "uniform: a dispatch, predicted", check_nodes),
]


@pytest.mark.parametrize(("command", "report", "printed", "check"), RUNS, ids=[name for _, name, *_ in RUNS])
def test_quick_run(command, report, printed, check, tmp_path):
    pytest.importorskip("triton")
    script, *options = shlex.split(command)
    assert printed in run_quickly(script, tmp_path, *options)
    content = json.loads((tmp_path / f"{report}.json").read_text())
    check_report(content)
    check(content["rows"], content)


def test_quick_comparison(tmp_path, capsys, monkeypatch):
    """The operations are timed in a process, here of one device; a checkout is not slower than it is."""
    monkeypatch.delenv("XLA_FLAGS")
    turn = compare.run(ROOT, compare.QUICK, 3)
    assert {"grouped_gemm", "moe, gradients", "low_latency_moe, FP8", "fused_moe"} <= set(turn)
    settings = arguments(tmp_path, against=ROOT, tolerance=1.03)
    assert compare.report(settings, compare.QUICK, {"this": [turn, turn], "other": [turn, turn]}) == 0
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["summary"] == dict.fromkeys(turn, 1) and f"against {ROOT.name}" in capsys.readouterr().out
    slow = {name: [2 * s for s in samples] for name, samples in turn.items()}
    assert compare.report(settings, compare.QUICK, {"this": [slow, slow], "other": [turn, turn]}) == 1


@pytest.mark.parametrize(
    ("command", "status", "error"),
    [
        ("nodes.py --ranks 6", 2, "--ranks 6: expected a multiple of the 4 GPUs of a node"),
        ("grouped_gemm.py --shapes 10,8,8,4", 2, "groups divide the rows"),
        ("kernel_times.py", 1, "kernel_times: needs GPUs; nothing measured\n"),
        (f"compare.py --against {Path(__file__).parent}", 2, "it contains no jax_ep"),
    ],
)
def test_quick_run_invalid(command, status, error, tmp_path):
    script, *options = command.split()
    done = run(script, tmp_path, *options)
    assert done.returncode == status and error in done.stderr
    assert not list(tmp_path.iterdir())
