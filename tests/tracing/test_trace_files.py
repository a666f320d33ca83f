"""Processing of events: summaries with known numbers, Perfetto files, pictures, and merged parts."""

import contextlib
import functools
import gzip
import itertools
import json
import operator
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_ep import __main__, tracing
from jax_ep.tracing import KINDS, perfetto
from jax_ep.tracing.clocks import Message, align
from jax_ep.tracing.events import EVENT, Launch, Written

# Device 0 of two: program 0 pushes to 1 and waits for it, program 1 computes, program 2 is idle.
ROWS = {
    0: [
        ("announce", 0, 0, -1, 0, 0, 10),
        ("push", 0, 1, 1, 0, 10, 50),
        ("publish", 0, 1, 1, 0, 50, 60),
        ("wait", 0, 2, 1, 0, 60, 90),
        ("tile", 1, 0, -1, 0, 30, 100),
    ],
    1: [
        ("announce", 0, 0, -1, 0, 5, 10),
        ("push", 0, 1, 0, 0, 10, 80),
        ("publish", 0, 1, 0, 0, 80, 85),
        ("wait", 0, 2, 0, 0, 85, 105),
    ],
}
SKEW = 1_000_000  # Of the clock of device 1.


def written(device, skew=0):
    events = np.zeros((len(ROWS[device]),), EVENT)
    for i, (kind, program, task, peer, block, begin, end) in enumerate(ROWS[device]):
        place = (device, 0, program, 7 + program, KINDS.index(kind))
        events[i] = (*place, task, peer, block, begin - skew, end - skew)
    launches = {0: Launch("dispatch_gemm", 3 + (5 << 8), 3, (0, 1), (4, 4))}
    return Written(events, launches, 2 * device)


@pytest.fixture
def trace():
    return tracing.Trace.of_devices({0: written(0), 1: written(1, SKEW)})


def test_trace_peer_clock(trace):
    # 0 signals 1 at 50, seen at 105: at least -55; 1 signals 0 at 80, seen at 90: at most 10.
    assert trace.clocks.offset_ns == {0: 0, 1: SKEW + (10 - 55) // 2}
    assert trace.clocks.error_ns == {0: 0, 1: 33}
    assert (trace.events["begin"][trace.events["device"] == 1] < 0).all(), (
        "events keep the times of their device's clock"
    )


def test_trace_summary_known_numbers(trace):
    summary = trace.summary()
    assert (summary["unit"], summary["step_ns"], summary["num_dropped"]) == ("ns", 5, {0: 0, 1: 2})
    kernel = summary["kernels"]["dispatch_gemm"]
    assert (kernel["launches"], kernel["duration"]) == (2, 100.0)
    # 3 programs, 100 ns, 2 devices: busy for 60 + 70 on device 0 and 80 on device 1, waiting for 30 and 20.
    assert kernel["busy"] == pytest.approx(210 / 600)
    assert kernel["waiting"] == pytest.approx(50 / 600)
    assert kernel["idle"] == pytest.approx(340 / 600)
    assert kernel["kinds"]["push"] == {"count": 2, "mean": 55.0, "share": pytest.approx(110 / 600)}
    assert kernel["roles"]["exchange"] == {
        "programs": 1.0, "busy": pytest.approx(0.7), "waiting": pytest.approx(0.25), "idle": pytest.approx(0.05)
    }  # fmt: skip
    assert kernel["roles"]["tiles"]["busy"] == pytest.approx(0.7)
    assert kernel["roles"]["tiles"]["programs"] == 0.5
    assert kernel["roles"]["none"]["programs"] == 1.5
    # On device 0 data is in flight from 10 to 90, and overlaps a tile from 30 on; device 1 has 95 ns more.
    assert kernel["overlap"] == pytest.approx(60 / (80 + 95))
    assert kernel["waited_for"] == {0: 20, 1: 30}
    assert kernel["slowest_peer"] == 1
    assert json.loads(json.dumps(summary))["kernels"]["dispatch_gemm"]["slowest_peer"] == 1


def test_trace_summary_blames_last_rank(trace):
    parts = {d: written(d) for d in ROWS}
    for one in parts.values():
        one.events["peer"][one.events["kind"] == KINDS.index("wait")] = -1
    assert tracing.Trace.of_devices(parts).summary()["kernels"]["dispatch_gemm"]["waited_for"] == {0: 20, 1: 30}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_perfetto_round_trip(trace, name, tmp_path):
    path = tmp_path / name
    trace.save(path)
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (device 0)", 1: "rank 1 (device 1)"}
    assert named[0, 1] == "SM 7, program 0" and named[0, 2] == "SM 8, program 1"
    drawn = [event for event in events if event["ph"] == "X"]
    for event in drawn:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert (event["pid"], event["tid"]) in named and event["ts"] >= 0 and event["dur"] >= 0
    assert min(event["ts"] for event in drawn) == 0
    assert sum(event["cat"] == "launch" for event in drawn) == 2
    tracks = {}
    for event in drawn:
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in itertools.pairwise(spans))
    same(tracing.Trace.load(path), trace)


