"""Malformed or hostile files: each is an error that names it, before any tensor is read."""

import copy
import json
import os
import pickle
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

save_file = pytest.importorskip("safetensors.numpy").save_file

import hub_checkpoints
from hub_checkpoints import HUB, NO_LAYERS
from jax_ep.checkpoints import Checkpoint, files, save
from jax_ep.checkpoints.families import FAMILIES, SCHEMA, Key
from jax_ep.core.json_files import TEXT

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = A | {"data_offsets": [16, 32]}


def tensor(**changes):
    return {"a": A | changes}


def write_file(path, header, num_bytes=16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))


def write_index(folder, weight_map, **shards):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for name, (header, num_bytes) in shards.items():
        write_file(folder / f"{name}.safetensors", header, num_bytes)


def read_all(folder):
    checkpoint = Checkpoint(folder)
    return {name: np.asarray(checkpoint.read(name)) for name in checkpoint.names}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def fails(folder, text, *errors):
    with pytest.raises(errors or ValueError, match=text) as caught:
        read_all(folder)
    assert str(caught.value).startswith(f"Checkpoint: {folder}") and len(str(caught.value)) < 1000


NO_NUMBERS = (None, True, 1.5, "1", -1, 2**64, [])
HEADERS = {
    "list": ([], 0),
    "null": (b"null", 0),
    "nested deeply": (b"[" * 200_000, 0),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(tensor()).encode(), 16),
    "not UTF-8": (json.dumps(tensor()).encode().replace(b'"a"', b'"\xe9"'), 16),
    "key twice": (b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), 16),
    "metadata with a number": ({"__metadata__": {"x": 1}} | tensor(), 16),
    "tensor is a number": ({"a": 1}, 16),
    "tensor is empty": ({"a": {}}, 16),
    "unknown dtype": (tensor(dtype="X" * 10**6), 16),
    "dtype is a list": (tensor(dtype=[]), 16),
    "dtype is an object": (tensor(dtype={"F32": None}), 16),
    "tensor is an array": ({"a": ["F32", [2, 2], [0, 16]]}, 16),
    "three offsets": (tensor(data_offsets=[0, 16, 32]), 32),
    "offsets in the header": (tensor(data_offsets=[-16, 0]), 16),
    "offsets swapped": (tensor(data_offsets=[16, 0]), 16),
    "offsets beyond the end": (tensor(data_offsets=[16, 32]), 16),
    "overlap": ({"a": A, "b": A}, 16),
    "gap": ({"a": A, "b": A | {"data_offsets": [20, 36]}}, 36),
    "bytes of no tensor": (tensor(), 17),
    "bytes missing": (tensor(), 15),
    "size overflows": (tensor(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), 0),
    "NumPy has no such shape": (tensor(shape=[1] * 65, data_offsets=[0, 4]), 4),
    **{f"size {value}": (tensor(shape=[value, 2]), 16) for value in NO_NUMBERS},
    **{f"offset {value}": (tensor(data_offsets=[0, value]), 16) for value in NO_NUMBERS},
    **{f"no {key}": ({"a": {name: value for name, value in A.items() if name != key}}, 16) for key in A},
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_malformed(case, folder):
    write_file(folder / SINGLE, *HEADERS[case])
    with pytest.raises((ValueError, NotImplementedError), match=r"^Checkpoint: ") as caught:
        read_all(folder)
    assert len(str(caught.value)) < 1000


def test_header_under_a_limit_of_file_sizes(folder):
    write_file(folder / SINGLE, tensor())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        assert Checkpoint(folder).names == ("a",)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize(("length", "size"), [(2**31, 2**31 + 100), (2**64 - 1, 100), (99, 40), (8, 8), (0, 0)])
def test_header_length_beyond_the_file_or_the_limit(length, size, folder):
    """Sparse files: nothing of such a header is read."""
    (folder / SINGLE).write_bytes(struct.pack("<Q", length))
    os.truncate(folder / SINGLE, size)
    fails(folder, "is not a complete safetensors file")


def test_header_longer_than_the_limit(folder, monkeypatch):
    write_file(folder / SINGLE, tensor())
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 20)
    fails(folder, r"its header of 65 bytes is not valid \(larger than")


