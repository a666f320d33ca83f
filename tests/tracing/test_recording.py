"""Recordings of real launches: every task once, in order, without changes of results."""

import concurrent.futures
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from cases import BF16, Shape
from jax_ep import context, tracing
from jax_ep.megakernels import exchange, low_latency
from jax_ep.tracing import KINDS, clocks
from jax_ep.tracing.events import EVENT
from jax_ep.types import Layout, Schedule
from layers import Layer, round_trip
from layers import low_latency_round_trip as decode

pytest.importorskip("triton")

W, T, K, E, H, INNER = 2, 6, 2, 4, 128, 128
OPTIONS = {"num_experts": E, "implementation": "triton"}
WAITS = {"wait", "publish"}  # Next to a task's own events.


def inputs(rng):
    return Layer(rng, "uniform", W, Shape(T, K, E, H, INNER), BF16).args


def layer(dispatch_mode, combine_mode):
    schedule = jax_ep.Schedule(dispatch_mode=dispatch_mode, combine_mode=combine_mode)
    return lambda *args: jax_ep.moe(*args, **OPTIONS, schedule=schedule)


def decode_layer(x, ids, weights, gate_up, down):
    return jax_ep.low_latency_moe(x, ids, weights, gate_up, down, **OPTIONS)


def record(fn, mesh, args, **options):
    with tracing.record(**options) as recording:
        result = harness.run(fn, mesh, *args)
    return recording.trace, result


def tasks(trace, kernel, device, *but):
    """Return kinds and tasks of the one launch of a kernel, without some kinds, in task order."""
    events = trace.only(kernel, last=1).events
    own = events[(events["device"] == device) & ~np.isin(events["kind"], [KINDS.index(kind) for kind in but])]
    return sorted(((KINDS[e["kind"]], int(e["task"])) for e in own), key=lambda pair: pair[1])


def check(trace):
    """Check invariants of every trace."""
    assert len(trace.events) and not any(trace.num_dropped.values())
    assert (trace.events["end"] >= trace.events["begin"]).all()
    for event in trace.events:
        assert (int(event["device"]), int(event["launch"])) in trace.launches
    for device in trace.devices:
        for program in np.unique(trace.events["program"][trace.events["device"] == device]):
            own = trace.events[(trace.events["device"] == device) & (trace.events["program"] == program)]
            own = own[np.argsort(own["begin"], kind="stable")]
            assert (own["begin"][1:] >= own["end"][:-1]).all(), "events of a program overlap"
            assert (np.diff(own["launch"]) >= 0).all()
    # A task is unique: a program waits for it, does it, and signals it.
    once = ~np.isin(trace.events["kind"], kinds("wait", "push"))
    keys = trace.events[["device", "launch", "kind", "task", "peer"]][once]
    assert max(Counter(keys.tolist()).values()) == 1
    found = list(clocks.messages(trace.aligned, trace.sent()))
    early = [message for message in found if message.seen + trace.clocks.relaxed_ns + 1 < message.sent]
    assert found and not early, "a wait ended before what it waited for was sent"
    assert {(message.source, message.target) for message in found} == {(0, 1), (1, 0)}


def kinds(*names):
    return [KINDS.index(name) for name in names]


