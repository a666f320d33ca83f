"""The low-latency kernels with a late, missing or dying peer: correct results, or errors that name the peer.

Worker processes stage the states of ranks: one is stopped before a kernel, and continues or dies when its peer has
reached the required state. So the outcome does not depend on the machine's speed.
"""

import dataclasses
import os
import re
import signal
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import test_low_latency_gemm_kernels as gemm_kernels
import test_low_latency_kernels as kernels
from test_interpreter_failures import STOPPED, until

import harness
import jax_ep
from jax_ep import context, interpreter
from jax_ep.interpreter import activity
from jax_ep.megakernels import low_latency

CASES = [
    ("low_latency_dispatch", "few tokens"),
    ("low_latency_dispatch", "many tokens"),
    ("low_latency_combine", "few tokens"),
    ("low_latency_combine", "many tokens"),
    ("low_latency_gemm_combine", "few tokens"),
]
# Content of a result before a kernel writes it. As a row number it is far outside of every buffer.
POISON = 0x01


def choose(way, patch):
    comparisons, rows = kernels.WAYS[way]
    patch.setattr(low_latency, "_MOST_COMPARISONS", comparisons)
    patch.setattr(low_latency, "_MOST_ROWS", rows)


class Program:
    """A program with the kernel, compiled for the current context."""

    def __init__(self, name, mesh, rng):
        self._is_fused = name == "low_latency_gemm_combine"
        if self._is_fused:
            self._problem: Any = gemm_kernels.problem_of(rng, "uniform", 2)
            self._call = harness.compiled(gemm_kernels.fused(), mesh)
        else:
            self._problem = kernels.Problem(rng, "uniform", 2, kernels.SHAPE, 7)
            self._call = harness.compiled(kernels.round_trip(kernels.SHAPE, 7), mesh)

    def run(self):
        """Run the program, and fail unless the results are right."""
        results = self._call(*self._problem.args)
        if self._is_fused:
            np.testing.assert_array_equal(results, self._problem.want())
        else:
            self._problem.check(*results)


class Stage:
    """Run an action in worker 1 before its next launch of a kernel, and record the results of launches."""

    def __init__(self, name, before, patch):
        self.pool: interpreter.Pool = context.heap("test")._memory.pool
        self.results: dict[int, list[np.ndarray]] = {}
        self._name, self._before = name, before
        for index in range(2):
            worker = self.pool._workers[index]
            patch.setattr(worker, "run", self._staged(worker.run, index))

    def _staged(self, run, index):
        def staged(launch, *args):
            if launch.function != self._name:
                return run(launch, *args)
            if index == 1:
                self._before(self.pool)
            outputs = run(dataclasses.replace(launch, poison=POISON), *args)
            types = [DTYPES[element] for element, _ in launch.results]
            self.results[index] = [np.frombuffer(data, dtype) for data, dtype in zip(outputs, types, strict=True)]
            return outputs

        return staged


DTYPES = {"i32": np.dtype(np.int32), "fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def state(pool):
    """Return the activity of worker 0."""
    return int(pool._activity[0][activity.STATE])


def stopped_until(wanted, then):
    """Stop worker 1 until worker 0 reaches a state, then send a signal."""

    def before(pool):
        pid = pool._workers[1].process.pid

        def resume():
            until(lambda: state(pool) == wanted)
            os.kill(pid, then)

        os.kill(pid, signal.SIGSTOP)
        threading.Thread(target=resume).start()

    return before


def believe_in_other_launches(pool):
    """Make rank 1 take part in another launch than rank 0, so that neither reaches the other's."""
    heap = context.heap("test")
    harness.words_of(heap, heap.buffers, 1)[64 + heap.layout.num_devices] += 2


@pytest.mark.slow
def test_low_latency_late_peer(two_ranks, rng, monkeypatch, subtests):
    for name, way in CASES:
        with subtests.test(f"{name}, {way}"), monkeypatch.context() as patch:
            choose(way, patch)
            program = Program(name, two_ranks, rng)
            program.run()
            stage = Stage(name, stopped_until(activity.WAITING, then=signal.SIGCONT), patch)
            program.run()
            assert sorted(stage.results) == [0, 1]


def check_story(name, story):
    """Check that the message names the operation and both ranks; each may have waited for the other."""
    match = re.search(r"rank (\d+) timed out after 1 s in (\w+) .*waiting for rank (\d+)", story)
    assert match, story
    assert sorted([match[1], match[3]]) == ["0", "1"]
    assert match[2] == name


MISSING = {"too late": stopped_until(activity.GAVE_UP, then=signal.SIGCONT), "never": believe_in_other_launches}
EITHER = [(*case, "too late") for case in CASES]
EITHER += [pytest.param(*case, "never", marks=pytest.mark.slow) for case in CASES if case[1] == "few tokens"]


@pytest.mark.parametrize(("name", "way", "how"), EITHER)
@pytest.mark.slow(unless={"name": ["low_latency_dispatch"], "way": ["few tokens"]})
def test_low_latency_missing_peer(name, way, how, two_impatient_ranks, rng, monkeypatch, after_failures, caplog):
    """Results of the launches must not look valid; the interpreter detects writes out of bounds."""
    choose(way, monkeypatch)
    program, heap = Program(name, two_impatient_ranks, rng), context.heap("test")
    program.run()
    with monkeypatch.context() as patch:
        stage = Stage(name, MISSING[how], patch)
        error = outcome(program.run)
    # If the check of this call ran too early, that of a later call reports it.
    error = error if "timed out" in error else outcome(program.run)
    # It names one of the ranks; the other may have progressed further before it waited.
    check_story(name if name in error else "low_latency_combine", error)
    story = heap.failure()
    assert story is not None
    check_story(name, story)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is unusable after a failure"):
        context.heap(name)
    assert not caplog.records
    jax_ep.finalize()
    assert story in caplog.text  # For programs that end before a check could report it.
    # In a dispatch, each expert has one poisoned row, so that results computed from it are not zero.
    numbers = {2: 1, 4: 0, 5: 0} if name == "low_latency_dispatch" else {}
    for index, result in enumerate(stage.results[0]):
        if result.dtype == np.int32:
            np.testing.assert_array_equal(result, numbers.get(index, -1))
        elif len(result) > 1:  # Not the placeholder for missing scales.
            assert np.isnan(result.astype(np.float32)).all()


def outcome(call):
    """Return the text of the error that a call raises; wrong results are an error only if no failure was reported."""
    try:
        call()
    except AssertionError:
        return ""
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[1] == "few tokens"])
@pytest.mark.slow(unless={"name": ["low_latency_combine"]})
def test_low_latency_killed_peer(name, way, two_ranks, rng, monkeypatch, after_failures):
    choose(way, monkeypatch)
    program = Program(name, two_ranks, rng)
    program.run()
    with monkeypatch.context() as patch:
        stage = Stage(name, stopped_until(activity.WAITING, then=signal.SIGKILL), patch)
        # XLA reports one device: worker 1, or worker 0, which was stopped because of it.
        with pytest.raises(Exception, match=f"died with exit code -9|{STOPPED}"):
            program.run()
    died = rf"kernel {name}, worker 1 \(process \d+\) died with exit code -9"
    assert re.match(died, str(stage.pool.close())), "the failure that the pool keeps is the first"
    jax_ep.finalize()