def test_header_legal_edges(folder):
    header = {
        "zero": A | {"shape": [0, 3], "data_offsets": [0, 0]},
        "scalar": A | {"shape": [], "data_offsets": [0, 4], "of a later version": 1},
        "__metadata__": {},
    }
    write_file(folder / SINGLE, json.dumps(header).encode() + b"   ", 4)
    assert {name: value.shape for name, value in read_all(folder).items()} == {"zero": (0, 3), "scalar": ()}
    write_file(folder / SINGLE, {}, 0)
    assert read_all(folder) == {}


OUTSIDE = ["../x.safetensors", "{outside}", "./x.safetensors", "sub/x.safetensors", "..", "", "config.json"]
OUTSIDE += ["x\0.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, None, 1, [], {}])
def test_index_names_no_file_of_the_folder(name, folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("other") / "x.safetensors"
    for path in (outside, folder.parent / "x.safetensors", folder / "x.safetensors"):
        write_file(path, tensor())
    (folder / "sub").symlink_to(outside.parent)
    write_index(folder, {"a": str(outside) if name == "{outside}" else name})
    fails(folder, rf"{INDEX} is not valid \(weight_map\['a'\]=.*, expected the name of a .safetensors file")


@pytest.mark.parametrize("key", ["weight_map", "metadata"])
@pytest.mark.parametrize("value", [None, [], "a", 1])
def test_index_of_other_types(value, key, folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {}} | {key: value}))
    fails(folder, f"{key}=.*, expected an object")


def test_index_and_files_that_differ(folder):
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"}, x=(tensor(), 16), y=({"a": A, "b": B}, 32))
    fails(folder, "has 'a' in y.safetensors and in x.safetensors, expected each tensor once")
    write_index(folder, {"a": "x.safetensors", "c": "x.safetensors"})
    fails(folder, "places 'c' in x.safetensors, which has no such tensor")


def test_index_and_a_single_file(folder):
    write_index(folder, {"a": "x.safetensors"}, x=(tensor(), 16))
    write_file(folder / SINGLE, tensor())
    fails(folder, f"has {SINGLE} and {INDEX}, expected either")


def test_symlinks_of_the_download_cache(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    write_file(blobs / "1", tensor())
    (folder / "x.safetensors").symlink_to(blobs / "1")
    write_index(folder, {"a": "x.safetensors"})
    assert read_all(folder)["a"].shape == (2, 2)


NO_JSON = [b"", b"[]", b"null", b"\xef\xbb\xbf{}", b"\xff", "{}".encode("utf-16"), b"{}\0", b'{"a":1,"a":2}']
NO_JSON += [b"[" * 10**5]
NO_JSON += [b'{"a":%s}' % value for value in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'{"b":1,"b":1}')]


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", NO_JSON, ids=range(len(NO_JSON)))
def test_json_malformed(name, text, folder):
    write_index(folder, {"a": "x.safetensors"}, x=(tensor(), 16))
    (folder / name).write_bytes(text)
    fails(folder, f"{name} is not valid .*, expected a JSON object")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_without_end(name, folder):
    write_index(folder, {"a": "x.safetensors"}, x=(tensor(), 16))
    os.truncate(folder / name, 2**32)
    fails(folder, rf"{name} is not valid \(larger than 64 MiB\)")


KINDS = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "nowhere": lambda path: path.symlink_to("/nowhere"),
    "input error": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, "x.safetensors"])
def test_no_regular_file(name, kind, folder):
    if name == "x.safetensors":
        write_index(folder, {"a": "x.safetensors"})
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with pytest.raises((ValueError, OSError), match=rf"^Checkpoint: .*{name}"):
        read_all(folder)


def tensors(value):
    return {name: np.full(4, value, np.float32) for name in "ab"}


@pytest.mark.parametrize("was_read", [False, True])
def test_file_replaced_after_the_checkpoint_was_opened(was_read, tmp_path):
    save(tmp_path, NO_LAYERS, {}, tensors(1), max_shard_bytes=16)
    checkpoint = Checkpoint(tmp_path)
    if was_read:
        checkpoint.read("a")
    save(tmp_path, NO_LAYERS, {}, tensors(2), max_shard_bytes=16, overwrite=True)
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors has been replaced.*open Checkpoint again"):
        checkpoint.read("a")


