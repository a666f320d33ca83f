"""Written checkpoints: the same bits again, and files as other programs read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("safetensors")

from cases import BF16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import HUB, assert_equal, fp8_checkpoint, written
from jax_ep.checkpoints import Checkpoint, save, shards

every_family = pytest.mark.parametrize("name", HUB)


@every_family
def test_checkpoint_save_round_trip(
    name: str, tmp_path: Path, rng: np.random.Generator, expert_mesh: Callable[[int], Mesh]
) -> None:
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


def test_checkpoint_save_files(tmp_path: Path, rng: np.random.Generator) -> None:
    """The files match the format: file names, index, sizes; one file without an index if it suffices."""
    from safetensors import safe_open

    config, others = {"model_type": "mixtral"} | dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}, {}
    for i, size in enumerate((100, 100, 300, 50, 60)):
        others[f"t{i}"] = rng.standard_normal(size).astype(F32)
    save(tmp_path, config, {}, others, max_shard_bytes=800)
    files = {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    assert {path.name for path in tmp_path.iterdir()} == files | {"config.json", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 610}
    assert [index["weight_map"][f"t{i}"][6:11] for i in range(5)] == ["00001", "00001", "00002", "00003", "00003"]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert_same_bits(opened.get_tensor(name), others[name])

    save(tmp_path, config, {}, others, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same_bits(np.asarray(Checkpoint(tmp_path).read("t2")), others["t2"])


def test_checkpoint_save_empty_arrays(tmp_path: Path) -> None:
    config = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}
    others = {"empty": jax.numpy.ones((0, 3)), "scalar": np.ones((), F32), "empty.numpy": np.ones((2, 0), F32)}
    save(tmp_path / "some", config, {}, others)
    checkpoint = Checkpoint(tmp_path / "some")
    for name, value in others.items():
        assert_same_bits(np.asarray(checkpoint.read(name)), np.asarray(value), name)
    save(tmp_path / "none", config, {})
    assert Checkpoint(tmp_path / "none").names == ()


def test_checkpoint_save_does_not_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwriting needs `overwrite`, and a failed save changes nothing."""
    config = dict(HUB["mixtral"].config) | {"num_hidden_layers": 0}
    others = {"t": np.ones(3, F32)}
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, config, {}, others)
    with pytest.raises(FileExistsError, match=r"already has config.json, model.safetensors.*overwrite=True"):
        save(tmp_path, config, {}, {"t": np.zeros(3, F32)})

    import safetensors.numpy

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, config, {}, {"t": np.zeros(3, F32)}, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    assert_same_bits(np.asarray(Checkpoint(tmp_path).read("t")), others["t"])


def test_checkpoint_save_fp8_round_trip(
    tmp_path: Path, rng: np.random.Generator, expert_mesh: Callable[[int], Mesh]
) -> None:
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


def test_checkpoint_save_sharded_in_several_axes(tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoint, want = written("olmoe", tmp_path / "original", rng)
    sharding = NamedSharding(make_mesh((4, 2), ("expert", "tensor")), P("expert", None, "tensor"))
    weights = {n: jax.device_put(w, sharding) if w.ndim == 3 else w for n, w in want[0].items()}
    save(tmp_path / "new", {**checkpoint.config, "num_hidden_layers": 1}, {0: weights})
    assert_equal(Checkpoint(tmp_path / "new").moe_weights(0), want[0])


def test_checkpoint_save_host_memory(rng: np.random.Generator) -> None:
    values = rng.standard_normal((8, 4)).astype(F32)
    copy = shards.HostCopy(jax.device_put(values, NamedSharding(make_mesh((4,), ("a",)), P("a"))))
    for first, last, held in ((0, 1, 1), (1, 2, 1), (1, 5, 3), (7, 8, 1)):
        np.testing.assert_array_equal(copy.region((slice(first, last), slice(1, 3))), values[first:last, 1:3])
        assert len(copy._held) == held
