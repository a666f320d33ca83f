"""The file of tuned settings: rejected content, with a one-line reason, and where the file is found."""

import copy
import dataclasses
import functools
import json
import operator
import os
import pickle
import tempfile
import warnings
from pathlib import Path
from unittest.mock import Mock

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from jax_ep import tuning
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.settings import file, operations
from jax_ep.types import Schedule

KIND = jax.devices()[0].device_kind
FACTS = {"num_ranks": 2, "num_tokens": 16, "hidden": 64, "top_k": 2, "dtype": "float32"}
ENTRY = {"operation": "combine", "facts": FACTS, "settings": {"rows_in_flight": 3}, "measured": {"seconds": 1.0}}
RATES = {"link_bytes_per_s": None, "memory_bytes_per_s": 1e12, "product_flops_per_s": 2e14}


def changed(**fields):
    return ENTRY | fields


def facts(**fields):
    return changed(facts=FACTS | fields)


def settings(**fields):
    return changed(settings=fields)


BAD = {
    "another device": ([ENTRY], {"device_kind": "NVIDIA Z9"}, f"device_kind='NVIDIA Z9', expected '{KIND}', as here"),
    "other kernels": ([ENTRY], {"kernels": "0123"}, "kernels='0123', expected '"),
    "another format": ([ENTRY], {"format": 2}, "format=2, expected 1"),
    "an unknown field": ([ENTRY], {"extra": 1}, "the file has an unknown field 'extra'"),
    "a missing field": ([ENTRY], {"rates": ...}, "the file lacks 'rates'"),
    "entries of another type": ([], {"entries": {}}, "entries={}, expected an array"),
    "an entry of another type": ([3], {}, "entries[0]=3, expected an object"),
    "an unknown field of an entry": ([changed(more=1)], {}, "entries[0] has an unknown field 'more'"),
    "an unknown operation": ([changed(operation="sort")], {}, "entries[0].operation='sort', expected one"),
    "no operation": ([changed(operation=[])], {}, "entries[0].operation=[], expected one"),
    "settings of another type": ([changed(settings=[1])], {}, "entries[0].settings=[1], expected an object"),
    "an unknown setting": ([settings(num_warp=4)], {}, "entries[0].settings has an unknown field 'num_warp'"),
    "another type": ([settings(num_warps="4")], {}, "num_warps='4', expected a power of two from 1 to 16"),
    "a truth value": ([settings(num_warps=True)], {}, "num_warps=True, expected a power of two"),
    "a float": ([settings(num_warps=4.0)], {}, "num_warps=4.0, expected a power of two"),
    "no power of two": ([settings(num_warps=3)], {}, "num_warps=3, expected a power of two from 1 to 16"),
    "out of range": ([settings(rows_in_flight=11)], {}, "rows_in_flight=11, expected a number from 1 to 10"),
    "an unknown fact": ([facts(skew=1)], {}, "entries[0].facts has an unknown field 'skew'"),
    "a fact of another type": ([facts(hidden="64")], {}, "hidden='64', expected a size"),
    "a size that is no bucket": ([facts(hidden=63)], {}, "hidden=63, expected a size"),
    "a size below zero": ([facts(num_ranks=-2)], {}, "num_ranks=-2, expected a size"),
    "a size beyond int64": ([facts(hidden=1 << 70)], {}, "hidden=1180591620717411303424, expected a size"),
    "too few flags": (
        [changed(settings={"tokens_per_block": 1}, facts=FACTS | {"num_tokens": 2 * MAX_BLOCKS})],
        {},
        "tokens_per_block=1 for 65536 token",
    ),
    "the same twice": ([ENTRY, ENTRY], {}, "two entries of the same operation and facts"),
    "rates of another type": ([], {"rates": [1]}, "rates=[1], expected an object"),
    "an unknown rate": ([], {"rates": RATES | {"disk": 1.0}}, "rates has an unknown field 'disk'"),
    "a rate that is none": ([], {"rates": RATES | {"memory_bytes_per_s": "fast"}}, "memory_bytes_per_s='fast'"),
    "a rate below zero": ([], {"rates": RATES | {"memory_bytes_per_s": -1.0}}, "expected a number from 1 to 1e+30"),
    "a rate beyond float": ([], {"rates": RATES | {"memory_bytes_per_s": 10**400}}, "expected a number from 1 to"),
    "a rate that is no number": ([], {"rates": RATES | {"memory_bytes_per_s": float("nan")}}, "NaN is not"),
    "a long name": ([], {"device_kind": "x" * 10**6}, "device_kind='xxx"),
    "many lines": ([], {"device_kind": "a\n" * 100}, "device_kind='a"),
    "a long field": ([], {"x" * 10**6: 1}, "unknown field 'xxx"),
    "nested values": ([], {"rates": [[[[1] * 9] * 9] * 9] * 9}, "rates=[["),
}