def test_file_cut_after_a_tensor_was_read(folder):
    write_file(folder / SINGLE, tensor())
    checkpoint = Checkpoint(folder)
    checkpoint.read("a")
    os.truncate(folder / SINGLE, 8)
    with pytest.raises(ValueError, match="has been replaced"):
        checkpoint.read("a")


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 4096), lambda path: os.utime(path, (0, 0))])
def test_file_changed_in_place_while_a_tensor_is_read(change, folder, monkeypatch):
    """A read past the new end of a mapped file would end the process."""
    save_file({"a": np.ones((1024, 1024), np.float32)}, folder / SINGLE)
    checkpoint, read = Checkpoint(folder), os.preadv

    def changing(*arguments):
        change(folder / SINGLE)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", changing)
    with pytest.raises(ValueError, match=r"^Checkpoint: .*model.safetensors was changed while it was read"):
        checkpoint.read("a")


def test_errors_cut_long_names(folder):
    names = [long := "n" * 10**6, f"{long}_blocks", f"{long}_scales", f"{long}_scale_inv", f"{long}i"]
    kinds = [("F8_E4M3", [4]), ("U8", [4]), ("U8", [4]), ("U8", [4]), ("I64", [1])]
    header, end = {}, 0
    for name, (dtype, shape) in zip(names, kinds, strict=True):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + (8 if shape == [1] else 4)]}
    write_file(folder / SINGLE, header, end - 1)
    with (folder / SINGLE).open("ab") as file:
        file.write(b"\x7f")  # of the int64
    checkpoint = Checkpoint(folder)
    calls = [{"dtype": "float32"}] * 4 + [{}]
    for name, options in [*zip(names, calls, strict=True), (names[1], {"transpose": True})]:
        with pytest.raises(ValueError, match=r"^Checkpoint") as caught:
            checkpoint.read(name, **options)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("change", ["save", "remove", "break"])
def test_config_replaced_while_the_checkpoint_is_opened(change, tmp_path, monkeypatch):
    """Files that no longer match are not reported as broken."""
    save(tmp_path, NO_LAYERS, {}, tensors(1), max_shard_bytes=16)
    read_index = files.read_index

    def late(function, folder):
        monkeypatch.undo()
        if change == "save":
            save(tmp_path, NO_LAYERS, {}, tensors(2), max_shard_bytes=16, overwrite=True)
        else:
            (tmp_path / "config.json").unlink()
        if change == "break":
            (tmp_path / INDEX).unlink()
        return read_index(function, folder)

    monkeypatch.setattr(files, "read_index", late)
    with pytest.raises(FileNotFoundError, match=r"^Checkpoint: .*config\.json was replaced while"):
        Checkpoint(tmp_path)


def test_relative_folder_after_a_change_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("here", NO_LAYERS, {}, tensors(1))
    checkpoint = Checkpoint("here")
    monkeypatch.chdir("/")
    assert np.asarray(checkpoint.read("a")).tolist() == [1] * 4


def test_close_and_read_again(tmp_path):
    """Without garbage collection, which also closes files."""
    save(tmp_path, NO_LAYERS, {}, tensors(1), max_shard_bytes=16)
    descriptors = Path("/proc/self/fd")

    def num_open():
        return sum(path.is_symlink() and path.readlink().parent == tmp_path for path in descriptors.iterdir())

    with Checkpoint(tmp_path) as checkpoint:
        for name in "ab":
            checkpoint.read(name)
        assert num_open() == 2
    assert num_open() == 0
    assert np.asarray(checkpoint.read("a")).tolist() == [1] * 4 and num_open() == 1
    checkpoint.close()
    assert num_open() == 0


def test_pickle_opens_the_folder_again(tmp_path):
    save(tmp_path, NO_LAYERS, {}, tensors(1))
    checkpoint = Checkpoint(tmp_path)
    np.asarray(checkpoint.read("a"))
    data = pickle.dumps(checkpoint)
    for again in (pickle.loads(data), copy.deepcopy(checkpoint)):
        assert again.config == checkpoint.config and np.asarray(again.read("b")).tolist() == [1] * 4
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"^Checkpoint: "):
        pickle.loads(data)


@pytest.mark.parametrize("call", [Checkpoint, lambda folder: save(folder, NO_LAYERS, {})], ids=["Checkpoint", "save"])
@pytest.mark.parametrize("folder", ["\ud800", "a\0b", ""], ids=["surrogate", "NUL", "empty"])
def test_folder_that_the_system_does_not_have(folder, call):
    with pytest.raises(ValueError, match=r"^(Checkpoint|save): folder is .*, expected a path"):
        call(folder)


