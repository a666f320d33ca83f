"""The order of sends matches a stable sort for every rank, also for invalid ids."""

import jax
import numpy as np
import pytest
from compiling import compiled

import harness
import jax_ep
from jax_ep.core.kernel import Config
from jax_ep.megakernels import exchange_gemm
from jax_ep.megakernels.exchange_gemm import order_sends, send_order_sizes
from jax_ep.ops import registry
from jax_ep.types import Layout, Options

EXPERT = harness.EXPERT
ALSO_ON_GPUS = True
HOSTILE = np.array([-(2**31), 2**31 - 1, -2, -1, 2**30, -(2**30)], np.int32)
ON_CPU = jax.default_backend() == "cpu"


pytestmark = pytest.mark.usefixtures("no_context")


def wanted(layout, ids, rank):
    """Compute order, number of sends, and what local experts need, with NumPy."""
    num_local = layout.num_local_experts

    def firsts(source, target):
        local = ids[source].astype(np.int64) - target * num_local
        return np.where((local >= 0) & (local < num_local), local, num_local).min(axis=1)

    order = np.stack([np.argsort(firsts(rank, r), kind="stable") for r in range(layout.num_ranks)])
    sends = np.array([(firsts(rank, r) < num_local).sum() for r in range(layout.num_ranks)])
    needed = [[(firsts(s, rank) <= e).sum() for e in range(num_local)] for s in range(layout.num_ranks)]
    return order, sends, np.array(needed)


# (ranks, experts, tokens, top-k): with more tokens than a block, and with one bin more than a power of two.
@pytest.mark.parametrize("sizes", [(1, 4, 5, 2), (2, 8, 131, 3), (4, 128, 40, 8), (2, 128, 300, 1), (1, 1024, 5, 2)])
@pytest.mark.parametrize("hostile", [False, True], ids=["valid ids", "hostile ids"])
def test_schedule_kernel_order(sizes, hostile, rng):
    num_ranks, num_experts, num_tokens, top_k = sizes
    layout = Layout(num_ranks, num_experts, num_tokens, top_k, num_ranks * num_tokens * top_k)
    mesh = harness.make_mesh((num_ranks,), (EXPERT,))
    jax_ep.init(mesh, transport="shared_memory" if ON_CPU else None)
    ids = rng.integers(0, num_experts, (num_ranks, num_tokens, top_k), np.int32)
    if hostile:
        ids = np.where(rng.random(ids.shape) < 0.5, rng.choice(HOSTILE, ids.shape), ids)

    def fn(ids):
        handle = registry.EXCHANGE.by("triton").plan(Options("test", (EXPERT,)), ids, layout)
        return tuple(order_sends(handle))

    got = harness.run(fn, mesh, ids)
    for rank in range(num_ranks):
        want = wanted(layout, ids, rank)
        for name, result, value in zip(("order", "sends", "needed"), got, want, strict=True):
            np.testing.assert_array_equal(result[rank], value, err_msg=f"{name} of rank {rank}")


@pytest.mark.skipif(not ON_CPU, reason="compiled on the CPU")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("experts", "tokens"), [(256, 128), (256, 4096), (256, 32768), (2048, 4096), (4096, 4096)])
def test_schedule_kernel_without_spills(experts, tokens, capability):
    layout = Layout(4, experts, tokens, 8, 4 * tokens * 8)
    sizes = send_order_sizes(layout)
    names = ("topk_idx", "group", "positions", "counts", "order", "num_sends", "num_needed")
    pointers = dict.fromkeys([f"{name}_ptr" for name in names], "*i32")
    for kernel in (exchange_gemm._COUNT, exchange_gemm._PLACE):
        compiled(kernel, pointers, {"S": sizes}, Config(1, num_warps=4), capability, wide=False)
