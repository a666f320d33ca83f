"""Every kernel compiles to PTX without a GPU, with 16-byte accesses for rows and without spilled registers."""

import re

import jax
import jax.numpy as jnp
import pytest
from compiling import compiled, registers

from jax_ep.core.kernel import Config
from jax_ep.heap.symmetric import HeapLayout
from jax_ep.megakernels import balance_plan, exchange, expert_copies
from jax_ep.megakernels.kernels.exchange_structs import (
    Combine,
    Dispatch,
    PassSizes,
    Peers,
    PlanScratch,
    SmallExchange,
    Sums,
)
from jax_ep.megakernels.launch import heap_of
from jax_ep.types import Layout, Schedule

pytest.importorskip("triton")

LAYOUT = Layout(num_ranks=4, num_experts=256, num_tokens=4096, top_k=8, capacity=40960)
HIDDEN = 7168
CAPABILITIES = [80, 90, 100, 120]
COPIES = r"cp\.async\.cg\.shared\.global \[.*\], 0x10"
HEAP, PEERS = heap_of(HeapLayout(4), 4, 1), Peers("*i32", "*i64")


def row_sizes(hidden, fp8):
    sizes = {"num_tokens": 4096, "top_k": 8, "hidden": hidden, "num_local_experts": 64, "num_experts": 256}
    return sizes | {"scales_offset": 1 << 29, "weights_offset": 1 << 30, "fp8": fp8}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fp8", [False, True], ids=["as-is", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("limit", [None, 24], ids=["all-programs", "few-programs"])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.usefixtures("on_h200")
def test_ptx_row_kernels(name, limit, dtype, fp8, capability):
    if fp8 and capability < 89:
        pytest.skip("this architecture has no FP8 conversions")
    element = {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    wire_dtype = jnp.dtype(jnp.float8_e4m3fn if fp8 else dtype)
    if name == "dispatch":
        schedule = Schedule(num_communicating_programs=limit)
        config, tile = exchange.dispatch_config(schedule, LAYOUT, HIDDEN, jnp.dtype(dtype), wire_dtype)
        options = {"num_rows": 40960, "quantized": False, "clears_padding": True}
        sizes = Dispatch(**row_sizes(HIDDEN, fp8), **options, tile=tile)
        rows = {"x_ptr": element, "out_ptr": element, "row_to_assignment_ptr": "*i32", "out_scales_ptr": "*fp32"}
    else:
        schedule = Schedule(num_combining_programs=limit)
        config, tile = exchange.combine_config(schedule, LAYOUT, HIDDEN, jnp.dtype(dtype))
        sizes = Combine(**row_sizes(HIDDEN, fp8), tile=tile)
        rows = {"y_ptr": element, "sums": Sums(element, "*i32")}
    types = {"peers": PEERS} | dict.fromkeys(["topk_idx_ptr", "assignment_to_row_ptr"], "*i32")
    types |= dict.fromkeys(["weights_ptr", "out_weights_ptr"], "*fp32")
    types |= rows
    # ptxas limits itself to 80 or 128 of 255 registers and spills a few words: for Blackwell with FP8 and in
    # workstations, and for the large tiles of few programs.
    allowed = 64 if limit is not None else 32 if capability == 120 or (fp8 and capability == 100) else 0
    kernel = exchange._DISPATCH if name == "dispatch" else exchange._COMBINE
    ptx = compiled(kernel, types, {"S": sizes, "HEAP": HEAP}, config, capability, spills=allowed)["ptx"]
    copied = name == "combine" and limit is None
    assert re.search(COPIES if copied else r"ld\.global\.v4\.b32", ptx), "not 16 bytes at a time"
    assert "release.sys" in ptx or "fence.acq_rel.sys" in ptx


@pytest.mark.parametrize("hidden", [256, 512, 2048])
def test_ptx_combine_narrow_rows(hidden, on_h200):
    """Each thread still loads 16 bytes."""
    config, tile = exchange.combine_config(Schedule(), LAYOUT, hidden, jnp.dtype("bfloat16"))
    types = dict.fromkeys(["topk_idx_ptr", "assignment_to_row_ptr"], "*i32")
    types |= {"y_ptr": "*bf16", "sums": Sums("*bf16", "*i32"), "peers": PEERS}
    types |= {"weights_ptr": None, "out_weights_ptr": None}
    constants = {"S": Combine(**row_sizes(hidden, False), tile=tile), "HEAP": HEAP}
    assert tile.in_registers
    ptx = compiled(exchange._COMBINE, types, constants, config, wide=False, programs=16 // config.num_warps)["ptx"]
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", ptx) and not re.search(COPIES, ptx)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ptx_small_exchange_kernel(capability):
    config, block = exchange.small_exchange_config(4, 4096 * 8)
    pointers = {"x_ptr": "*i32", "peers": PEERS, "out_ptr": "*i32"}
    constants = {"S": SmallExchange(4096 * 8, block), "HEAP": HEAP}
    compiled(exchange._ALL_GATHER_I32, pointers, constants, config, capability, wide=False)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "u8"])