@pytest.mark.parametrize(("entries", "name"), [(3, "entries"), ({("combine",): [1]}, r"entries\[\('combine',\)\]")])
def test_tuning_wrong_entries(entries, name):
    with pytest.raises(TypeError, match=rf"Tuning: {name} is a.*, expected "):
        tuning.Tuning(KIND, entries)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_tuning_copied_and_pickled(again, make_file):
    tuning.use(make_file(ENTRY, rates=RATES))
    want = tuning.current()
    got = again(want)
    assert got.entries == want.entries != {}
    assert (got.device_kind, got.rates, got.path) == (want.device_kind, want.rates, want.path)
    with pytest.raises(TypeError):
        got.entries[()] = {}


@pytest.mark.parametrize("name", BAD)
def test_tuning_file_bad(name, make_file, monkeypatch):
    entries, fields, reason = BAD[name]
    path = make_file(*entries, **fields)
    with pytest.raises(ValueError) as refused:
        tuning.use(path)
    assert reason in str(refused.value)
    assert "; `jax-ep tune` makes one that does." in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700
    assert tuning.current().entries == {}
    monkeypatch.setenv(file.ENVIRONMENT, str(path))
    with pytest.warns(tuning.TuningWarning) as caught:
        assert tuning.current().entries == {}
    assert len(caught) == 1 and reason in str(caught[0].message) and "\n" not in str(caught[0].message)
    assert len(str(caught[0].message)) <= 200
    assert tuning.current().rates is None  # A second warning would be an error.


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"format": 1, "device_kind": "cp', "[]", "null", "[" * 100_000, "\ufeff{}"),
        *("NaN", "1" * 9999, '{"a":' * 9999, '{"format": 1, "format": 1}', " " * (5 << 20)),
    ],
)
def test_tuning_file_damaged(text, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^use: {path} does not fit"):
        tuning.use(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="does not fit: not UTF-8"):
        tuning.use(path)


def test_tuning_file_missing(tmp_path, monkeypatch):
    missing = tmp_path / "missing.json"
    with pytest.raises(FileNotFoundError, match=rf"^use: cannot read {missing} \(No such file"):
        tuning.use(missing)
    monkeypatch.setenv(file.ENVIRONMENT, str(missing))
    with pytest.warns(tuning.TuningWarning, match="No such file"):
        assert tuning.current().path is None
    monkeypatch.setenv(file.ENVIRONMENT, str(tmp_path))  # A folder.
    with pytest.warns(tuning.TuningWarning, match="not a regular file"):
        assert tuning.current().path is None
    monkeypatch.delenv(file.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing yet"))
    assert tuning.current().path is None  # The default file gives no warning.
    with pytest.raises(TypeError, match="use: path is an int, expected a str or a Path"):
        tuning.use(3)  # type: ignore[arg-type]


def test_tuning_file_search_path(make_file, tmp_path, monkeypatch):
    text = make_file(ENTRY, rates=RATES).read_text()
    cached = tmp_path / "cache" / "jax_ep" / "tuning" / file.default_path(KIND).name
    cached.parent.mkdir(parents=True)
    cached.write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for value in ("", None):
        monkeypatch.delenv(file.ENVIRONMENT) if value is None else monkeypatch.setenv(file.ENVIRONMENT, value)
        assert tuning.current().path == cached
    monkeypatch.setenv(file.ENVIRONMENT, "off")
    assert tuning.current().path is None
    other = tmp_path / "other.json"
    other.write_text(text)
    tuning.use(other)
    assert tuning.current().path == other  # It precedes the environment.
    tuning.use(None)
    assert tuning.current().path is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file.default_path("NVIDIA H200") == tmp_path / ".cache/jax_ep/tuning/nvidia_h200.json"


def test_tuning_file_round_trip(tmp_path):
    path, rates = tmp_path / "new" / "tuned.json", file.Rates(memory_bytes_per_s=3e12)
    sizes = FACTS | {"num_tokens": 9, "hidden": 100}
    file.write(path, KIND, [file.Entry("combine", sizes, {"num_warps": 2}, {"seconds": 1e-6})], rates)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    read = file.read(path, KIND)
    assert (read.rates, read.path, len(read.entries)) == (rates, path, 1)
    assert file.settings_of(read, "combine", FACTS | {"num_tokens": 16, "hidden": 128}) == {"num_warps": 2}
    assert file.settings_of(read, "combine", FACTS | {"num_tokens": 17, "hidden": 128}) == {}
    assert json.loads(path.read_text())["entries"][0]["measured"] == {"seconds": 1e-6}
    before = path.read_text()
    large = file.Entry("combine", sizes, {"num_warps": 2}, {"note": "x" * file.MOST_BYTES})
    with pytest.raises(ValueError, match="larger than 4 MiB"):  # which `read` does not accept
        file.write(path, KIND, [large], rates)
    with pytest.raises(ValueError, match="num_warps=3"):
        file.write(path, KIND, [file.Entry("combine", sizes, {"num_warps": 3}, {})], None)
    assert path.read_text() == before
    with pytest.raises(ValueError, match=r"^Rates: link_bytes_per_s=0, expected a number from 1"):
        file.Rates(link_bytes_per_s=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.rates = None  # type: ignore[misc]
    with pytest.raises(TypeError):
        read.entries[next(iter(read.entries))]["num_warps"] = 4  # type: ignore[index]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, "x" * 10**5]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    where=st.sampled_from(
        [
            *(("format",), ("device_kind",), ("kernels",), ("rates",), ("entries",), ("entries", 0), ("more",)),
            *(("rates", "memory_bytes_per_s"), ("rates", "more"), ("entries", 0, "operation"), ("entries", 0, "facts")),
            *(("entries", 0, "settings"), ("entries", 0, "facts", "hidden"), ("entries", 0, "settings", "num_warps")),
        ]
    ),
    value=JSON,
)
def test_tuning_file_mutated(where, value):
    content = {"format": 1, "device_kind": KIND, "kernels": file.kernel_sources(), "rates": RATES, "entries": [ENTRY]}
    content = json.loads(json.dumps(content))
    functools.reduce(operator.getitem, where[:-1], content)[where[-1]] = value
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        path = Path(folder) / "tuned.json"
        path.write_text(json.dumps(content))
        warnings.simplefilter("always")
        found = file._read_once(path, KIND, True)
    assert found.path == path if not caught else (len(caught), found.entries, found.rates) == (1, {}, None)
    assert all(len(text) <= 200 and "\n" not in text for text in (str(one.message) for one in caught))


def test_tuning_file_not_regular(tmp_path, monkeypatch):
    """Do not wait for a FIFO's writer or the end of a device."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path / ("x" * 300)):
        with pytest.raises(OSError):
            tuning.use(path)
        monkeypatch.setenv(file.ENVIRONMENT, str(path))
        with pytest.warns(tuning.TuningWarning) as caught:
            assert tuning.current().path is None
        assert len(caught) == 1 and len(str(caught[0].message)) <= 200


def test_tuning_file_user_without_home(monkeypatch):
    for name in (file.ENVIRONMENT, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert tuning.current().path is None
    monkeypatch.setenv("HOME", "/dev/null")
    assert tuning.current().path is None
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert file.default_path(KIND) is None and tuning.current().path is None


def test_tuning_page_operations_table():
    """Fields of `Schedule` have their ranges; the others are fields of the operation's tiles."""
    from jax_ep.megakernels import fused_moe, grouped_gemm, masked, quantized_gemm

    tiles = {"grouped_gemm": grouped_gemm.Tiles, "weight_gradient": grouped_gemm.WeightTiles}
    tiles |= {"grouped_gemm_fp8": grouped_gemm.Fp8Tiles, "weight_gradient_fp8": grouped_gemm.Fp8WeightTiles}
    tiles |= dict.fromkeys(("masked_grouped_gemm", "low_latency_gemm_combine"), masked.MaskedTiles)
    tiles |= {"quantized_gemm": quantized_gemm.QuantizedTiles, "fused_moe": fused_moe.FusedTiles}
    tiles |= {"quantized_gemm_gluon": quantized_gemm.GluonTiles, "fused_moe_gluon": fused_moe.GluonLayerTiles}
    assert operations.MOST_BLOCKS == MAX_BLOCKS
    seen = set()
    for name, operation in operations.OPERATIONS.items():
        of_tiles = {field.name for field in dataclasses.fields(tiles[name])} if name in tiles else set()
        for setting, values in operation.settings.items():
            if name in tiles and (setting in of_tiles or setting in ("gluon", "dequantize")):
                continue  # A schedule may have a field of this name.
            assert setting in operations.SCHEDULE_FIELDS, (name, setting)
            seen.add(setting)
            for value in values.choices or (values.least, values.most):
                Schedule(**{setting: value})
    fields = {field.name for field in dataclasses.fields(Schedule)} - {"keep_tokens", "wire_dtype", "reproducible"}
    assert seen == operations.SCHEDULE_FIELDS == fields
