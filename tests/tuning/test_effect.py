"""Settings reach the launches in their order of precedence, and change results only by rounding."""

import concurrent.futures
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
import oracle
from jax_ep import tuning
from jax_ep.core import fp8
from jax_ep.core.facts import FusedFacts
from jax_ep.core.kernel import Config
from jax_ep.megakernels import cost_model, exchange, fused_moe, grouped_gemm, low_latency, quantized_gemm, tuned
from jax_ep.settings.operations import OPERATIONS, bucket
from jax_ep.tools import tune_cases
from jax_ep.tools.benchmark.inputs import Model
from jax_ep.types import Layout, Schedule
from jax_ep.xla import grouped_gemm as xla_products
from layers import low_latency_round_trip, round_trip

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="in the interpreter, with devices of kind cpu")
T, K, E, H = 9, 2, 4, 64
FACTS = {"num_ranks": 2, "num_tokens": 16, "hidden": 64, "top_k": 2, "dtype": "float32"}
LAYOUT = Layout(2, E, T, K, 40)


@pytest.fixture
def launched(monkeypatch):
    """Record name, config and sizes of each launch as it is traced."""
    found = []
    for module in (exchange, fused_moe, grouped_gemm, low_latency, quantized_gemm):
        launch = module.launch

        def note(kernel, operands, results, config, constants, _launch=launch, **o):
            found.append((kernel.name, config, constants["S"]))
            return _launch(kernel, operands, results, config, constants, **o)

        monkeypatch.setattr(module, "launch", note)
    return found


def of(launched, name):
    (found,) = [(config, sizes) for kernel, config, sizes in launched if kernel == name]
    return found


def entry(operation, facts, **settings):
    return {"operation": operation, "facts": facts, "settings": settings, "measured": {}}


def inputs(rng):
    return rng.standard_normal((2, T, H)).astype(np.float32), rng.integers(-1, E, (2, T, K)).astype(np.int32)


def sums(x, ids):
    return x * (ids >= 0).sum(-1, keepdims=True)


def test_tuning_precedence(two_ranks, launched, make_file, rng):
    """The caller, then an override, then the file, then the default; for each setting separately."""
    x, ids = inputs(rng)
    settings = {"num_warps": 2, "tokens_per_block": 2, "rows_in_flight": 3, "num_combining_programs": 9}
    tuning.use(make_file(entry("combine", FACTS, **settings), entry("dispatch", FACTS | {"wire_dtype": "float32"})))
    schedule = Schedule(num_warps=4, num_communicating_programs=1)
    fn = jax.jit(harness.per_rank(partial(round_trip, schedule=schedule), two_ranks))
    with tuning.override("combine", num_warps=1, tokens_per_block=8, num_combining_programs=1):
        np.testing.assert_array_equal(fn(x, ids), sums(x, ids))
    config, sizes = of(launched, "combine")
    assert (config.num_warps, sizes.tile.block_tokens, sizes.tile.rows_in_flight, config.num_programs) == (4, 8, 3, 1)
    assert of(launched, "dispatch")[0] == Config(1, num_warps=4)
    launched.clear()
    np.testing.assert_array_equal(fn(x, ids), sums(x, ids))  # Traced again without the override.
    config, sizes = of(launched, "combine")
    assert (config.num_programs, sizes.tile.block_tokens) == (2, 2)  # There is no work for nine.
    launched.clear()
    fn(x, ids)
    assert launched == []  # Not traced again.
    tuning.use(None)
    np.testing.assert_array_equal(fn(x, ids), sums(x, ids))
    assert of(launched, "combine")[1].tile.block_tokens == 4


def test_tuning_entries_match_sizes(two_ranks, launched, make_file, rng):
    x, ids = inputs(rng)
    others = [{"num_ranks": 4}, {"num_tokens": 8}, {"hidden": 128}, {"top_k": 1}, {"dtype": "bfloat16"}]
    tuning.use(make_file(*(entry("combine", FACTS | other, num_warps=16) for other in others)))
    jax.eval_shape(harness.per_rank(round_trip, two_ranks), x, ids)
    assert of(launched, "combine")[0].num_warps == 1


