"""dispatch and combine move the right bits, for every routing, shape, dtype and capacity."""

import dataclasses

import numpy as np
import pytest

import jax_ep
import oracle
from cases import (
    BASE,
    BF16,
    F16,
    F32,
    FP8_WIRE,
    SHAPES,
    Shape,
    assert_close,
    assert_same_bits,
    integers,
    probabilities,
    reals,
)
from harness import compiled, run
from routings import FEW_ROUTINGS, ROUTINGS

OPERATION = "exchange"


def round_trip(shape, implementation, **options):
    """Compile dispatch, and combine of given rows; return all results."""

    def fn(x, topk_idx, topk_weights, y):
        out = jax_ep.dispatch(
            x, topk_idx, topk_weights, num_experts=shape.num_experts, implementation=implementation, **options
        )
        back = jax_ep.combine(y, out.handle, implementation=implementation)
        return out._replace(handle=out.handle.num_invalid), back

    return fn


class Problem:
    """Random inputs of one routing, with rows to combine whose padding is poisoned."""

    def __init__(self, rng, routing, num_ranks, shape, dtype=BF16, **layout):
        self.topk_idx = ROUTINGS[routing](rng, num_ranks, shape)
        self.lay = oracle.layout(self.topk_idx, shape.num_experts, **layout)
        self.x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=dtype)
        self.topk_weights = probabilities(rng, *self.topk_idx.shape)
        self.y = self.poisoned(integers(rng, *self.lay.source.shape, shape.hidden, dtype=dtype))

    def poisoned(self, y):
        """Set padding rows, which must not be read, to NaN."""
        return np.where(self.lay.is_padding[..., None], np.array(np.nan, y.dtype), y)

    @property
    def args(self):
        return self.x, self.topk_idx, self.topk_weights, self.y

    def check(self, dispatched, back):
        assert_same_bits(dispatched.tokens, oracle.gather(self.x, self.lay), "tokens")
        assert_same_bits(dispatched.weights, oracle.gather_weights(self.topk_weights, self.lay), "weights")
        assert_same_bits(dispatched.group_sizes, self.lay.group_sizes, "group_sizes")
        assert_same_bits(dispatched.dropped, self.lay.dropped, "dropped")
        assert_same_bits(dispatched.handle, self.lay.num_invalid, "num_invalid")
        # Sums of small integers are exact in any order; an empty sum is +0.
        assert back.dtype == self.y.dtype
        np.testing.assert_array_equal(back.astype(np.float64), oracle.combine(self.y, self.lay), "combine")


def test_dispatch_combine_routings(implementation, every_mesh, rng, subtests):
    call = compiled(round_trip(BASE, implementation), every_mesh)
    for routing in ROUTINGS:
        with subtests.test(routing):
            problem = Problem(rng, routing, every_mesh.size, BASE)
            problem.check(*call(*problem.args))
    with subtests.test("reals, twice"):
        problem = Problem(rng, "duplicates", every_mesh.size, BASE)
        problem.y = problem.poisoned(reals(rng, *problem.y.shape, dtype=BF16))
        _, back = call(*problem.args)
        assert_close(back, oracle.combine(np.nan_to_num(problem.y), problem.lay), "combine")
        assert_same_bits(call(*problem.args)[1], back, "second run")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow(unless={"name": ["prime_tokens", "odd_hidden", "one_expert_in_the_world"]})
def test_dispatch_combine_shapes(implementation, name, expert_mesh, rng, subtests):
    num_ranks, shape = SHAPES[name]
    call = compiled(round_trip(shape, implementation), expert_mesh(num_ranks))
    for routing in FEW_ROUTINGS:
        with subtests.test(routing):
            problem = Problem(rng, routing, num_ranks, shape)
            problem.check(*call(*problem.args))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_dispatch_combine_dtypes(implementation, dtype, expert_mesh, rng):
    problem = Problem(rng, "duplicates", 2, BASE, dtype)
    problem.check(*run(round_trip(BASE, implementation), expert_mesh(2), *problem.args))


