"""benchmarks/layer.py times what it says it times, and loses no figure when one variant fails."""

import time
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reports import arguments

from jax_ep.tools.benchmark import baselines, harness, inputs, layer, plots
from jax_ep.tools.benchmark.chains import chain

RANKS = 4


@pytest.fixture(scope="module")
def case():
    return inputs.make_case(inputs.expert_mesh(RANKS), "zipf", 48, inputs.MODELS["tiny"])


@pytest.fixture(scope="module")
def weights(case):
    return inputs.make_weights(case.mesh, case.model)


@pytest.fixture
def run(case, weights, tmp_path):
    args = arguments(tmp_path, quick=True)
    return layer.Run(harness.Report("moe_layer", args), case, "tiny", weights, args)


def sleeper(nap, seconds, value=1.0, same_as=None):
    """A variant whose every call naps on every rank, with how often it was called."""
    calls = []

    def call(zero):
        calls.append(1)
        nap(seconds)
        return np.float32(value)

    def step(zero):
        return jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), zero)

    return layer.Variant(step, (), 1e9, same_as), calls


def results(variant, case):
    run, arguments = variant.first_results(case)
    return [np.asarray(leaf) for leaf in run(*arguments)]


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"device": {"kind": []}}', "\xff"])
def test_plot_of_layers_with_other_files(text, tmp_path, capsys):
    (tmp_path / "moe_layer_of_another_tool.json").write_bytes(text.encode("latin-1"))
    assert plots.draw_layers(tmp_path) is None
    assert capsys.readouterr().err.startswith(f"no plot: not all files moe_layer*.json in {tmp_path} are reports (")


def test_dropped_share_is_that_of_the_baseline(case):
    slots = [
        np.asarray(baselines.fixed_slots(jnp.asarray(ids), 8, layer.slot_capacity(case)).assignment_to_row)
        for ids in case.ids.reshape(RANKS, 48, 2)
    ]
    assert layer.slot_capacity(case) == 15  # 1.25 * 48 * 2 / 8
    assert layer.dropped(case) == pytest.approx(np.mean(np.stack(slots) < 0)) and layer.dropped(case) > 0.05


def test_large_arrays_are_made_in_chunks(case, monkeypatch):
    monkeypatch.setattr(inputs, "_CHUNK", 10)
    made = np.asarray(inputs.on_ranks(case.mesh, (6, 5), 0), np.float32)
    assert made.shape == (24, 5) and len(np.unique(made)) > 100
    with pytest.raises(ValueError, match=r"an array \(6, 11\) on each rank: expected rows of at most 10 elements"):
        inputs.on_ranks(case.mesh, (6, 11), 0)


def test_arrays_beyond_the_memory_of_the_machine(case, monkeypatch):
    """Linux kills a process that takes too much: `jax-ep trace moe --model deepseek-v3` on a laptop."""
    if jax.default_backend() != "cpu":
        pytest.skip("CPU devices share the memory of the machine")
    monkeypatch.setattr(inputs.os, "sysconf", {"SC_PHYS_PAGES": 4, "SC_PAGE_SIZE": 2 * RANKS * 6 * 5}.get)
    assert inputs.on_ranks(case.mesh, (6, 5), 0).shape == (6 * RANKS, 5)
    with pytest.raises(ValueError, match=rf"an array \(7, 5\) on each of {RANKS} CPU devices has .*--model tiny"):
        inputs.on_ranks(case.mesh, (7, 5), 0)


def test_a_chain_makes_every_call(case):
    variant, calls = sleeper(time.sleep, 0)
    for n in (1, 5):
        fn, arguments = variant.program(case, n)
        calls.clear()
        jax.block_until_ready(fn(*arguments))
        assert len(calls) == n * RANKS


def test_touched_arrays_are_new_in_every_call_and_the_same(case):
    """Their calls are not merged or moved out of the loop, and see what they were given."""
    seen = []

    def look(x):
        seen.append(np.asarray(x))
        return np.zeros((), np.float32)

    def step(_, x):
        return jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), x)

    x = inputs.on_ranks(case.mesh, (3, 2), 0)
    fn, arguments = chain(case.mesh, step, (x,), 4, touched=1)
    jax.block_until_ready(fn(*arguments))
    assert len(seen) == 4 * RANKS
    blocks = np.asarray(x).reshape(RANKS, 3, 2)
    assert all(any((got == block).all() for block in blocks) for got in seen)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program as XLA:CPU writes it")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_layers_of_a_chain_stay_in_its_loop(case, weights, backward):
    """As many all-to-alls in the loop as in one call of the layer, and no copy of what is touched."""
    (variant,) = layer.layers(case, weights, ["capacity"], backward=backward).values()
    fn, arguments = variant.program(case, 3)
    text = fn.lower(*arguments).compile().as_text()
    main = text[text.index("ENTRY") :]
    assert " while(" in main and "all-to-all" not in main and "all-to-all(" in text
    assert text.count(" all-to-all(") == (4 if backward else 2)
    loop = text[: text.index("ENTRY")]
    assert not [line for line in loop.splitlines() if "bf16[48,128]" in line.split(" copy(")[0] and " copy(" in line]