def test_tuning_overrides_nest_per_thread():
    def found():
        facts = tuned.exchange_facts(LAYOUT, H, jnp.dtype("float32"))
        return tuned.schedule(Schedule(), "combine", **facts)

    with tuning.override("combine", num_warps=2, rows_in_flight=2):
        with tuning.override("combine", num_warps=4), tuning.override("dispatch", num_warps=16):
            assert found() == Schedule(num_warps=4, rows_in_flight=2)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                assert pool.submit(found).result() == Schedule()
        assert found() == Schedule(num_warps=2, rows_in_flight=2)
        with pytest.raises(RuntimeError), tuning.override("combine", num_warps=8):
            raise RuntimeError
        assert found() == Schedule(num_warps=2, rows_in_flight=2)
    assert found() == Schedule()


def test_tuning_overrides_invalid():
    for operation, settings, message in (
        ("sort", {}, "override: operation 'sort', expected one of dispatch"),
        ("s" * 10**5, {}, "^override: operation 's{1,60}[.]{3}s+', expected one of dispatch"),
        ("combine", {"warps": 1}, "combine has no setting 'warps', expected some of num_combining_programs"),
        ("combine", {"num_warps": 5}, "num_warps=5, expected a power of two from 1 to 16; see docs/tuning.md"),
        ("grouped_gemm", {"tma_store": 1}, r"tma_store=1, expected one of \(False, True\)"),
    ):
        with pytest.raises(ValueError, match=message):
            tuning.override(operation, **settings)
    facts = tuned.exchange_facts(Layout(2, E, 1 << 17, K, 40), H, jnp.dtype("float32"))
    with tuning.override("combine", tokens_per_block=2), pytest.raises(ValueError, match="expected at least 4"):
        tuned.schedule(Schedule(), "combine", **facts)


