"""Uploads to a hub that is a fake of huggingface_hub's client: what one commit has, and what stops it beforehand."""

import functools
import inspect
import json
import shutil
import sys
import types

import numpy as np
import pytest

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("safetensors")

import harness
from cases import F32
from hub_checkpoints import NO_LAYERS
from jax_ep.checkpoints import Checkpoint, download, push, save

SHARDS = {f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)}
INDEX = "model.safetensors.index.json"
OTHERS = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"}


class FakeApi:
    """A repository: its files after each commit, with the parent of each commit checked."""

    def __init__(self):
        self.files, self.commits, self.repos = {}, [], {}

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok or repo_id not in self.repos
        self.repos.setdefault(repo_id, private)

    def repo_info(self, repo_id, *, revision):
        assert repo_id in self.repos
        siblings = [types.SimpleNamespace(rfilename=name) for name in self.files]
        return types.SimpleNamespace(siblings=siblings or None, sha=f"{revision} {len(self.commits)}")

    def create_commit(self, repo_id, operations, *, commit_message, revision, parent_commit):
        assert parent_commit == f"{revision} {len(self.commits)}"
        for operation in operations:
            if isinstance(operation, hub.CommitOperationDelete):
                del self.files[operation.path_in_repo]
            else:
                with operation.as_file() as file:
                    self.files[operation.path_in_repo] = file.read()
        self.commits.append((repo_id, revision, commit_message))
        return types.SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{len(self.commits)}")


@pytest.fixture
def api(monkeypatch):
    fake, real = FakeApi(), hub.HfApi

    def call(name, *args, **options):
        inspect.signature(getattr(real, name)).bind(None, *args, **options)
        return getattr(fake, name)(*args, **options)

    methods = ("create_repo", "repo_info", "create_commit")
    client = types.SimpleNamespace(**{name: functools.partial(call, name) for name in methods})
    monkeypatch.setattr(hub, "HfApi", lambda: client)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_token")
    return fake


@pytest.fixture
def folder(tmp_path, rng):
    """Two shards, the files of a tokenizer, and files that belong to none of them."""
    others = {name: rng.standard_normal(100).astype(F32) for name in "ab"}
    save(tmp_path / "model", NO_LAYERS, {}, others, max_shard_bytes=400)
    for name in (*OTHERS, "optimizer.pt", ".env", "model-00003-of-00003.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    (tmp_path / "model" / "tokenizer").mkdir()
    return tmp_path / "model"


def test_push_is_one_commit(folder, api, tmp_path):
    assert push(folder, "me/model", private=True, message="Tune") == "https://hub/me/model/commit/1"
    assert (api.repos, api.commits) == ({"me/model": True}, [("me/model", None, "Tune")])
    assert api.files.keys() == {"config.json", INDEX} | SHARDS | OTHERS
    assert all(api.files[name] == (folder / name).read_bytes() for name in api.files)
    again = tmp_path / "again"
    again.mkdir()
    for name, data in api.files.items():
        (again / name).write_bytes(data)
    for name in "ab":
        one, other = (np.asarray(Checkpoint(path).read(name)) for path in (folder, again))
        np.testing.assert_array_equal(one, other)


def test_push_replaces_a_checkpoint(folder, api):
    """Without the old index and its files: a reader finds the new tensors or those of the parent commit."""
    push(folder, "me/model")
    strangers = {"original/model.safetensors": b"1", ".gitattributes": b"2", "model.gguf": b"3"}
    strangers |= dict.fromkeys(
        ("model-lora.safetensors", "model_ema.safetensors", "model.lora.safetensors.index.json"), b"4"
    )
    api.files |= strangers
    save(folder, json.loads((folder / "config.json").read_text()), {}, {"c": np.ones(3, F32)}, overwrite=True)
    assert push(folder, "me/model", revision="v2").endswith("/2")
    assert api.files.keys() == {"config.json", "model.safetensors"} | OTHERS | strangers.keys()
    assert api.commits[1] == ("me/model", "v2", "Upload checkpoint")


def remove(name):
    return lambda folder: (folder / name).unlink()


def cut(folder):
    file = folder / min(SHARDS)
    file.write_bytes(file.read_bytes()[:-4])


MISTAKES = {
    "a missing folder": (shutil.rmtree, FileNotFoundError, r"push: cannot read .*config.json"),
    "no config": (remove("config.json"), FileNotFoundError, r"push: cannot read .*config.json"),
    "no index": (remove(INDEX), FileNotFoundError, r"push: .* has no tensors, expected either"),
    "a missing file": (remove(min(SHARDS)), FileNotFoundError, r"push: cannot read .*model-00001"),
    "a cut file": (cut, ValueError, r"push: .*model-00001.* is not a complete safetensors file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_push_of_no_checkpoint(mistake, folder, api):
    change, kind, text = MISTAKES[mistake]
    change(folder)
    with pytest.raises(kind, match=text):
        push(folder, "me/model")
    assert not api.repos and not api.commits


@pytest.mark.parametrize("repo_id", ["model", "me/model/more", "me/a model", "", None])
def test_push_to_no_repository(repo_id, folder, api):
    with pytest.raises(ValueError, match=r"push: repo_id=.* is not valid \(.*\), expected 'owner/name'; pass"):
        push(folder, repo_id)
    assert not api.repos


WRONG_OPTIONS = {
    "an empty message": ({"message": ""}, ValueError, "message='', expected a text"),
    "a message of spaces": ({"message": " "}, ValueError, "message=' ', expected a text"),
    "a message that is not Unicode": ({"message": "\udcff"}, ValueError, "message=.*, expected a text, in Unicode"),
    "no message": ({"message": None}, TypeError, "message is a NoneType, expected a string"),
    "message in bytes": ({"message": b"x"}, TypeError, "message is a bytes, expected a string"),
    "an empty revision": ({"revision": ""}, ValueError, "revision='', expected a text"),
    "a number as revision": ({"revision": 3}, TypeError, "revision is an int, expected a string"),
    "visibility in words": ({"private": "no"}, TypeError, "private.*, expected True or False"),
    "visibility as a number": ({"private": 0}, TypeError, "private.*, expected True or False"),
}


@pytest.mark.parametrize("mistake", WRONG_OPTIONS)
def test_push_with_a_wrong_option_creates_no_repository(mistake, folder, api):
    options, kind, text = WRONG_OPTIONS[mistake]
    with pytest.raises(kind, match=f"^push: {text}"):
        push(folder, "me/model", **options)
    assert not api.repos


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "config.json", INDEX, min(SHARDS)])
@pytest.mark.parametrize("where", ["outside", "in the folder", "outside by two links"])
def test_push_of_a_link_to_another_file(where, name, folder, api, tmp_path):
    """A downloaded checkpoint could link a file to a key or a password of the user who uploads it."""
    secret = folder / "optimizer.pt" if where == "in the folder" else tmp_path / "secret"
    secret.write_bytes((folder / name).read_bytes())
    if where == "outside by two links":
        (folder / "merges.txt").symlink_to(secret)
        secret = folder / "merges.txt"
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=r"^push: .* is a link to .*(secret|optimizer.pt), expected a file of the che"):
        push(folder, "me/model")
    assert not api.repos


