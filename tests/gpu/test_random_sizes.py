"""Random sizes in the range of real models, with random options: `triton` against `xla` on the same devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BF16, F16, F32, TOLERANCE, Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import compiled, make_mesh
from routings import ROUTINGS

pytestmark = pytest.mark.usefixtures("on_gpu")  # The interpreter would take minutes for each.
EXAMPLES = range(12)
MOST_BYTES = 1 << 28
FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Problem:
    """One random problem; `options` are keywords of the functions under test."""

    num_ranks: int
    shape: Shape
    dtype: np.dtype
    routing: str
    options: dict[str, Any]


def one_of(rng, *values):
    return values[rng.integers(len(values))]


def size(rng, largest, multiple=1):
    """Draw up to `largest` multiples, small ones as often as large ones; half of them next to a power of two."""
    largest = max(largest, 1)
    value = int(np.exp(rng.uniform(0, np.log(largest))))
    if rng.random() < 0.5:
        value = 2 ** max(value.bit_length() - 1, 0) + int(rng.integers(-1, 2))
    return multiple * int(np.clip(value, 1, largest))


def draw_shape(rng, num_ranks, *, tokens, multiple):
    """Draw a shape whose tokens, rows and weights each fit into MOST_BYTES on every rank."""
    while True:
        num_local = size(rng, 64)
        shape = Shape(
            num_tokens=size(rng, tokens),
            top_k=size(rng, 16),
            num_experts=num_ranks * num_local,
            hidden=size(rng, 8192 // multiple, multiple),
            intermediate=size(rng, 4096 // multiple, multiple),
        )
        rows = num_ranks * shape.num_tokens * shape.top_k
        matrices = 2 * num_local * shape.hidden * shape.intermediate
        if 4 * max(rows * max(shape.hidden, 2 * shape.intermediate), matrices) <= MOST_BYTES:
            return shape


def draw_ranks(rng):
    """Draw a number of devices; use all if several processes share them."""
    return int(rng.integers(1, jax.device_count() + 1)) if jax.process_count() == 1 else jax.device_count()


def draw(rng, *, multiple):
    num_ranks = draw_ranks(rng)
    shape = draw_shape(rng, num_ranks, tokens=4096, multiple=multiple)
    rows = num_ranks * shape.num_tokens * shape.top_k
    return Problem(
        num_ranks,
        shape,
        one_of(rng, BF16, BF16, F16, F32),
        one_of(rng, *ROUTINGS),
        {"capacity": one_of(rng, None, None, size(rng, rows)), "num_experts": shape.num_experts},
    )


def compare(got, want, problem, *, exact):
    """Compare bit for bit, or floats within the tolerance of the tokens' dtype."""
    for name in want:
        what = f"{name} of {problem}"
        if exact or want[name].dtype.kind == "i":
            assert_same_bits(got[name], want[name], what)
        else:
            assert_close(got[name], want[name], what, tolerance=TOLERANCE[problem.dtype])


@pytest.mark.parametrize("example", EXAMPLES)
def test_random_sizes_exchange(example, rng):
    """dispatch and combine and their transposes give the same bits, because the sums are exact."""
    problem = draw(rng, multiple=one_of(rng, 1, 8, 128))
    shape, alignment = problem.shape, one_of(rng, 1, 1, 16, 128)
    capacity = problem.options["capacity"]
    options = problem.options | {
        "alignment": alignment,
        "capacity": None if capacity is None else oracle.round_up(capacity, alignment),
    }
    in_fp8 = shape.hidden % 128 == 0 and problem.dtype != F16 and rng.random() < 0.5
    wire = {"schedule": jax_ep.Schedule(wire_dtype=FP8 if in_fp8 else None)}

    def fn(implementation):
        def body(x, ids, weights):
            def there(x, weights):
                sent = jax_ep.dispatch(x, ids, weights, implementation=implementation, **options, **wire)
                return (sent.tokens, sent.weights), sent

            (rows, row_weights), back, sent = jax.vjp(there, x, weights, has_aux=True)
            y = jnp.round(rows)  # Small integers, so that every sum is exact in any wire dtype.
            d_x, d_weights = back((y, row_weights))
            sums = jax_ep.combine(y, sent.handle, implementation=implementation, **wire)
            out = {"tokens": rows, "weights": row_weights, "d_x": d_x, "d_weights": d_weights, "sums": sums}
            return out | {"group_sizes": sent.group_sizes, "dropped": sent.dropped}

        return compiled(body, make_mesh((problem.num_ranks,), ("expert",)))

    ids = ROUTINGS[problem.routing](rng, problem.num_ranks, shape)
    x = integers(rng, problem.num_ranks, shape.num_tokens, shape.hidden, dtype=problem.dtype, largest=1)
    args = x, ids, integers(rng, *ids.shape)
    compare(fn("triton")(*args), fn("xla")(*args), problem, exact=not in_fp8)