def test_current_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (Checkpoint, lambda folder: save(folder, NO_LAYERS, {})):
        with pytest.raises(FileNotFoundError, match=r"^(Checkpoint|save): folder is 'x'"):
            call("x")


def fields_of(family):
    """Return the fields of config.json that are read for a family."""
    row = FAMILIES[family]
    keys = [
        key
        for fields in (row.options, row.router, row.shared_experts, row.experts, row.layers._asdict())
        for key in fields.values()
        if isinstance(key, Key)
    ]
    others = [*(one.name for one in row.restrictions), *(key.only_if[0] for key in keys if key.only_if)]
    return {"hidden_size", "hidden_act", *others, *(name for key in keys for name in key.names)}


def use(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    return checkpoint.moe_layers, checkpoint.moe_options(), [checkpoint.moe_weights(n) for n in checkpoint.moe_layers]


def changed(family, **changes):
    config = json.loads(json.dumps(dict(HUB[family].config)))
    section = config if FAMILIES[family].section is None else config[FAMILIES[family].section]
    section.update(changes)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_config_values_out_of_range(family, folder):
    """Every field that is read, with every wrong type and extreme values."""
    write_file(folder / SINGLE, tensor())
    for name in sorted(fields_of(family)):
        wrong = [10**12, -7, -(10**400), 1e300, {"a": 1}, [[1]], [True], [-1], [10**12], [5, 5]]
        for value in wrong if SCHEMA[name] is TEXT else [*wrong, "8"]:
            with pytest.raises(ValueError, match=rf"config.json has {name}(\[0\])?=.*, expected (an? |true|diff)"):
                use(folder, changed(family, **{name: value}))


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0, expected an integer from 1 to 10000"),
        ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1, expected true or false"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 for 'num_experts_per_tok', expected at most the 8 experts"),
        ("mixtral", {"num_experts": 4}, "'num_experts': 4, 'num_local_experts': 8}, expected one"),
        ("deepseek_v3", {"n_group": 16}, "16 for 'n_group', expected at most the 8"),
        ("deepseek_v3", {"n_group": 3}, "3 for 'n_group', expected a divisor of the 8"),
        ("deepseek_v3", {"topk_group": 5}, "5 for 'topk_group', expected at most the 4 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "expected at most the 4 experts in the chosen groups"),
        ("llama4_text", {"moe_layers": [4]}, r"\[4\] for 'moe_layers', expected layers below the number of layers, 4"),
        *(
            (family, {name: None}, f"no '{name}', expected it for this model_type")
            for family in ("deepseek_v3", "kimi_k2")
            for name in ("n_group", "topk_group", "routed_scaling_factor")
        ),
        ("longcat_flash", {"routed_scaling_factor": None}, "no 'routed_scaling_factor', expected it"),
        ("mixtral", {"quantization_config": 5}, "quantization_config=5, expected an object"),
        ("mixtral", {"quantization_config": {"quant_method": 5}}, "quant_method=5, expected a string"),
        ("mixtral", {"quantization_config": {"weight_block_size": [64, 64]}}, r"weight_block_size=\[64, 64\]"),
    ],
)
def test_config_values_that_contradict(family, changes, text, folder):
    write_file(folder / SINGLE, tensor())
    with pytest.raises(ValueError, match=text):
        use(folder, changed(family, **changes))


@pytest.mark.parametrize("value", [None, [], 1, "x"])
def test_config_section_of_another_type(value, folder):
    write_file(folder / SINGLE, tensor())
    with pytest.raises(ValueError, match="text_config"):
        use(folder, {"model_type": "llama4", "text_config": value})


def test_fp8_blocks_of_another_size(tmp_path, rng):
    """If the number of blocks is the same, only the config shows the difference."""
    checkpoint, _ = hub_checkpoints.fp8_checkpoint(tmp_path, rng, 200, 72)
    checkpoint.config["quantization_config"]["weight_block_size"] = [100, 100]
    name = "model.layers.3.mlp.experts.0.up_proj.weight"
    with pytest.raises(ValueError, match=r"weight_block_size=\[100, 100\], expected \[128, 128\]"):
        checkpoint.read(name, dtype=np.float32)
    assert checkpoint.read(name).shape == (72, 200)