def test_layers_agree_and_report_their_gradients(case, weights):
    variants = layer.layers(case, weights, ["moe", "xla"], backward=True).values()
    got, expected = (results(variant, case) for variant in variants)
    assert [leaf.shape for leaf in got] == [(RANKS * n,) for n in (1024, 1024, 96, 1024, 1024)]
    assert harness.largest_difference(got, expected) < 0.1
    assert all(np.abs(leaf).max() > 0 for leaf in expected)
    wrong = expected[3].copy()
    wrong[1031] += 1.0
    assert harness.largest_difference([*expected[:3], wrong, expected[4]], expected) > 0.25


def test_layers_in_fp8_are_near_the_others(case, weights):
    variants = layer.layers(case, weights, ["moe", "fp8", "fp8 once", "balance fp8 once"], backward=True)
    expected, *others = (results(variant, case) for variant in variants.values())
    for variant, got in zip(list(variants.values())[1:], others, strict=True):
        assert 1e-3 < harness.largest_difference(got, expected) < variant.limit


def test_parts_of_one_half_agree(case, weights):
    """On `xla`, which has no kernel for two operations."""
    variants = layer.dispatch_part(case, weights, "xla") | layer.combine_part(case, weights, "xla")
    del variants["dispatch + GEMM 1, fused"], variants["GEMM 2 + combine, scatter"]
    pairs = {name: variant.same_as for name, variant in variants.items() if variant.same_as}
    assert set(pairs) == {"GEMM 1", *(name for name in variants if "+" in name)}
    found = {name: results(variants[name], case) for name in {*pairs, *pairs.values()}}
    for name, same in pairs.items():
        assert harness.largest_difference(found[name], found[same]) < 0.02, name
    rows = 48 * 2
    for name, columns in (("GEMM 1", 2 * 128), ("GEMM 2 + combine, fused", 128), ("einsum 2, equal groups", 128)):
        assert variants[name].flops == 2 * rows * 128 * columns
    assert variants["dispatch"].flops == 0


def test_failed_and_wrong_variants_are_reported_with_the_others(run, clock):
    broken = Mock(side_effect=RuntimeError("no algorithm"))
    variants = {
        "right": sleeper(clock.nap, 0.01)[0],
        "wrong": sleeper(clock.nap, 0.01, value=2.0, same_as="right")[0],
        "also right": sleeper(clock.nap, 0.01, same_as="right")[0],
        "broken": layer.Variant(broken, ()),
    }
    times = run.measure("forward", variants, (1, 3), {"right": {"dropped": 0.5}})
    assert set(times) == {"right", "also right"}
    rows = {row["variant"]: row for row in run.report.rows}
    assert rows["wrong"]["failed"].startswith("wrong: differs by 1 from right")
    assert "no algorithm" in rows["broken"]["failed"]
    assert (rows["right"]["dropped"], rows["also right"]["difference"]) == (0.5, 0.0)
    assert rows["right"]["seconds"]["median"] == pytest.approx(RANKS * 0.01)  # each rank puts the clock forward
    assert rows["right"]["tflops"] == pytest.approx(1e-3 / rows["right"]["seconds"]["median"])


def layer_row(variant, seconds, *, model="deepseek-v3", tokens=4096, routing="uniform"):
    shape = {"model": model, "routing": routing, "tokens_per_rank": tokens, "ranks": 2}
    return {"variant": variant, "shape": shape, "direction": "forward", "seconds": {"median": seconds}}


def test_plot_by_model_compares_us_with_what_jax_offers():
    assert {layer.LAYERS[key] for key in layer.BASELINES} == set(plots.BASELINES)
    assert (layer.LAYERS["moe"], tuple(layer.DIRECTIONS)) == (plots.OURS, plots.DIRECTIONS)
    ours, other = plots.OURS, plots.BASELINES[1]
    rows = [layer_row(ours, 0.002), layer_row(other, 0.003), layer_row("GEMM 1", 0.001), layer_row(ours, 9, tokens=8)]
    rows += [layer_row(other, 9, routing="zipf"), layer_row(ours, 1, model="alone"), layer_row(other, 1, model="too")]
    rows += [{**layer_row(plots.BASELINES[2], 9), "failed": "x"}]
    del rows[-1]["seconds"]
    found = plots.layers_of(rows)
    assert found == {"forward": {("deepseek-v3", 2): {ours: 2.0, other: 3.0}}, "forward + backward": {}}