def test_dispatch_combine_float64(implementation, expert_mesh, rng, float64):
    problem = Problem(rng, "duplicates", 2, BASE, np.dtype(np.float64))
    problem.check(*run(round_trip(BASE, implementation), expert_mesh(2), *problem.args))


# (capacity, alignment): dropless and aligned, cut within a group, cut to a single row or block, room to spare.
@pytest.mark.parametrize(("capacity", "alignment"), [(None, 8), (8, 4), (1, 1), (20, 1), (96, 16)])
@pytest.mark.slow_interpreted(unless={"alignment": [4, 16]})
def test_dispatch_combine_capacity_and_alignment(implementation, capacity, alignment, expert_mesh, rng, subtests):
    options = {"capacity": capacity, "alignment": alignment}
    call = compiled(round_trip(BASE, implementation, **options), expert_mesh(2))
    for routing in ("uniform", "zipf", "one_hot_every_slot", "no_experts", "duplicates", "out_of_range"):
        with subtests.test(routing):
            problem = Problem(rng, routing, 2, BASE, **options)
            problem.check(*call(*problem.args))


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.uint8])
@pytest.mark.slow_interpreted
def test_dispatch_combine_numpy_integers(implementation, expert_mesh, rng, kind):
    """As static sizes they work like Python integers, without a dtype that could reach an array."""
    problem = Problem(rng, "uniform", 2, BASE)
    shape = dataclasses.replace(BASE, num_experts=kind(BASE.num_experts))
    problem.check(*run(round_trip(shape, implementation), expert_mesh(2), *problem.args))


def test_dispatch_combine_handle_reuse(implementation, mesh, rng):
    """A second dispatch with the handle of the first sends other tokens along the same routes."""
    options = {"num_experts": BASE.num_experts, "capacity": 24, "alignment": 2, "implementation": implementation}

    def fn(x, topk_idx, topk_weights, other, y):
        first = jax_ep.dispatch(x, topk_idx, **options)
        bare = jax_ep.dispatch(other, None, handle=first.handle, **options)
        weighted = jax_ep.dispatch(other, topk_idx, topk_weights, handle=first.handle, **options)
        back = jax_ep.combine(y, weighted.handle, implementation=implementation)
        return [d._replace(handle=d.handle.num_invalid) for d in (first, bare, weighted)], back

    problem = Problem(rng, "zipf", mesh.size, BASE, capacity=24, alignment=2)
    other = reals(rng, *problem.x.shape, dtype=BF16)
    (first, bare, weighted), back = run(fn, mesh, problem.x, problem.topk_idx, problem.topk_weights, other, problem.y)
    assert_same_bits(first.tokens, oracle.gather(problem.x, problem.lay), "first")
    assert first.weights is None
    assert bare.weights is None
    assert_same_bits(bare.tokens, oracle.gather(other, problem.lay), "reused")
    assert_same_bits(bare.group_sizes, problem.lay.group_sizes, "group_sizes")
    problem.x = other
    problem.check(weighted, back)


def test_dispatch_quantized_tokens_bit_for_bit(implementation, expert_mesh, rng):
    """A (values, scales) pair is moved bit for bit, even bytes that no quantization produces."""

    def fn(values, scales, topk_idx):
        return jax_ep.dispatch(
            (values, scales), topk_idx, num_experts=BASE.num_experts, alignment=4, implementation=implementation
        ).tokens

    topk_idx = ROUTINGS["some_without_expert"](rng, 2, BASE)
    values = rng.integers(0, 256, (2, BASE.num_tokens, 256), np.uint8).view(oracle.FP8)
    scales = rng.integers(0, 2**32, (2, BASE.num_tokens, 2), np.uint32).view(F32)
    lay = oracle.layout(topk_idx, BASE.num_experts, alignment=4)
    got_values, got_scales = run(fn, expert_mesh(2), values, scales, topk_idx)
    assert_same_bits(got_values, oracle.gather(values, lay), "values")
    assert_same_bits(got_scales, oracle.gather(scales, lay), "scales")


