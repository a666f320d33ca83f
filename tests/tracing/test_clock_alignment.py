"""Alignment of several clocks: bounds from messages, and clocks that drift."""

import numpy as np
import pytest

from jax_ep.tracing.clocks import Message, align


def messages(rng, offsets, pairs, count=200):
    """Create messages that take at least 300 ns between clocks with these offsets to the true time."""
    found = []
    for source, target in pairs:
        for _ in range(count):
            sent = int(rng.integers(0, 10**9))
            seen = sent + 300 + int(rng.exponential(2000))
            found.append(Message(source, target, sent - int(offsets[source]), seen - int(offsets[target])))
    return found


def test_clock_alignment_known_offsets(rng):
    offsets = np.array([0, *rng.integers(-(10**12), 10**12, 3)])
    everyone = [(i, j) for i in range(4) for j in range(4) if i != j]
    sent = messages(rng, offsets, everyone)
    clocks = align([0, 1, 2, 3], sent)
    assert clocks.relaxed_ns == 0
    for device in range(4):
        error = clocks.error_ns[device]
        assert error is not None
        assert abs(clocks.offset_ns[device] - offsets[device]) <= error
        assert (error == 0) if device == 0 else (0 < error <= 600)
    # With the chosen offsets, no message arrives before it was sent.
    for m in sent:
        assert m.seen + clocks.offset_ns[m.target] >= m.sent + clocks.offset_ns[m.source]


def test_clock_alignment_through_another_device(rng):
    offsets = np.array([0, 5_000_000, -7_000_000])
    clocks = align(
        [3, 5, 8],
        [
            Message((3, 5, 8)[m.source], (3, 5, 8)[m.target], m.sent, m.seen)
            for m in messages(rng, offsets, [(0, 1), (1, 0), (1, 2), (2, 1)])
        ],
    )
    for device, offset in zip((3, 5, 8), offsets, strict=True):
        error = clocks.error_ns[device]
        assert error is not None and abs(clocks.offset_ns[device] - offset) <= error


def test_clock_alignment_one_way_messages():
    clocks = align([0, 1, 2], [Message(0, 1, 10, 20), Message(1, 0, 30, 25)])
    assert clocks.error_ns == {0: 0, 1: 3, 2: None}
    assert clocks.offset_ns == {0: 0, 1: -8, 2: 0}
    assert align([0, 1], [Message(0, 1, 10, 20)]).error_ns[1] is None


def test_clock_alignment_drift_minimal_relaxation():
    """The clock of 1 gains 1000 ns between two pairs of messages that take no time."""
    drifting = [Message(0, 1, 0, 0), Message(1, 0, 0, 0), Message(0, 1, 9000, 10000), Message(1, 0, 10000, 9000)]
    clocks = align([0, 1], drifting)
    assert clocks.relaxed_ns == pytest.approx(500, abs=1)
    assert clocks.offset_ns[1] == pytest.approx(-500, abs=1)
