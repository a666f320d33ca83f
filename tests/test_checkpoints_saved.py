"""Written checkpoints: the same bits again; a killed, failed or concurrent save leaves no part of one."""

import contextlib
import errno
import itertools
import json
import os
import resource

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cases import BF16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import HUB, assert_equal, fp8_checkpoint, written
from jax_ep.checkpoints import Checkpoint, files, save, shards

pytest.importorskip("safetensors")

every_family = pytest.mark.parametrize("name", HUB)


@every_family
def test_checkpoint_save_round_trip(name, tmp_path, rng, expert_mesh):
    """Shards of eight devices are written with the names of published checkpoints, and read back bit for bit."""
    hub = HUB[name]
    original, want = written(name, tmp_path / "original", rng, BF16)
    mesh = expert_mesh(8)
    layers = {number: original.moe_weights(number, mesh=mesh) for number in hub.layers}
    save(tmp_path / "new", original.config, layers, {"other": original.read("other")}, max_shard_bytes=5000)
    again = Checkpoint(tmp_path / "new")
    assert again.config == original.config and set(again.names) == set(original.names)
    for number in hub.layers:
        assert_equal(again.moe_weights(number), want[number])
    for tensor in original.names:
        got, stored = np.asarray(again.read(tensor)), np.asarray(original.read(tensor))
        if stored.dtype != got.dtype:  # Router parameters stay in float32.
            assert any(word in tensor for word in ("gate.weight", "router", "correction_bias"))
            stored = stored.astype(F32)
        assert_same_bits(got, stored, tensor)


def test_checkpoint_save_files(tmp_path, rng):
    """The files match the format: file names, index, sizes; one file without an index if it suffices."""
    from safetensors import safe_open

    config, others = {"model_type": "mixtral"} | dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}, {}
    for i, size in enumerate((100, 100, 300, 50, 60)):
        others[f"t{i}"] = rng.standard_normal(size).astype(F32)
    folder = tmp_path / "several"
    save(folder, config, {}, others, max_shard_bytes=800)
    files = {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    assert {path.name for path in folder.iterdir()} == files | {"config.json", "model.safetensors.index.json"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 610}
    assert [index["weight_map"][f"t{i}"][6:11] for i in range(5)] == ["00001", "00001", "00002", "00003", "00003"]
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert_same_bits(opened.get_tensor(name), others[name])

    save(tmp_path / "one", config, {}, others)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"config.json", "model.safetensors"}
    assert_same_bits(np.asarray(Checkpoint(tmp_path / "one").read("t2")), others["t2"])


def test_checkpoint_save_empty_arrays(tmp_path):
    config = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}
    others = {"empty": jax.numpy.ones((0, 3)), "scalar": np.ones((), F32), "empty.numpy": np.ones((2, 0), F32)}
    save(tmp_path / "some", config, {}, others)
    checkpoint = Checkpoint(tmp_path / "some")
    for name, value in others.items():
        assert_same_bits(np.asarray(checkpoint.read(name)), np.asarray(value), name)
    save(tmp_path / "none", config, {})
    assert Checkpoint(tmp_path / "none").names == ()


def test_checkpoint_save_config_longer_than_the_limit(tmp_path, monkeypatch):
    """The text of the file has line breaks and indents."""
    config = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0, "list": [0] * 1000}
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 4000)
    with pytest.raises(ValueError, match=r"^save: config cannot be written as JSON \(larger than"):
        save(tmp_path / "new", config, {})


def test_checkpoint_save_fp8_round_trip(tmp_path, rng, expert_mesh):
    """Values and scales of the experts are unchanged; shared experts were dequantized."""
    original, _ = fp8_checkpoint(tmp_path / "original", rng)
    weights = original.moe_weights(3, mesh=expert_mesh(2), quantized=True)
    save(tmp_path / "new", original.config, {3: weights})
    again = Checkpoint(tmp_path / "new")
    assert_equal(
        dict(enumerate(jax.tree.leaves(again.moe_weights(3, quantized=True)))),
        {i: np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(weights))},
    )
    for name in again.names:
        if ".experts." in name:
            assert_same_bits(np.asarray(again.read(name)), np.asarray(original.read(name)), name)


def test_checkpoint_save_sharded_in_several_axes(tmp_path, rng):
    checkpoint, want = written("olmoe", tmp_path / "original", rng)
    sharding = NamedSharding(make_mesh((4, 2), ("expert", "tensor")), P("expert", None, "tensor"))
    weights = {n: jax.device_put(w, sharding) if w.ndim == 3 else w for n, w in want[0].items()}
    save(tmp_path / "new", {**checkpoint.config, "num_hidden_layers": 1}, {0: weights})
    assert_equal(Checkpoint(tmp_path / "new").moe_weights(0), want[0])


def test_checkpoint_save_host_memory(rng):
    values = rng.standard_normal((8, 4)).astype(F32)
    copy = shards.HostCopy(jax.device_put(values, NamedSharding(make_mesh((4,), ("a",)), P("a"))))
    for first, last, held in ((0, 1, 1), (1, 2, 1), (1, 5, 3), (7, 8, 1)):
        np.testing.assert_array_equal(copy.region((slice(first, last), slice(1, 3))), values[first:last, 1:3])
        assert len(copy._held) == held


CONFIG = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}
TWO_FILES = 16


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(folder, value, max_shard_bytes=TWO_FILES):
    tensors = {name: np.full(4, value, np.float32) for name in "ab"}
    save(folder, CONFIG, {}, tensors, max_shard_bytes=max_shard_bytes)


def found(folder):
    """Return the value that all tensors of a checkpoint have."""
    checkpoint = Checkpoint(folder)
    (value,) = {float(value) for name in checkpoint.names for value in np.asarray(checkpoint.read(name))}
    return value


def failing(call, error, number, wrong):
    """Return a system call that raises if its number is `wrong`."""

    def run(*args, **kwargs):
        if next(number) == wrong:
            raise error
        return call(*args, **kwargs)

    return run


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_save_fails_at_any_step(error, tmp_path, monkeypatch):
    """It leaves nothing, or the whole checkpoint if only the last step failed."""
    ended, wrong = False, -1
    while not ended:
        wrong += 1
        parent, number = tmp_path / str(wrong), itertools.count()
        with monkeypatch.context() as patch:
            for name in ("mkdir", "chmod", "fsync", "rename"):
                patch.setattr(os, name, failing(getattr(os, name), error, number, wrong))
            with contextlib.suppress(type(error)):
                write(parent / "new", 2)
                ended = True
        left = list(parent.iterdir()) if parent.exists() else []
        assert not left or (left == [parent / "new"] and found(parent / "new") == 2)
    assert wrong > 8


def test_save_disk_full(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .* File too large.*free space"):
            save(tmp_path / "new", CONFIG, {}, {"a": np.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_save_to_a_path_that_exists(kind, tmp_path):
    path = tmp_path / "theirs"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("theirs")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        FileExistsError, match=r"^save: .*theirs exists, expected a path for a new folder; pass another"
    ):
        write(path, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_save_below_a_file(tmp_path):
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .*file"):
        write(tmp_path / "file" / "below", 1)


def test_save_concurrent(tmp_path, monkeypatch):
    """The save that ends first wins, and the other one is an error."""
    real = safetensors.numpy.save_file

    def save_file(*args, **kwargs):
        monkeypatch.undo()
        write(tmp_path / "new", 2)
        real(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .*not empty"):
        write(tmp_path / "new", 1)
    assert found(tmp_path / "new") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_save_permissions_follow_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        write(tmp_path / "new", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o666 & ~umask}
