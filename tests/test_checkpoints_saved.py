"""Written checkpoints: the same bits again; a killed, failed or concurrent save leaves no mixture."""

import contextlib
import errno
import gc
import itertools
import json
import os
import resource
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cases import BF16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import HUB, NO_LAYERS, assert_equal, fp8_checkpoint, written
from jax_ep.checkpoints import Checkpoint, files, save, shards, transaction

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

    others = {}
    for i, size in enumerate((100, 100, 300, 50, 60)):
        others[f"t{i}"] = rng.standard_normal(size).astype(F32)
    save(tmp_path, NO_LAYERS, {}, others, max_shard_bytes=800)
    files = {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    assert {path.name for path in tmp_path.iterdir()} == files | {"config.json", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 610}
    assert [index["weight_map"][f"t{i}"][6:11] for i in range(5)] == ["00001", "00001", "00002", "00003", "00003"]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert_same_bits(opened.get_tensor(name), others[name])

    save(tmp_path, NO_LAYERS, {}, others, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same_bits(np.asarray(Checkpoint(tmp_path).read("t2")), others["t2"])


def test_checkpoint_save_empty_arrays(tmp_path):
    others = {"empty": jax.numpy.ones((0, 3)), "scalar": np.ones((), F32), "empty.numpy": np.ones((2, 0), F32)}
    save(tmp_path / "some", NO_LAYERS, {}, others)
    checkpoint = Checkpoint(tmp_path / "some")
    for name, value in others.items():
        assert_same_bits(np.asarray(checkpoint.read(name)), np.asarray(value), name)
    save(tmp_path / "none", NO_LAYERS, {})
    assert Checkpoint(tmp_path / "none").names == ()


def test_checkpoint_save_config_longer_than_the_limit(tmp_path, monkeypatch):
    """The text of the file has line breaks and indents."""
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 4000)
    with pytest.raises(ValueError, match=r"^save: config cannot be written as JSON \(larger than"):
        save(tmp_path, NO_LAYERS | {"list": [0] * 1000}, {})


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


STEPS = ("replace", "fsync", "chmod", "mkdir", "unlink", "rmdir", "listdir")
FOREIGN = {"tokenizer.json", "model.ema.safetensors", "model-lora.safetensors"}
ONE_FILE, TWO_FILES = 10**9, 16


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """Simulates the end of the process."""


def write(folder, value, max_shard_bytes=ONE_FILE, **options):
    tensors = {name: np.full(4, value, np.float32) for name in "ab"}
    save(folder, NO_LAYERS | {"made": value}, {}, tensors, max_shard_bytes=max_shard_bytes, **options)


def found(folder):
    """Return the value of a complete checkpoint, or None if opening or reading it is an error."""
    try:
        checkpoint = Checkpoint(folder)
        values = {float(value) for name in checkpoint.names for value in np.asarray(checkpoint.read(name))}
    except (ValueError, OSError):
        return None
    assert values == {checkpoint.config["made"]}, "a mixture"
    return checkpoint.config["made"]


def steps(monkeypatch, is_wrong, error):
    """Raise in the operating system calls whose number is wrong."""
    number = itertools.count()

    def wrapped(call):
        def run(*args, **kwargs):
            if is_wrong(next(number)):
                raise error
            return call(*args, **kwargs)

        return run

    for name in STEPS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))


def attempts(tmp_path, monkeypatch, old, new, error, *, all_after):
    """Yield the folder after a save that fails in step 0, then step 1, and so on, and whether the save ended."""
    for wrong in itertools.count():
        folder = tmp_path / str(wrong)
        folder.mkdir()
        for name in FOREIGN:
            (folder / name).write_text("theirs")
        if old is not None:
            write(folder, 1, old)
        last = [0]

        def is_wrong(number, wrong=wrong, last=last):
            last[0] = number
            return number >= wrong if all_after else number == wrong

        with monkeypatch.context() as patch:
            steps(patch, is_wrong, error)
            message = "save: "
            try:
                write(folder, 2, new, overwrite=True)
                ended = True
            except type(error) as raised:
                ended = False
                message = str(raised)
        assert message.startswith("save: ") or all_after
        yield folder, ended
        if last[0] < wrong:
            return