def test_tuning_tiles_reach_launch(two_ranks, launched, make_file, rng):
    lhs, rhs = rng.standard_normal((32, 48)), rng.standard_normal((2, 48, 64))
    facts = {"num_rows": 32, "depth": 64, "columns": 64, "groups": 2, "dtype": "bfloat16", "out_dtype": "bfloat16"}
    settings = {"block_m": 32, "num_warps": 4, "programs": 1}
    tuning.use(make_file(entry("grouped_gemm", facts, **settings), entry("weight_gradient", facts, block_r=32)))
    sizes = jnp.array([20, 12], jnp.int32)
    lhs, rhs = jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(rhs, jnp.bfloat16)

    def product(lhs, rhs):
        return jax_ep.grouped_gemm(lhs, rhs, sizes, implementation="triton")

    def total(lhs, rhs):
        return product(lhs, rhs).astype(jnp.float32).sum()

    got = product(lhs, rhs)
    config, found = of(launched, "grouped_gemm")
    assert (config.num_warps, found.tile.block_m, found.tile.block_n) == (4, 32, 32)
    with tuning.override("grouped_gemm", block_n=64, block_m=16):  # The same call, traced again.
        # NumPy adds blocks of other sizes in another order.
        np.testing.assert_allclose(product(lhs, rhs).astype(jnp.float32), got.astype(jnp.float32), 2**-7, 2**-7)
    assert [found.tile.block_n for name, _, found in launched if name == "grouped_gemm"] == [32, 64]
    jax.eval_shape(jax.grad(total, argnums=1), lhs, rhs)
    assert of(launched, "weight_gradient")[1].tile.block_rows == 32
    want = oracle.grouped_gemm(np.asarray(lhs), np.asarray(rhs), sizes)
    np.testing.assert_allclose(np.asarray(got, float), want, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("make", [tune_cases._grouped_gemm, tune_cases._grouped_gemm_fp8], ids=["bfloat16", "FP8"])
def test_tuning_gemm_keys_match_launches(make, two_ranks, launched, make_file):
    """Entries for the shapes of the cases, of both GEMMs and gradients, reach the launches of these operations."""
    sizes = tune_cases.Sizes(24, Model(128, 256, 2, 1), ranks=1, routing="uniform")
    cases = list(make(sizes))
    assert len({(case.operation, case.facts["depth"]) for case in cases}) == 4
    facts = [{name: bucket(name, value) for name, value in case.facts.items()} for case in cases]
    tuning.use(make_file(*(entry(case.operation, of, block_n=128) for case, of in zip(cases, facts, strict=True))))
    for case in cases:
        launched.clear()
        case.make_chain({})(1)
        assert of(launched, case.operation)[1].tile.block_n == 128, case.title
        launched.clear()
        with tuning.override(case.operation, num_warps=2, block_n=64):
            case.make_chain({"block_n": 32})(1)
        config, sizes_of_launch = of(launched, case.operation)
        assert (config.num_warps, sizes_of_launch.tile.block_n) == (2, 32), case.title


@pytest.mark.parametrize("make", [tune_cases._quantized_gemm, tune_cases._fused_moe])
def test_tuning_prepacked_weights_key(make, two_ranks, launched, make_file):
    sizes = tune_cases.Sizes(8, Model(128, 128, 2, 1), ranks=1, routing="uniform")
    heights = dict[str, set[int]]()
    for expert_format in ("mxfp4", "mxfp4_prepacked"):
        (case,) = make(sizes, expert_format)
        assert case.facts["format"] == expert_format
        if expert_format == "mxfp4_prepacked":
            facts = {name: bucket(name, value) for name, value in case.facts.items()}
            tuning.use(make_file(entry(case.operation, facts, block_m=64)))
        case.make_chain(case.start)(1)
        _, found = of(launched, "fused_moe" if case.operation == "fused_moe" else "quantized_grouped_gemm")
        products = (found.gate_up, found.down) if case.operation == "fused_moe" else (found,)
        heights[expert_format] = {product.tile.block_m for product in products}
        launched.clear()
    assert heights["mxfp4_prepacked"] == {64} != heights["mxfp4"]


def test_tuning_fp8_sizes_not_whole_blocks():
    sizes = tune_cases.Sizes(8, Model(128, 192, 2, 1), ranks=1, routing="uniform")
    with pytest.raises(NotImplementedError, match="multiples of 128"):
        list(tune_cases._grouped_gemm_fp8(sizes))


@pytest.mark.parametrize("case", range(4))
def test_tuning_random_fp8_tiles(case, two_ranks, rng):
    """Row and column-wise quantized GEMMs match the portable functions, up to the order of roundings."""
    sizes = jnp.asarray(rng.multinomial(int(rng.integers(1, 90)), [0.2, 0.0, 0.8]), jnp.int32)
    rows, others = (jnp.asarray(rng.standard_normal((100, width)), jnp.bfloat16) for width in (128, 256))
    x, w = fp8.quantize_rows(rows), fp8.quantize_matrices(jnp.ones((3, 128, 256)) * 0.3)
    a, b = (fp8.quantize_columns(side, sizes) for side in (rows, others))
    chosen = {name: draw(rng, name) for name in ("grouped_gemm_fp8", "weight_gradient_fp8")}
    print(chosen, sizes)
    found = []
    for run in (grouped_gemm, xla_products):
        with (
            tuning.override("grouped_gemm_fp8", **chosen["grouped_gemm_fp8"]),
            tuning.override("weight_gradient_fp8", **chosen["weight_gradient_fp8"]),
        ):
            product = run.grouped_gemm_fp8(x, w, sizes, out_dtype=jnp.float32)
            found.append((product, run.weight_gradient_fp8(a, b, sizes, out_dtype=jnp.float32)))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["fused", "serial"])
