"""The kernel of local steps against NumPy, whole layers of `pallas`, and lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import facts_of
import jax_ep
import oracle
from cases import BF16, F16, F32, assert_same_bits, integers, probabilities, reals
from harness import run
from jax_ep.core import fp8
from jax_ep.core.facts import ExchangeFacts
from jax_ep.ops import plan as plans
from jax_ep.pallas import exchange as pallas_exchange
from jax_ep.pallas import requirements
from jax_ep.types import Layout, Options
from jax_ep.xla import exchange, rounds

REFUSAL = requirements.unsupported_reason(facts_of.exchange(BF16), Options("dispatch", (), ("pallas",)))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

FP8 = oracle.FP8
POISON = np.nan


def some_rows(rng, num_rows, *shape):
    """Draw rows in any order, with duplicates and gaps, and without the last row."""
    return rng.integers(-1, num_rows - 1, shape).astype(np.int32)


def poisoned(x, index):
    """Set rows that are in no list to NaN."""
    x = x.copy()
    x[~np.isin(np.arange(len(x)), index)] = POISON
    return x


def gathered(x, index):
    return np.where(index[..., None] < 0, np.zeros((), x.dtype), x[index])


def summed(y, index):
    """Sum in float32 in order of k, as the kernels and XLA do."""
    total = gathered(y, index[:, 0]).astype(F32)
    for k in range(1, index.shape[1]):
        total = total + gathered(y, index[:, k]).astype(F32)
    return total


def quantized(y, index):
    return jax.jit(fp8.quantize_rows)(jnp.asarray(summed(y, index)))


def assert_same_pairs(got, want):
    for name, one, other in zip(("values", "scales"), got, want, strict=True):
        assert_same_bits(np.asarray(one), np.asarray(other), name)


# Lines in parts of 4, 12, 8 and 16; sums of several rows, and of one.
@pytest.mark.parametrize(
    ("lines", "top_k", "dtype"), [(4, 1, BF16), (12, 2, BF16), (8, 3, F16), (32, 1, F32), (16, 8, F32)], ids=str
)
@pytest.mark.slow(unless={"lines": [4, 12]})
def test_pallas_exchange_unpermute_to_fp8(lines, top_k, dtype, rng, races):
    """The bits match rows that are quantized afterwards; with one row, a permutation that quantizes."""
    index = some_rows(rng, 17, 7, top_k)
    y = poisoned(reals(rng, 17, lines * 128, dtype=F32), index).astype(dtype)
    y = y * np.exp2(rng.integers(*((-10, 3) if dtype == F16 else (-60, 60)), (17, 1))).astype(dtype)
    y[index[0, 0], 130] = POISON  # Only one scale block is lost.
    assert_same_pairs(pallas_exchange.unpermute(jnp.asarray(y), jnp.asarray(index), FP8), quantized(y, index))
    assert races() == 0


def test_pallas_exchange_vmap(rng):
    y, index = reals(rng, 2, 9, 512, dtype=BF16), some_rows(rng, 9, 2, 8, 2)
    got = jax.vmap(lambda y, i: pallas_exchange.unpermute(y, i, FP8))(jnp.asarray(y), jnp.asarray(index))
    for n in range(2):
        assert_same_pairs([part[n] for part in got], quantized(y[n], index[n]))


# Rows with fewer lines than a warpgroup has warps, no rows, sums that are not quantized, and a fit.
@pytest.mark.parametrize(
    ("columns", "num_tokens", "wire_dtype", "want"),
    [(128, 7, FP8, "xla"), (512, 0, FP8, "xla"), (512, 7, None, "xla"), (72, 7, None, "xla"), (512, 7, FP8, "pallas")],
    ids=str,
)
def test_pallas_exchange_plan_of_combine(columns, num_tokens, wire_dtype, want):
    """The plan gives sums to XLA that the kernel does not compute."""
    layout = Layout(1, 4, num_tokens, 3, 3 * num_tokens)
    options = Options("combine", (), ("pallas",), wire_dtype)
    plan = plans.exchange(options, ExchangeFacts(np.dtype(BF16), columns, layout))
    assert (plan.dispatch.implementation, plan.combine.implementation) == ("pallas", want)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("wire_dtype", [None, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("in_segments", [False, True], ids=["to_all", "rounds"])
@pytest.mark.slow(unless={"num_ranks": [2], "in_segments": [True]})
def test_pallas_exchange(num_ranks, wire_dtype, in_segments, expert_mesh, rng, monkeypatch):
    """The results match `xla` bit for bit, with both of its algorithms, and padding is never read."""
    if in_segments:
        monkeypatch.setattr(exchange, "GATHERED_BYTES", 0)
        monkeypatch.setattr(rounds, "round_size", lambda *_: 3)
    idx = rng.integers(-1, 4, (num_ranks, 6, 2)).astype(np.int32)
    x = reals(rng, num_ranks, 6, 512, dtype=BF16)
    rows = reals(rng, num_ranks, num_ranks * 12, 512, dtype=BF16)

    def both_ways(x, idx, rows, implementation):
        options = {"implementation": implementation, "schedule": jax_ep.Schedule(wire_dtype=wire_dtype)}
        out = jax_ep.dispatch(x, idx, num_experts=4, **options)
        used = jax_ep.row_experts(out.handle)[:, None] >= 0
        back = jax_ep.combine(jnp.where(used, rows, POISON), out.handle, **options)
        return out.tokens, back

    mesh = expert_mesh(num_ranks)
    want, got = (run(functools.partial(both_ways, implementation=i), mesh, x, idx, rows) for i in ("xla", "pallas"))
    for name, one, other in zip(("tokens", "sums"), got, want, strict=True):
        assert_same_bits(one, other, name)


@pytest.mark.parametrize("recipe", [None, "fp8"], ids=str)
@pytest.mark.slow
def test_pallas_exchange_layer_and_gradients(recipe, rng):
    """A whole layer with `pallas` only; whole numbers, which it and `xla` add exactly."""
    x, idx = integers(rng, 12, 512, dtype=BF16), rng.integers(-1, 3, (12, 2)).astype(np.int32)
    weights = probabilities(rng, 12, 2)
    w_gate_up, w_down = reals(rng, 3, 512, 256, dtype=BF16), reals(rng, 3, 128, 512, dtype=BF16)
    weigh = reals(rng, 12, 512)

    def loss(x, weights, w_gate_up, w_down, implementation):
        y = jax_ep.fused_moe(x, idx, weights, w_gate_up, w_down, recipe=recipe, implementation=implementation)
        return jnp.sum(y.astype(F32) * weigh)

    def gradients(implementation):
        call = jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2, 3))
        return jax.jit(call)(x, weights, w_gate_up, w_down)

    for name, got, want in zip(["x", "weights", "gate_up", "down"], gradients("pallas"), gradients("xla"), strict=True):
        got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want), name


def lower(call, *arguments):
    """Return MLIR of a call for CUDA, with all checks of layouts and of shared memory."""
    shapes = [jax.ShapeDtypeStruct(*argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_exchange, "is_interpreted", lambda: False)
        return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


to_fp8 = functools.partial(pallas_exchange.unpermute, dtype=FP8)
MODELS = {"DeepSeek-V3": (7168, 8), "Qwen3-30B": (2048, 8), "Mixtral": (4096, 2)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.slow(unless={"model": ["DeepSeek-V3"], "x64": [False]})
def test_pallas_exchange_models_lower(model, x64):
    columns, top_k = MODELS[model]
    tokens, rows = 4096, 4096 * top_k
    with jax.enable_x64(x64):
        for dtype, sums, of in ((BF16, tokens, top_k), (F32, tokens, 1), (BF16, rows, 1)):
            assert "mosaic_gpu" in lower(to_fp8, ((rows, columns), dtype), ((sums, of), jnp.int32))


@pytest.mark.parametrize("rows", [32768, 32767])
@pytest.mark.slow
def test_pallas_exchange_extreme_sizes_lower(rows):
    """The longest rows, the shortest, large top_k, and offsets past 32 bits."""
    for columns, top_k in ((512, 64), (1 << 15, 32)):
        assert "mosaic_gpu" in lower(to_fp8, ((1 << 20, columns), BF16), ((rows, top_k), jnp.int32))
