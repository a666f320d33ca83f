"""Inputs of low-latency dispatch and combine, calls of both, and checks of their results."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
import oracle
import oracle_serving
from cases import BF16, assert_same_bits, integers, reals
from routings import ROUTINGS


def round_trip(implementation, shape, max_tokens, *, schedule=None, **options):
    """Return a function that returns what dispatch returns, and the combination of other rows."""
    options |= {"num_experts": shape.num_experts, "max_tokens_per_rank": max_tokens, "implementation": implementation}

    def fn(x, ids, weights, y, num_tokens=None):
        d = jax_ep.low_latency_dispatch(x, ids, num_tokens=num_tokens, **options)
        chosen = {"schedule": schedule, "implementation": implementation}
        return d, jax_ep.low_latency_combine(y, ids, weights, d.handle, **chosen)

    return fn


class Problem:
    """Integers, whose sums are exact; rows past the counts, and weights without an expert, are not finite."""

    def __init__(self, rng, routing, num_ranks, shape, max_tokens, num_tokens=None):
        self.ids = ROUTINGS[routing](rng, num_ranks, shape)
        self.is_valid = (self.ids >= 0) & (self.ids < shape.num_experts)
        self.exact_weights = np.where(self.is_valid, integers(rng, *self.ids.shape), 0).astype(np.float32)
        unused = np.where(np.arange(self.ids.size) % 2, np.nan, np.inf).reshape(self.ids.shape)
        self.weights = np.where(self.is_valid, self.exact_weights, unused).astype(np.float32)
        self.lay = oracle_serving.low_latency_layout(self.ids, shape.num_experts, max_tokens, num_tokens)
        self.is_row = self.lay.token >= 0
        self.x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=BF16)
        y = integers(rng, *self.lay.token.shape, shape.hidden, dtype=BF16)
        self.y = np.where(self.is_row[..., None], y, np.array(np.nan, BF16))
        self.max_tokens, self.num_tokens = max_tokens, shape.num_tokens if num_tokens is None else num_tokens[:, None]

    @property
    def args(self):
        return self.x, self.ids, self.weights, self.y

    def check_rows(self, got, tokens, what):
        """Check that rows within the counts are those of `tokens [W, T, ...]`, bit for bit."""
        want = oracle.gather(tokens, self.lay)
        assert got.shape == want.shape
        assert_same_bits(got[self.is_row], want[self.is_row], what)

    def check_routes(self, d, back):
        assert_same_bits(d.group_sizes, self.lay.group_sizes, "group_sizes")
        assert_same_bits(d.handle.source_token, self.lay.token, "source_token")
        assert_same_bits(d.handle.source_count, self.lay.count, "source_count")
        assert_same_bits(d.handle.source_start, self.lay.start, "source_start")
        assert_same_bits(d.handle.assignment_to_row, self.assignment_to_row(), "assignment_to_row")
        is_sent = np.arange(self.ids.shape[1]) < self.num_tokens
        num_invalid = (~self.is_valid & (self.ids != -1)).sum(2, where=is_sent[..., None]).sum(1, dtype=np.int32)
        assert_same_bits(np.ravel(d.handle.num_invalid), num_invalid, "num_invalid")
        want = oracle_serving.low_latency_combine(self.y, self.ids, self.exact_weights, self.lay)
        assert back.dtype == self.y.dtype
        np.testing.assert_array_equal(back.astype(np.float64), want)

    def check(self, d, back):
        assert d.scales is None
        self.check_rows(d.tokens, self.x, "tokens")
        self.check_routes(d, back)

    def assignment_to_row(self):
        num_ranks, _, top_k = self.ids.shape
        rows = np.full((num_ranks, num_ranks, self.max_tokens, top_k), -1, np.int32)
        for source, token, k in np.ndindex(*self.ids.shape):
            place = self.lay.row_of(source, token, int(self.ids[source, token, k]))
            if place is not None:
                rank, local, row = place
                rows[rank, source, token, k] = local * num_ranks * self.max_tokens + row
        return rows


def gemm_combine(implementation, shape, max_tokens, **options):
    """Return a function of given rows and matrices; the dispatch only creates the handle."""
    options["implementation"] = implementation

    def fn(x, ids, weights, lhs, rhs, num_tokens=None, **scales):
        rhs = jnp.swapaxes(rhs, 1, 2) if isinstance(rhs, jax.Array) else rhs
        sizes = {"num_experts": shape.num_experts, "max_tokens_per_rank": max_tokens, "num_tokens": num_tokens}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=False, implementation=implementation)
        operands = lhs, rhs, d.group_sizes, ids, weights, d.handle
        return jax_ep.ops.moe_low_latency.low_latency_gemm_combine(*operands, **options, **scales)

    return fn


class GemmProblem(Problem):
    """Exact products in any order, of rows `lhs` and matrices `rhs [W, L, columns, depth]`."""

    def __init__(self, rng, routing, num_ranks, shape, *args):
        super().__init__(rng, routing, num_ranks, shape, *args)
        self.x = self.x[..., :8]
        self.lhs = integers(rng, *self.lay.token.shape, shape.intermediate, dtype=BF16)
        local = shape.num_experts // num_ranks
        self.rhs = integers(rng, num_ranks, local, shape.hidden, shape.intermediate, dtype=BF16)

    @property
    def args(self):
        return self.x, self.ids, self.weights, self.poisoned(self.lhs), self.rhs

    def poisoned(self, rows):
        return np.where(self.is_row[..., None], rows, np.array(np.nan, rows.dtype))

    def want(self):
        y = np.stack([oracle_serving.masked_grouped_gemm(*rank) for rank in zip(self.lhs, self.rhs, strict=True)])
        return oracle_serving.low_latency_combine(y, self.ids, self.exact_weights, self.lay)