def same(got, want):
    order = ["device", "program", "begin"]
    np.testing.assert_array_equal(np.sort(got.events, order=order), np.sort(want.events, order=order))
    assert (got.launches, got.num_dropped, got.clocks) == (want.launches, want.num_dropped, want.clocks)
    assert got.summary() == want.summary()


def test_trace_times_keep_nanoseconds(tmp_path):
    parts = {d: written(d, skew=-1_790_000_000_123_456_789) for d in ROWS}
    trace = tracing.Trace.of_devices(parts)
    trace.save(tmp_path / "t.json")
    same(tracing.Trace.load(tmp_path / "t.json"), trace)


def test_trace_merges_processes(trace, tmp_path):
    parts = [tracing.Trace.of_devices({d: written(d, SKEW * d)}) for d in ROWS]
    assert parts[1].clocks.offset_ns == {1: 0}
    for device, part in enumerate(parts):
        part.save(tmp_path / f"{device}.json")
    loaded = [tracing.Trace.load(tmp_path / f"{device}.json") for device in ROWS]
    same(tracing.merge(loaded), trace)
    with pytest.raises(ValueError, match=r"devices \[0, 0\], expected each once"):
        tracing.merge([parts[0], parts[0]])
    ordered = tracing.Trace.of_devices({1: written(1)}, is_ordered_only=True)
    with pytest.raises(ValueError, match="an order but no times"):
        tracing.merge([parts[0], ordered])


@pytest.mark.parametrize("devices", [None, [], np.array(2), {0: 1}], ids=["none", "list", "array", "number"])
def test_trace_of_devices_mistakes(devices):
    with pytest.raises(TypeError, match=r"Trace.of_devices: .*written is .*, expected"):
        tracing.Trace.of_devices(devices)


def test_trace_only_long_name():
    with pytest.raises(ValueError, match=r"Trace.only: no launch of x+\.\.\.x+ was recorded") as caught:
        tracing.Trace.of_devices({0: written(0)}).only("x" * 100_000)
    assert len(str(caught.value)) < 1000


def test_trace_order_without_time(tmp_path):
    trace = tracing.Trace.of_devices({d: written(d) for d in ROWS}, is_ordered_only=True)
    times = sorted({t for rows in ROWS.values() for row in rows for t in row[-2:]})
    assert sorted({*trace.events["begin"].tolist(), *trace.events["end"].tolist()}) == list(range(len(times)))
    assert trace.summary()["unit"] == "steps"
    trace.save(tmp_path / "t.json")
    assert "order" in json.loads((tmp_path / "t.json").read_text())["otherData"]["clock"]
    same(tracing.Trace.load(tmp_path / "t.json"), trace)


_PATHS = (
    *(("otherData", name) for name in ("format", "is_ordered_only", "begin", "clocks", "num_dropped", "launches")),
    *(("otherData", "clocks", name) for name in ("offset_ns", "error_ns", "relaxed_ns")),
    *(("otherData", "launches", 0, name) for name in ("device", "number", "kernel", "identity", "group", "epochs")),
    *(("traceEvents", -1, name) for name in ("ph", "pid", "tid", "name", "ts", "dur", "args")),
    *(("traceEvents", -1, "args", name) for name in ("launch", "program", "task", "peer", "block")),
    *(("traceEvents",), ("traceEvents", -1)),
    *(("otherData",), ("otherData", "launches", 0), ("otherData", "num_dropped", "0")),
)
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from([10**400, 1 << 31, 1 << 61, -(1 << 63), "member", "../x", "\ud800", [], [0], {}, {"0": 1 << 61}]),
)