def gate_operands(rng, problem, columns, *, exact):
    """Draw tokens and the first weights; with `exact`, small integers: relu's gradient depends on the order of sums."""
    shape, ranks = problem.shape, problem.num_ranks
    sizes = (ranks, shape.num_tokens, shape.hidden), (ranks, shape.num_experts // ranks, shape.hidden, columns)
    if exact:
        x, w = (integers(rng, *size, largest=1) for size in sizes)
        return x.astype(problem.dtype), w * 2.0 ** -(shape.hidden.bit_length() // 2)
    return reals(rng, *sizes[0], dtype=problem.dtype), reals(rng, *sizes[1]) / np.sqrt(shape.hidden)


@pytest.mark.parametrize("example", EXAMPLES)
def test_random_sizes_layer(example, rng):
    """moe and all of its gradients match in every mode, up to the rounding of the dtype."""
    multiple = one_of(rng, 8, 8, 128, 1)
    problem = draw(rng, multiple=multiple)
    shape, dtype, gated = problem.shape, problem.dtype, bool(rng.random() < 0.8)
    fusable = dtype != F32 and multiple > 1
    mode = one_of(rng, None, "scatter", "serial")
    tuned = jax_ep.Schedule(combine_mode=mode, num_communicating_programs=one_of(rng, None, 1, 7, 64))
    options = problem.options | {"experts": jax_ep.Experts(one_of(rng, "silu", "gelu", "relu"), gated=gated)}

    def fn(**options):
        def body(x, ids, weights, w_gate_up, w_down, d_y):
            def layer(x, weights, w_gate_up, w_down):
                return jax_ep.moe(x, ids, weights, w_gate_up, w_down, **options)

            y, back = jax.vjp(layer, x, weights, w_gate_up, w_down)
            return dict(zip(("y", "d_x", "d_weights", "d_gate_up", "d_down"), (y, *back(d_y)), strict=True))

        return compiled(body, make_mesh((problem.num_ranks,), ("expert",)))

    ranks, local = problem.num_ranks, shape.num_experts // problem.num_ranks
    ids = ROUTINGS[problem.routing](rng, ranks, shape)
    columns = shape.intermediate * (2 if gated else 1)
    x, w_gate_up = gate_operands(rng, problem, columns, exact=options["experts"].activation == "relu")
    w_down = reals(rng, ranks, local, shape.intermediate, shape.hidden) / np.sqrt(shape.intermediate)
    d_y = reals(rng, ranks, shape.num_tokens, shape.hidden, dtype=dtype)
    args = x, ids, probabilities(rng, *ids.shape), w_gate_up.astype(dtype), w_down.astype(dtype), d_y
    got = fn(**options, schedule=tuned if fusable else None, implementation="triton")(*args)
    compare(got, fn(**options, implementation="xla")(*args), problem, exact=False)


@pytest.mark.parametrize("example", EXAMPLES)
def test_random_sizes_low_latency(example, rng):
    """Both low-latency operations give the same rows in the same places, and the same sums."""
    group_size = one_of(rng, 128, 64)
    ranks = draw_ranks(rng)
    shape = draw_shape(rng, ranks, tokens=512, multiple=group_size)
    room = shape.num_tokens + int(rng.integers(0, 3))
    options = {"num_experts": shape.num_experts, "max_tokens_per_rank": room, "group_size": group_size}
    options["quantize"] = bool(rng.random() < 0.5)
    used = np.minimum(rng.integers(0, room + 1, ranks), shape.num_tokens).astype(np.int32)

    def fn(implementation):
        def body(x, ids, weights, num_tokens):
            out = jax_ep.low_latency_dispatch(x, ids, num_tokens=num_tokens, implementation=implementation, **options)
            rows = out.tokens.shape[-2]
            real = jnp.arange(rows)[None] < out.group_sizes[:, None]
            y = jnp.where(real, (jnp.arange(rows) % 7 + 1).astype(x.dtype), jnp.nan)
            y = jnp.broadcast_to(y[..., None], out.tokens.shape)
            back = jax_ep.low_latency_combine(y, ids, weights, out.handle, implementation=implementation)
            tokens = jnp.where(real[..., None], out.tokens.astype(jnp.float32), 0)
            scales = jnp.zeros(()) if out.scales is None else jnp.where(real[..., None], out.scales, 0)
            return {"tokens": tokens, "scales": scales, "group_sizes": out.group_sizes, "sums": back}

        return compiled(body, make_mesh((ranks,), ("expert",)))

    ids = ROUTINGS[one_of(rng, *ROUTINGS)](rng, ranks, shape)
    weights = np.abs(integers(rng, *ids.shape))  # The sign of a zero is not specified.
    args = reals(rng, ranks, shape.num_tokens, shape.hidden, dtype=BF16), ids, weights, used
    got, want = fn("triton")(*args), fn("xla")(*args)
    problem = Problem(ranks, shape, BF16, "", options)
    compare(got, want, problem, exact=True)