def test_push_of_links_to_files_of_the_checkpoint(folder, api, tmp_path):
    """The cache of huggingface_hub has links to the files of a repository, and other folders some to their own."""
    snapshot = tmp_path / "models--me--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--me--model" / "blobs"
    blobs.mkdir()
    names = {"config.json", INDEX, *SHARDS, *OTHERS}
    for name in names:
        shutil.copy(folder / name, blobs / f"digest of {name}")
        (snapshot / name).symlink_to(f"../../blobs/digest of {name}")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    (tmp_path / "link").symlink_to(snapshot)
    push(tmp_path / "link", "me/model")
    assert api.files == {n: (folder / n).read_bytes() for n in names} | {"vocab.json": b"tokenizer.json"}


def test_push_in_a_process_that_uses_nothing_else_of_the_package(folder, tmp_path):
    """The package loads its modules when they are asked for; `huggingface_hub.utils` is none of its attributes."""
    code = f"from jax_ep.checkpoints import push; push({str(folder)!r}, 'me/model')"
    offline = {"HF_HOME": f"{tmp_path}", "HF_TOKEN": "", "HF_TOKEN_PATH": f"{tmp_path}/token", "HF_HUB_OFFLINE": "1"}
    done = harness.run_command(sys.executable, "-c", code, **offline)
    assert "PermissionError: push: huggingface_hub has no access token" in done.stderr


def test_push_without_a_token(folder, api, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(PermissionError, match=r"push: .* no access token, .*'me/model'; run `hf auth login`"):
        push(folder, "me/model")
    assert not api.repos


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        *(
            ({"repo_id": other}, TypeError, r"repo_id is an? \w+, expected a string such as 'owner/name'")
            for other in (None, 3, b"me/model")
        ),
        ({"repo_id": "model"}, ValueError, "repo_id='model' is not valid .*, expected 'owner/name'"),
        ({"repo_id": "me/a model"}, ValueError, "repo_id='me/a model' is not valid .*, expected 'owner/name'"),
        ({"revision": 3}, TypeError, "revision is an int, expected a string"),
        ({"revision": ""}, ValueError, "revision='', expected a text"),
        ({"folder": ""}, ValueError, "folder is '' .*, expected a path"),  # not the current folder
        ({"folder": "a\0b"}, ValueError, "folder is .*, expected a path"),
    ],
)
def test_download_with_a_wrong_argument(arguments, kind, text, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", None)
    with pytest.raises(kind, match=f"^download: {text}"):
        download(**{"repo_id": "me/model"} | arguments)


CALLS = {
    "Checkpoint": Checkpoint,
    "save": lambda folder: save(folder, {}, {}),
    "push": lambda folder: push(folder, "me/model"),
    "download": lambda folder: download("me/model", folder=folder),
}


@pytest.mark.parametrize("name", CALLS)
def test_folder_that_is_an_int(name):
    with pytest.raises(TypeError, match=f"^{name}: folder is an int, expected a str or a Path"):
        CALLS[name](3)
