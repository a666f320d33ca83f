"""Traces of concurrent launches on several GPUs, and of replayed CUDA graphs."""

import time
from collections import Counter

import jax
import numpy as np
import pytest
from test_cuda_graphs import GRAPHS, NO_GRAPHS, PROGRAMS, inputs

import harness
from jax_ep import tracing
from jax_ep.tracing import clocks

LAUNCHES = {
    "exchanges": {"plan": 2, "dispatch": 2, "combine": 2},
    "fused": {"plan": 2, "dispatch_gemm": 2, "gemm_combine": 2},
    "low_latency": {"low_latency_dispatch": 2, "low_latency_combine": 1, "low_latency_gemm_combine": 1},
}
LARGEST_ERROR_NS = 100_000


@pytest.mark.parametrize("kind", ["no graphs", "custom calls"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_traces_record_every_launch(name, kind, on_gpu, one_process, mesh, same_bits):
    options, repeats, arguments = {"no graphs": NO_GRAPHS, **GRAPHS}[kind], 20, inputs(mesh.size, 1)
    fn = harness.per_rank(PROGRAMS[name], mesh)
    want = harness.to_numpy(jax.jit(fn, compiler_options=NO_GRAPHS)(*arguments))
    jitted = jax.jit(lambda *arguments: fn(*arguments), compiler_options=options)
    with tracing.record():
        traced = jitted.lower(*arguments).compile()
        jax.block_until_ready([traced(*arguments) for _ in range(3)])
    with tracing.record(events_per_program=4096) as recording:
        began = time.perf_counter_ns()
        results = jax.block_until_ready([traced(*arguments) for _ in range(repeats)])
        took = time.perf_counter_ns() - began
    same_bits(harness.to_numpy(results), [want] * repeats)
    trace = recording.trace
    assert not any(trace.num_dropped.values())
    counts = Counter((device, launch.kernel) for (device, _), launch in trace.launches.items())
    for device in trace.devices:
        assert {k: counts[device, k] for k in LAUNCHES[name]} == {k: n * repeats for k, n in LAUNCHES[name].items()}
    assert len(trace.devices) == mesh.size
    check_times(trace, took)


def check_times(trace, took_ns):
    """Check that times of consecutive launches agree with other clocks."""
    cores = jax.devices()[0].core_count
    events = trace.aligned
    assert (events["end"] >= events["begin"]).all() and len(np.unique(events["multiprocessor"])) > 1
    assert events["multiprocessor"].max() < 2 * cores  # Numbers may have gaps.
    for device in trace.devices:
        own = events[events["device"] == device]
        assert 0 < own["end"].max() - own["begin"].min() < 1.05 * took_ns + 10**6
        starts = [own["begin"][own["launch"] == number].min() for number in np.unique(own["launch"])]
        ends = [own["end"][own["launch"] == number].max() for number in np.unique(own["launch"])]
        assert (np.array(starts[1:]) >= np.array(ends[:-1])).all(), "launches of a device overlap"
        error = trace.clocks.error_ns[device]
        assert error is not None and error < LARGEST_ERROR_NS, trace.clocks
    relaxed = trace.clocks.relaxed_ns
    assert relaxed < LARGEST_ERROR_NS, trace.clocks
    found = list(clocks.messages(events, trace.sent()))
    assert len(trace.devices) == 1 or found
    assert all(message.seen + relaxed + 1 >= message.sent for message in found)
    for kernel in trace.summary()["kernels"].values():
        assert 0 < kernel["busy"] + kernel["waiting"] <= 1.001