@pytest.mark.parametrize("name", ["relaxed_ns", "error_ns"])
def test_trace_negative_errors(name, trace, tmp_path):
    trace.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    clocks = content["otherData"]["clocks"]
    clocks[name] = -1 if name == "relaxed_ns" else dict.fromkeys(clocks[name], -1)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name}.*=-1, expected an integer from 0"):
        tracing.Trace.load(tmp_path / "t.json")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(_PATHS), _VALUES), min_size=1, max_size=3))
def test_trace_mutated_file(changes, trace, tmp_path):
    path = tmp_path / "t.json"
    trace.save(path)
    content = json.loads(path.read_text())
    for (*where, last), value in changes:
        with contextlib.suppress(LookupError, TypeError):  # An earlier change has removed the position.
            functools.reduce(operator.getitem, where, content)[last] = value
    path.write_text(json.dumps(content))
    try:
        found = tracing.Trace.load(path)
    except ValueError as error:
        message = str(error)
    else:
        found.summary()
        found.save(path)
        return
    assert "\n" not in message and len(message) < 600


def test_trace_foreign_or_hostile_file(trace, tmp_path, capsys):
    """A FIFO is not waited for, and a compressed file is read up to the limit."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        tracing.Trace.load(tmp_path / "fifo")
    blanks = gzip.compress(bytes(1 << 20))
    files = {"bomb": blanks * 257, "deep": b"[" * 200_000, "cut": gzip.compress(b"{}")[:-4]}
    files |= {"damaged": b"\x1f\x8b" + bytes(100), "twice": b'{"a": 1, "a": 2}', "digits": b"9" * 10_000}
    files |= {"nan": b'{"otherData": NaN}', "latin": b"\xff", "nothing": b"", "list": b"[]", "object": b"{}"}
    trace.save(tmp_path / "this_version.json")
    this_version = (tmp_path / "this_version.json").read_bytes()
    files |= {"version": this_version.replace(b"jax_ep trace 1", b"jax_ep trace 9"), "number": b'{"otherData": 3}'}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} is not a trace of this package: .*; expected .*record it again"):
            tracing.Trace.load(tmp_path / name)
        assert __main__.main(["trace", "show", str(tmp_path / name)]) == 2
        assert "not a trace of this package" in capsys.readouterr().err


def test_trace_missing_file(tmp_path, capsys):
    path = tmp_path / "missing.json"
    with pytest.raises(
        FileNotFoundError, match=r"^Trace.load: cannot read .*missing.json \(No such file or directory\)"
    ):
        tracing.Trace.load(path)
    assert __main__.main(["trace", "show", str(path)]) == 2
    message = capsys.readouterr().err
    assert "expected a file of Trace.save" in message and "`jax-ep trace moe --out FILE`" in message


def test_trace_invalid_arguments(trace):
    for call, message in {
        lambda: trace.only(last=0): "Trace.only: last=0, expected at least 1",
        lambda: trace.only(last=1.0): "Trace.only: last=1.0 is a float",
        lambda: trace.only("combine"): "Trace.only: no launch of combine was recorded; there is dispatch_gemm",
        lambda: trace.only(3): "Trace.only: a kernel is an int, expected a name; pass names, as only",
        lambda: trace.only(["dispatch_gemm"]): "Trace.only: a kernel is a list, expected a name",
        lambda: tracing.merge(trace): "merge: traces is a Trace, expected a list of Trace",
        lambda: tracing.merge([trace, 3]): "merge: one of traces is an int, expected a Trace",
        lambda: trace.save(3): "Trace.save: path is an int, expected a str or a Path; pass one",
        lambda: trace.plot(b"t.png"): "Trace.plot: path is a bytes, expected a str or a Path",
        lambda: tracing.Trace.load(None): "Trace.load: path is a NoneType, expected a str or a Path",
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()


def test_trace_picture_device_without_events(tmp_path):
    pytest.importorskip("matplotlib")
    tracing.Trace.of_devices({0: written(0), 1: Written(np.zeros((0,), EVENT), {}, 3)}).plot(tmp_path / "t.png")
    with pytest.raises(ValueError, match="no events"):
        tracing.Trace.of_devices({}).plot(tmp_path / "t.png")


@pytest.mark.parametrize("name", ["", "trace", "trace.json", "folder"])
def test_trace_picture_name_without_format(trace, tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"^Trace.plot: path is .*, expected one that ends in one of .*png"):
        trace.plot(name)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_trace_command_shows_merges_draws(tmp_path, capsys):
    for package in ("rich", "matplotlib"):
        pytest.importorskip(package)
    files = []
    for device in ROWS:
        files.append(str(tmp_path / f"{device}.json"))
        tracing.Trace.of_devices({device: written(device, SKEW * device)}).save(files[-1])
    merged = tmp_path / "both.json"
    assert __main__.main(["trace", "show", *files, "--out", str(merged), "--png"]) == 0
    shown = capsys.readouterr().out
    for words in ("dispatch_gemm", "exchange", "34 %", "device 1", "clocks aligned by the", "2 events were dropped"):
        assert words in shown
    same(tracing.Trace.load(merged), tracing.Trace.of_devices({0: written(0), 1: written(1, SKEW)}))
    picture = (tmp_path / "both_dispatch_gemm.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def fake_area(rows, room):
    header, num_words = tracing.events.area_header(2, room)
    words = np.zeros((num_words,), np.int64)
    words[: header.size] = header
    words[0] = 1  # launch
    region = words[16:].reshape(2, -1)[0]
    region[0] = len(rows)
    for i, row in enumerate(rows[:room]):
        region[16 + 5 * i :][:5] = row
    return words


def test_trace_program_events_do_not_overlap():
    """A pipelined loop records the load of the next tile while it computes the previous one."""
    what = [KINDS.index("tile") << 32 | task for task in (1, 2, 3, 4)]
    times = [(10, 40), (30, 60), (50, 55), (70, 80)]  # The third was written before the second.
    rows = [[begin, end, word, 0, 9] for (begin, end), word in zip(times, what, strict=True)]
    member = [90, 90, KINDS.index("member") << 32 | 1 << 52 | 1 << 16, 1 | 6 << 32, 9]
    found = tracing.events.read(fake_area([*rows, member], 8), 0, {})
    assert found.events[["task", "begin", "end"]].tolist() == [(1, 10, 40), (3, 50, 55), (2, 55, 60), (4, 70, 80)]


def test_trace_incomplete_launches_skipped():
    """A launch without members is incomplete: it was running when the recording ended, or the buffer was full."""

    def event(kind, task, launch, peer=-1, block=0, epoch=0):
        what = task | KINDS.index(kind) << 32 | 3 << 40 | (peer + 1) << 52
        return [10, 20, what, (block & 0xFFFFFFFF) | epoch << 32, 9 | launch << 32]

    members = [event("member", rank | 2 << 16, 0, peer=device, block=4, epoch=6) for rank, device in enumerate((5, 2))]
    rows = [event("tile", 8, 0), event("wait", 9, 0, peer=5, block=-1), *members, event("tile", 8, 1)]
    found = tracing.events.read(fake_area(rows, 8), 2, {})
    assert found.launches == {0: Launch("operation 9", 9, 4, (5, 2), (6, 6))}
    assert found.events[["kind", "task", "peer", "block"]].tolist() == [
        (KINDS.index("tile"), 8, -1, 0), (KINDS.index("wait"), 9, 5, -1)
    ]  # fmt: skip
    assert found.num_dropped == 0
    named = tracing.events.read(fake_area(rows, 8), 2, {}, [100, 101, 102, 103, 104, 105])
    assert named.launches[0].group == (105, 102) and named.launches[0].rank(102) == 1
    assert named.events[["device", "peer"]].tolist() == [(102, -1), (102, 105)]
    few = tracing.events.read(fake_area(rows, 4), 2, {9: "tiles"})
    assert (few.num_dropped, len(few.events), few.launches[0].kernel) == (1, 2, "tiles")
    # With one member missing, the participants are unknown.
    none = tracing.events.read(fake_area(rows, 3), 2, {})
    assert (none.num_dropped, len(none.events), none.launches) == (2 + 2, 0, {})


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


def test_trace_save_larger_than_load_reads(trace, tmp_path, monkeypatch):
    path = tmp_path / "trace.json.gz"
    trace.save(path)
    monkeypatch.setattr(perfetto, "_MOST_BYTES", 1000)  # but more than the compressed file has
    before = path.read_bytes()
    assert len(before) < 1000
    with pytest.raises(
        ValueError, match=r"^Trace\.save: a trace of 9 events takes .* MiB, expected at most .*; save a p"
    ):
        trace.save(path)
    assert path.read_bytes() == before