SIZES = pytest.mark.parametrize(
    ("old", "new"),
    [(None, TWO_FILES), (ONE_FILE, ONE_FILE), (ONE_FILE, TWO_FILES), (TWO_FILES, ONE_FILE), (TWO_FILES,) * 2],
)


@SIZES
def test_save_killed_at_any_step(old, new, tmp_path, monkeypatch):
    """The next save writes a complete checkpoint, and removes the remains of the killed one."""
    for folder, ended in attempts(tmp_path, monkeypatch, old, new, Killed(), all_after=True):
        assert found(folder) in ((2,) if ended else (None, 1, 2))
        if old is not None:  # Without overwrite, the next save restores the old checkpoint and keeps it.
            with pytest.raises(FileExistsError, match=r"already has config.json, model.*overwrite=True"):
                write(folder, 3)
            assert found(folder) in (1, 2)
        write(folder, 4, overwrite=True)
        assert found(folder) == 4
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"} | FOREIGN
        assert all((folder / name).read_text() == "theirs" for name in FOREIGN)


def changed(folder, place_config):
    """Put a config into the folder of a killed save, or remove it, and return the files' content."""
    config = folder / "config.json"
    if place_config and not config.exists():
        config.write_text(json.dumps(NO_LAYERS | {"made": 1}))
    elif not place_config:
        config.unlink(missing_ok=True)
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix == ".safetensors"}


@SIZES
@pytest.mark.parametrize("place_config", [False, True])
def test_save_killed_at_any_step_and_the_config_changed(old, new, place_config, tmp_path, monkeypatch):
    """What was killed is known from its own files: a config of the user neither ends it nor undoes it."""
    for folder, _ in attempts(tmp_path, monkeypatch, old, new, Killed(), all_after=True):
        committed = (folder / "config.json").exists() and found(folder) == 2
        files = changed(folder, place_config)
        with contextlib.suppress(FileExistsError):
            write(folder, 3)
        left = changed(folder, place_config)
        if committed:
            assert {data for data in files if np.float32(2).tobytes() in data} <= left
        elif old is not None:
            assert {data for data in files if np.float32(1).tobytes() in data} <= left


def test_save_after_a_killed_one_keeps_a_new_config(tmp_path, monkeypatch):
    """The old weights stay where they were moved, and an error names them."""
    write(tmp_path, 1)
    real, number = os.replace, itertools.count()

    def replace(source, target):
        if next(number) == 3:
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(transaction, "_recover", lambda *_: None)
        with pytest.raises(Killed):
            write(tmp_path, 2, overwrite=True)
    (tmp_path / "config.json").write_text(json.dumps(NO_LAYERS | {"made": 7}))
    with pytest.raises(FileNotFoundError, match=r"a save is running or was killed.*call save: it restores"):
        Checkpoint(tmp_path)
    with pytest.raises(FileExistsError, match=r"has config.json, but a killed save has moved .*; move yours away"):
        write(tmp_path, 3, overwrite=True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileExistsError, match=r"already has config\.json"):
        write(tmp_path, 3)
    assert found(tmp_path) == 1


@SIZES
def test_save_fails_at_any_step(old, new, tmp_path, monkeypatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    for folder, ended in attempts(tmp_path, monkeypatch, old, new, error, all_after=False):
        assert found(folder) in ((2,) if ended else (None if old is None else 1, 2))


def test_save_disk_full(tmp_path):
    write(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .* File too large.*free space"):
            save(tmp_path, NO_LAYERS, {}, {"a": np.zeros(10_000)}, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_save_under_a_limit_of_open_files(tmp_path):
    """A save ends, or raises and leaves the old checkpoint, whichever step has no file left."""
    write(tmp_path, 0)
    last, before = 0, resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(300)]  # Up to the last of them, every number is in use.
    limit = held[-1] + 1
    for value in range(1, 10):
        gc.collect()  # Close the files that `found` has opened.
        os.close(held.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            with contextlib.suppress(OSError):
                write(tmp_path, value, TWO_FILES, overwrite=True)
                last = value
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert found(tmp_path) == last
    for descriptor in held:
        os.close(descriptor)
    assert last == value


def test_save_folder_is_a_file(tmp_path):
    (tmp_path / "file").write_text("theirs")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"^save: cannot write the checkpoint to .*file"):
            write(folder, 1)
    assert (tmp_path / "file").read_text() == "theirs"


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_concurrent(overwrite, tmp_path, monkeypatch):
    """The second save is an error at any time while the first one writes."""
    real = safetensors.numpy.save_file

    def save_file(*args, **kwargs):
        with pytest.raises(FileExistsError, match="another save is writing to"):
            write(tmp_path, 2, overwrite=overwrite)
        real(*args, **kwargs)

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    write(tmp_path, 1)
    assert found(tmp_path) == 1


def test_save_keeps_foreign_files_written_meanwhile(tmp_path, monkeypatch):
    real = safetensors.numpy.save_file

    def save_file(*args, **kwargs):
        real(*args, **kwargs)
        (tmp_path / "config.json").write_text("theirs")

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    with pytest.raises(FileExistsError, match=r"already has config\.json"):
        write(tmp_path, 1)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "theirs")]