def test_recording_exchange_tasks_in_order(two_ranks, rng):
    args = inputs(rng)
    want = harness.run(round_trip, two_ranks, *args)
    trace, got = record(round_trip, two_ranks, args)
    np.testing.assert_array_equal(got, want)
    check(trace)
    assert trace.is_ordered_only == (jax.default_backend() == "cpu")
    layout = Layout(W, E, T, K, W * T * K)
    assert Counter(x.kernel for x in trace.launches.values()) == {"combine": 2, "dispatch": 2, "plan": 2}
    assert {launch.group for launch in trace.launches.values()} == {(0, 1)}
    _, tile = exchange.dispatch_config(Schedule(), layout, H, BF16, BF16)
    blocks, clears = -(-T // tile.block_tokens), -(-layout.capacity // tile.block_rows)
    expected = [("announce", 0)]
    for step in range(blocks + tile.lag):
        expected += [("push", 1 + step * W)] * (step < blocks) + [("copy", 2 + step * W)] * (step >= tile.lag)
    expected += [("zero", 1 + (blocks + tile.lag) * W + i) for i in range(clears)]
    _, sums = exchange.combine_config(Schedule(), layout, H, BF16)
    blocks, back = -(-T // sums.block_tokens), [("announce", 0)]
    for step in range(blocks + sums.lag):
        first = 1 + step * (W + 1)
        back += [("push", first + i) for i in range(W) if step < blocks] + [("sum", first + W)] * (step >= sums.lag)
    _, sizes = exchange.plan_config(layout)
    blocks, fills = -(-T * K // sizes.tile.block), -(-layout.capacity // sizes.fill_rows)
    plan = ["announce", *["push"] * blocks, *["zero"] * fills, *["count"] * W * blocks, *["place"] * W * blocks]
    for device in range(W):
        assert tasks(trace, "dispatch", device, *WAITS) == expected
        assert tasks(trace, "combine", device, *WAITS) == back
        assert tasks(trace, "plan", device, *WAITS) == [(kind, task) for task, kind in enumerate(plan)]


def test_recording_unawaited_results(two_ranks, rng):
    """The end of the block waits for the kernels; no result is kept."""
    args, call = inputs(rng), jax.jit(harness.per_rank(round_trip, two_ranks))
    with tracing.record() as recording:
        for _ in range(4):
            call(*args)
    check(recording.trace)
    launched = Counter(launch.kernel for launch in recording.trace.launches.values())
    assert launched == {"plan": 4 * W, "dispatch": 4 * W, "combine": 4 * W}


@pytest.mark.parametrize("modes", [("fused", "scatter"), ("serial", "scatter")])
def test_recording_fused_layer(modes, two_ranks, rng):
    args = inputs(rng)
    want = harness.run(layer(*modes), two_ranks, *args)
    trace, got = record(layer(*modes), two_ranks, args)
    np.testing.assert_array_equal(got, want)
    check(trace)
    names = {launch.kernel for launch in trace.launches.values()}
    assert names == {"gemm_combine", "plan", "dispatch_gemm" if modes[0] == "fused" else "dispatch"}
    summary = trace.summary()["kernels"]
    for device in range(W):
        for kernel in names & {"dispatch_gemm", "gemm_combine"}:
            tiles = [task for kind, task in tasks(trace, kernel, device) if kind == "tile"]
            assert tiles == list(range(len(tiles))) and len(tiles) >= E // W
    assert {"wait", "tile", "sum"} <= summary["gemm_combine"]["kinds"].keys()
    if modes[0] == "fused":
        assert {"push", "publish", "wait", "tile"} <= summary["dispatch_gemm"]["kinds"].keys()
        assert 0 <= summary["dispatch_gemm"]["overlap"] <= 1


@pytest.mark.parametrize("combine_mode", ["scatter", "serial"])
def test_recording_fused_layer_gradients(combine_mode, two_ranks, rng):
    args = inputs(rng)
    schedule = jax_ep.Schedule(dispatch_mode="fused", combine_mode=combine_mode)

    def gradients(x, ids, weights, gate_up, down):
        def loss(x, gate_up, down):
            return jnp.sum(jax_ep.moe(x, ids, weights, gate_up, down, **OPTIONS, schedule=schedule).astype(jnp.float32))

        return jax.value_and_grad(loss, (0, 1, 2))(x, gate_up, down)

    want = harness.run(gradients, two_ranks, *args)
    trace, got = record(gradients, two_ranks, args)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    check(trace)
    names = [launch.kernel for launch in trace.launches.values()]
    of_sums = "gemm_combine" if combine_mode == "scatter" else "combine"
    assert names.count("dispatch_gemm") == names.count(of_sums) == 2 * W
    assert trace.summary()["kernels"]["dispatch_gemm"]["kinds"]["tile"]["count"] >= W


@pytest.mark.parametrize("function", [decode, decode_layer], ids=["exchange", "layer"])
def test_recording_low_latency(function, two_ranks, rng):
    args = inputs(rng)
    want = harness.run(function, two_ranks, *args)
    trace, got = record(function, two_ranks, args)
    np.testing.assert_array_equal(got, want)
    check(trace)
    layout = Layout(W, E, T, K, 0)
    for device in range(W):
        sent = Counter(kind for kind, _ in tasks(trace, "low_latency_dispatch", device))
        assert (sent["announce"], sent["push"], sent["count"]) == (W, W + T, E // W)
        if function is decode:
            found = tasks(trace, "low_latency_combine", device)
            _, tile = low_latency.combine_tile(Schedule(), layout, T, H, BF16)
            assert Counter(kind for kind, _ in found)["announce"] == W
            assert len({task for kind, task in found if kind == "sum"}) == T
            sends = W * T if tile.sends_sums else sum_of_rows(args[1], device)
            assert sum(kind == "publish" for kind, _ in found) == sends
        else:
            found = tasks(trace, "low_latency_gemm_combine", device)
            tiles = [task for kind, task in found if kind == "tile"]
            assert tiles == list(range(len(tiles))) and len(tiles) >= 1


def sum_of_rows(ids, device):
    return int((ids // (E // W) == device).sum())


def test_recording_scan_same_bits(two_ranks, rng):
    args, length = inputs(rng), 3

    def steps(x, ids, *_):
        return jax.lax.scan(lambda x, _: (0.5 * round_trip(x, ids), None), x, length=length)[0]

    call = harness.compiled(steps, two_ranks)
    want = call(*args)
    with tracing.record() as recording:
        got = call(*args)
    again = call(*args)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(again, want)
    check(recording.trace)
    launches = Counter((device, launch.kernel) for (device, _), launch in recording.trace.launches.items())
    assert {launches[device, kernel] for device in range(W) for kernel in ("dispatch", "combine")} == {length}
    combines = recording.trace.only("combine", last=1)
    assert len(combines.launches) == W
    assert {number for _, number in combines.launches} == {max(number for _, number in recording.trace.launches)}


def test_recording_overflow_counted(two_ranks, rng):
    args = inputs(rng)
    whole, want = record(round_trip, two_ranks, args)
    room = 12 if jax.default_backend() == "cpu" else 1  # Less than one program has.
    part, got = record(round_trip, two_ranks, args, events_per_program=room)
    np.testing.assert_array_equal(got, want)
    for device in range(W):
        of_whole = whole.events[whole.events["device"] == device]
        assert part.num_dropped[device] > 0
        counts = np.bincount(of_whole["program"])
        if counts.size == 1:  # In the interpreter, the first program takes all tasks, and the second leaves last.
            kept = part.events[part.events["device"] == device]
            assert part.num_dropped[device] == counts[0] - room
            assert len(kept) == room
            mine = ["kind", "task", "peer", "block"]
            np.testing.assert_array_equal(kept[mine], of_whole[mine][:room])


def test_recording_compiles_once(two_ranks, rng):
    """There is one program with recordings and one without, for any buffer size; recording is part of jit's key."""
    x, ids, *_ = inputs(rng)
    traces = []

    def counted(x, ids):
        traces.append(1)
        return round_trip(x, ids)

    call = harness.compiled(counted, two_ranks)
    call(x, ids)
    before = len(traces)
    for room in (8, 16):
        with tracing.record(events_per_program=room):
            call(x, ids)
        call(x, ids)
    assert len(traces) == 2 * before


def test_recording_program_runs_without_recording(two_ranks, rng):
    x, ids, *_ = inputs(rng)
    jitted = jax.jit(harness.per_rank(round_trip, two_ranks))
    want = harness.to_numpy(jitted(x, ids))
    with tracing.record():
        ahead = jitted.lower(x, ids).compile()
    np.testing.assert_array_equal(harness.to_numpy(ahead(x, ids)), want)
    with tracing.record(events_per_program=128) as recording:
        np.testing.assert_array_equal(harness.to_numpy(ahead(x, ids)), want)
        np.testing.assert_array_equal(harness.to_numpy(ahead(x, ids)), want)
    np.testing.assert_array_equal(harness.to_numpy(ahead(x, ids)), want)
    assert sorted(recording.trace.launches) == [(device, number) for device in range(W) for number in range(2 * 3)]


def test_recording_clocks_agree(two_ranks, rng):
    """Workers share a clock: the interval of their offset contains zero."""
    header, num_words = tracing.events.area_header(tracing.recording._most_programs(), 128)
    with context.record(header, num_words) as raw:
        harness.run(round_trip, two_ranks, *inputs(rng))
    trace = tracing.Trace.of_devices({d: tracing.events.read(w, d, raw.kernels) for d, w in raw.words.items()})
    error = trace.clocks.error_ns[1]
    assert error is not None and error > 0
    if jax.default_backend() == "cpu":
        assert abs(trace.clocks.offset_ns[1]) <= error
    check(trace)


def test_recording_mistakes(two_ranks, rng):
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"record: events_per_program.*expected"):
            tracing.record(events_per_program=wrong).__enter__()
    with tracing.record() as recording:
        with pytest.raises(RuntimeError, match="has not ended, or ended with an error"):
            _ = recording.trace
        with pytest.raises(RuntimeError, match="is already recording"), tracing.record():
            pass
    assert recording.trace.events.dtype == EVENT and not len(recording.trace.events)
    with pytest.raises(RuntimeError, match="finalized during the recording"), tracing.record():
        jax_ep.finalize()


def test_recording_threads(two_ranks):
    """Of recordings that threads begin at once, one records, and the others say so."""
    barrier = threading.Barrier(4)

    def begin():
        barrier.wait()
        try:
            with tracing.record():
                time.sleep(0.2)
            return "recorded"
        except RuntimeError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(begin) for _ in range(4)]
    refused = "record: the context is already recording; end that recording first."
    assert sorted(one.result() for one in found) == [refused] * 3 + ["recorded"]


def test_recording_context_without_kernels():
    if jax.process_count() > 1:
        pytest.skip("a context of several processes is not made anew")
    jax_ep.finalize()
    jax_ep.init(harness.make_mesh((2,), (harness.EXPERT,)), transport="xla")
    with pytest.raises(ValueError, match=r"transport 'xla' has no kernels to record.*shared_memory"), tracing.record():
        pass
    jax_ep.finalize()