def test_ptx_expert_copies_kernel(dtype, capability):
    rows = jax.ShapeDtypeStruct((32, 2048 * 1536), {"bf16": jnp.bfloat16, "fp32": jnp.float32, "u8": jnp.uint8}[dtype])
    x, integers = f"*{dtype}", "*i32"
    pointers = {"w_ptr": x, "copies_ptr": integers, "peers": PEERS, "out_ptr": x}
    config = Config(1, num_warps=8)
    spills = 8 if capability == 80 else 0  # the loop over tasks has a few scalars too many for ptxas there
    for zeroed in (True, False) if dtype != "u8" else (True,):  # bytes are joined with the weights
        sizes, _ = expert_copies.copy_sizes((4, 2), rows, places=8, zeroed=zeroed)
        constants = {"S": sizes, "HEAP": HEAP}
        built = compiled(expert_copies._FETCH, pointers, constants, config, capability, spills=spills)
        assert "ld.global.v4.b32" in built["ptx"]
    if dtype != "u8":
        pointers = {"spare_ptr": x, "copies_ptr": integers, "order_ptr": x, "home_ptr": x, "peers": PEERS}
        pointers |= {"ordered_ptr": x, "out_ptr": x}
        built = compiled(expert_copies._ADD, pointers, constants, config, capability, spills=spills)
        assert "ld.global.v4.b32" in built["ptx"]


@pytest.mark.parametrize(("ranks", "experts"), [(4, 64), (8, 256), (64, 1024)])
def test_ptx_balance_plan_kernels(ranks, experts):
    names = ("counts", "copies", "moved", "own", "ends", "starts", "left")
    slots = max(32, 2 * ranks)
    sizes = PassSizes(ranks, experts, experts // ranks, 2, 36096, experts, max(32, ranks), slots)
    pointers = {f"{n}_ptr": "*i32" for n in names}
    compiled(balance_plan._PLAN, pointers, {"S": sizes}, Config(1, num_warps=4), wide=False)
    names = ("topk_idx", "rank", "counts", "copies", "own", "ends", "starts", "slots", "left")
    config, sizes = balance_plan.place_sizes(32768, ranks, experts, 2)
    pointers = {f"{n}_ptr": "*i32" for n in names}
    compiled(balance_plan._PLACE, pointers, {"S": sizes}, config, wide=False)
    pointers = {f"{n}_ptr": "*i32" for n in ("topk_idx", "counts")}
    compiled(balance_plan._COUNT, pointers, {"S": sizes}, config, wide=False)


# (experts, tokens per rank): L of 64, 256 and 1024, and blocks of one part and of many.
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("experts", "tokens"), [(256, 128), (256, 4096), (256, 32768), (1024, 4096), (4096, 4096)])
def test_ptx_plan_kernel(experts, tokens, capability):
    layout = Layout(4, experts, tokens, 8, 4 * tokens * 8)
    config, sizes = exchange.plan_config(layout)
    results = ("row_to_assignment", "assignment_to_row", "sizes", "topk_idx", "num_invalid", "num_dropped")
    pointers = {"x_ptr": "*i32", "peers": PEERS, **{f"{name}_ptr": "*i32" for name in results}}
    pointers["scratch"] = PlanScratch("*i32", "*i32", "*i32")
    built = compiled(exchange._PLAN, pointers, {"S": sizes, "HEAP": HEAP}, config, capability, wide=False)
    assert registers(built) <= 255
    if tokens > 128:  # Otherwise a block is one word per thread.
        assert "st.global.v4.b32" in built["ptx"], "ids are not copied 16 bytes at a time"