def test_tuning_modes_from_file(mode, make_file):
    facts = {"num_ranks": 2, "num_tokens": 16, "top_k": 2, "num_experts": 4, "depth": 64, "columns": 64}
    facts |= {"dtype": "bfloat16"}
    combine = "scatter" if mode == "fused" else "serial"
    found = tuned.exchange_gemm_facts(LAYOUT, H, H, jnp.dtype("bfloat16"))
    tuning.use(
        make_file(
            entry("dispatch_grouped_gemm", facts, dispatch_mode=mode),
            entry("grouped_gemm_combine", facts, combine_mode=combine),
        )
    )
    assert tuned.schedule(Schedule(), "dispatch_grouped_gemm", **found).dispatch_mode == mode
    facts = FusedFacts(jnp.dtype("bfloat16"), H, H, LAYOUT)
    modes = cost_model.fused_modes(Schedule(), facts, specialized=False, in_gluon=False)
    assert (modes.dispatch, modes.combine) == (mode, combine)
    assert (
        cost_model.fused_modes(Schedule(combine_mode="serial"), facts, specialized=False, in_gluon=False).combine
        == "serial"
    )


def test_tuning_rates_scale_cost_model(make_file):
    assert cost_model.scaled(None) == cost_model.H200 == cost_model.scaled(cost_model.H200_RATES)
    layout = Layout(8, 256, 4096, 8, 4096 * 8)
    before = cost_model.combine_times(layout, 2048, 7168, specialized=True)
    slow = {"link_bytes_per_s": 395e8, "memory_bytes_per_s": None, "product_flops_per_s": 735e12}
    tuning.use(make_file(rates=slow))
    assert cost_model._device().link_bytes == pytest.approx(35e9)
    assert cost_model._device().copy_bytes == cost_model.H200.copy_bytes
    after = cost_model.combine_times(layout, 2048, 7168, specialized=True)
    assert after["scatter"] > 3 * before["scatter"]
    assert cost_model.combine_mode(layout, 2048, 7168, specialized=True) == "serial"


def draw(rng, operation):
    """Draw settings with small values: in the interpreter each block is an array."""
    settings = {}
    for name, values in OPERATIONS[operation].settings.items():
        if rng.random() < 0.7:
            known = values.choices or range(values.least, min(values.most, 64) + 1)
            settings[name] = rng.choice([value for value in known if value in values]).item()
    return settings


@pytest.mark.parametrize("case", range(8))
def test_tuning_random_settings_same_bits(case, two_ranks, rng):
    x, ids = inputs(rng)
    chosen = {operation: draw(rng, operation) for operation in ("dispatch", "combine")}
    print(chosen)
    with tuning.override("dispatch", **chosen["dispatch"]), tuning.override("combine", **chosen["combine"]):
        np.testing.assert_array_equal(harness.run(round_trip, two_ranks, x, ids), sums(x, ids))


@pytest.mark.parametrize("case", range(5))
def test_tuning_random_settings_few_tokens(case, two_ranks, rng):
    x, ids = inputs(rng)
    weights = rng.random((2, T, K)).astype(np.float32)

    chosen = [draw(rng, name) for name in ("low_latency_dispatch", "low_latency_combine")]
    print(chosen)
    with tuning.override("low_latency_dispatch", **chosen[0]), tuning.override("low_latency_combine", **chosen[1]):
        got = harness.run(low_latency_round_trip, two_ranks, x, ids, weights)
    np.testing.assert_allclose(got, x * (weights * (ids >= 0)).sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", range(8))
def test_tuning_random_tiles(case, two_ranks, rng):
    sizes = rng.multinomial(int(rng.integers(1, 90)), [0.2, 0.0, 0.8])
    lhs = jnp.asarray(rng.standard_normal((100, 40)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((3, 40, 72)), jnp.bfloat16)
    chosen = draw(rng, "grouped_gemm")
    print(chosen, sizes)
    with tuning.override("grouped_gemm", **chosen):
        got = jax_ep.grouped_gemm(lhs, rhs, jnp.asarray(sizes, jnp.int32), implementation="triton")
    want = oracle.grouped_gemm(np.asarray(lhs), np.asarray(rhs), sizes)
    np.testing.assert_allclose(np.asarray(got, float), want, rtol=0.02, atol=0.1)