def fp8_friendly(rng, *shape, dtype):
    """Draw numbers whose blocks of 128 peak at 448 times a power of two, so that scales are exact."""
    x = rng.uniform(-400, 400, shape)
    x[..., ::128] = 448
    exponents = rng.integers(-9, 2, (*shape[:-1], shape[-1] // 128)).repeat(128, -1)
    return (x * 2.0**exponents).astype(dtype)


def test_dispatch_combine_fp8_wire(implementation, expert_mesh, rng, subtests):
    """Tokens are quantized and dequantized, and so are the partial sums of combine."""

    def fn(x, topk_idx, y):
        out = jax_ep.dispatch(
            x, topk_idx, num_experts=BASE.num_experts, schedule=FP8_WIRE, implementation=implementation
        )
        back = jax_ep.combine(y, out.handle, schedule=FP8_WIRE, implementation=implementation)
        return out.tokens, back

    mesh = expert_mesh(2)
    call = compiled(fn, mesh)
    for dtype in (BF16, F32):
        topk_idx = ROUTINGS["uniform"](rng, 2, BASE)
        lay = oracle.layout(topk_idx, BASE.num_experts)
        x = fp8_friendly(rng, 2, BASE.num_tokens, 256, dtype=dtype)
        # One 448 in every partial sum, from the first row of a token on a rank, makes those scales exact too.
        y = integers(rng, *lay.source.shape, 256, dtype=dtype, largest=100)
        y[..., ::128] = 0
        for rank in range(2):
            seen = set()
            for row, source, token, _, _ in lay.rows(rank):
                y[rank, row, ::128] = 0 if (source, token) in seen else 448
                seen.add((source, token))
        y = np.where(lay.is_padding[..., None], np.array(np.nan, dtype), y)
        tokens, back = call(x, topk_idx, y)
        with subtests.test(f"dispatch {dtype}"):
            assert_same_bits(tokens, oracle.gather(oracle.to_wire(x, oracle.FP8), lay), "tokens")
        with subtests.test(f"combine {dtype}"):
            want = oracle.combine(y, lay, oracle.FP8)
            assert np.abs(want - oracle.combine(y, lay)).max() > 0  # The wire format does lose bits here.
            np.testing.assert_array_equal(back, want.astype(F32).astype(dtype))
    with subtests.test("error bound on any input"):
        x = (reals(rng, 2, BASE.num_tokens, 256) * np.exp(3 * reals(rng, 2, BASE.num_tokens, 256))).astype(F32)
        x[0, 0] = 0
        tokens, _ = call(x, topk_idx, y.astype(F32))
        exact, scales = oracle.gather(x, lay), oracle.gather(oracle.quantize(x)[1].repeat(128, -1), lay)
        error = np.abs(tokens.astype(np.float64) - exact)
        assert (error <= np.maximum(np.abs(exact) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)).all()
        assert_close(tokens, oracle.gather(oracle.to_wire(x, oracle.FP8), lay), "tokens", tolerance=2**-4)


def test_combine_partial_sums_rounded_once(implementation, expert_mesh, rng):
    """Each rank sums in float32 and rounds to the dtype of y; the source sums those in float32 and rounds."""
    shape = Shape(top_k=6)
    problem = Problem(rng, "uniform", 2, shape)
    # Sums of up to 600 in bfloat16 are exact in float32, and every expected cast rounds those above 256.
    problem.y = problem.poisoned(integers(rng, *problem.y.shape, dtype=BF16, largest=100) + BF16.type(60))
    _, back = run(round_trip(shape, implementation), expert_mesh(2), *problem.args)
    want = oracle.combine(problem.y, problem.lay, BF16).astype(BF16)
    assert (want != oracle.combine(problem.y, problem.lay).astype(BF16)).any()
    assert_same_bits(back, want, "combine")