def test_save_keeps_foreign_files(tmp_path):
    write(tmp_path, 1, TWO_FILES)
    for name in FOREIGN:
        (tmp_path / name).write_text("theirs")
    write(tmp_path, 2, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"} | FOREIGN

    (tmp_path / "model-00002-of-00002.safetensors").write_text("theirs")
    with pytest.raises(FileExistsError, match=r"has model-00002-of-00002\.safetensors, which its"):
        write(tmp_path, 3, TWO_FILES, overwrite=True)
    assert found(tmp_path) == 2
    assert (tmp_path / "model-00002-of-00002.safetensors").read_text() == "theirs"


@pytest.mark.parametrize("name", ["../theirs.safetensors", "tokenizer.json", "sub/x.safetensors"])
def test_save_old_index_names_foreign_files(name, tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / name).write_text("theirs")
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(ValueError, match=r"^save: .*expected the name of a \.safetensors file in the same folder"):
        write(folder, 1, overwrite=True)
    assert (folder / name).read_text() == "theirs"


@pytest.mark.parametrize("name", [".jax_ep_save", ".jax_ep_save.lock", ".jax_ep_save/old"])
@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_save_folder_or_lock_is_foreign(name, kind, tmp_path):
    (tmp_path / "theirs").mkdir()
    folder = tmp_path / "checkpoint"
    (folder / name).parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=rf"^save: .*{Path(name).parts[0]}"):
        write(folder, 1)
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_save_permissions_follow_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        write(tmp_path / "new", 1, TWO_FILES)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o666 & ~umask}


def test_save_leaves_nothing_behind_without_permissions(tmp_path, monkeypatch):
    """Neither if the umask takes the owner's rights, nor in a folder that can be written and not read."""
    before = os.umask(0o777)
    try:
        with contextlib.suppress(Killed), transaction.replacing("save", tmp_path, [], overwrite=False) as new:
            modes = {path.stat().st_mode & 0o777 for path in (new, new.parent, new.parent / "old")}
            raise Killed
    finally:
        os.umask(before)
    assert modes == {0o711} and list(tmp_path.iterdir()) == []  # Other users see whether a save has ended.

    write(tmp_path, 1)
    real = os.open

    def unreadable(path, *args, **options):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", unreadable)
    with pytest.raises(PermissionError, match=r"^save: cannot write"):
        write(tmp_path, 2, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_save_whose_lock_somebody_removed(tmp_path, monkeypatch):
    """The checkpoint is complete by then."""
    complete = transaction._complete

    def after_a_cleanup(*arguments):
        (tmp_path / ".jax_ep_save.lock").unlink()
        complete(*arguments)

    monkeypatch.setattr(transaction, "_complete", after_a_cleanup)
    write(tmp_path, 1, np.int64(TWO_FILES))
    assert found(tmp_path) == 1


def test_save_over_a_file_whose_state_is_unknown(tmp_path, monkeypatch):
    """A file that cannot be looked up is not missing: an error of the disk leaves the old checkpoint."""
    write(tmp_path, 1, TWO_FILES)
    index, original = tmp_path / "model.safetensors.index.json", os.lstat
    with monkeypatch.context() as patched:

        def broken(path, *args, **kwargs):
            if Path(path) == index:
                raise OSError(errno.EIO, "Input/output error")
            return original(path, *args, **kwargs)

        patched.setattr(os, "lstat", broken)
        with pytest.raises(OSError, match="Input/output error"):
            write(tmp_path, 2, overwrite=True)
    assert found(tmp_path) == 1
