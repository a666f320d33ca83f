"""Transfers of checkpoints from and to the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jax_ep.checkpoints import files, transaction
from jax_ep.checkpoints.files import CONFIG, INDEX, SINGLE
from jax_ep.core import check
from jax_ep.values import shown

_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json")
_OF_A_CHECKPOINT = (SINGLE, INDEX, "model-?????-of-?????.safetensors")  # Others, such as adapters, are not replaced.
_TEXTS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*")
_OTHERS = (*_TEXTS, "merges.txt", "chat_template*", "*.tiktoken", "tiktoken.model")


def download(repo_id: str, *, revision: str | None = None, folder: str | os.PathLike[str] | None = None) -> Path:
    """Download config, tokenizer and safetensors files of a model from the Hugging Face hub.

    Args:
      repo_id: owner and name.
      revision: branch, tag or commit; None uses the main branch.
      folder: destination; None uses the cache of huggingface_hub.

    Returns:
      The folder, for `Checkpoint`, which reads tensors `[...]` from it.

    Raises:
      ImportError: huggingface_hub is not installed.
      TypeError: `repo_id` or `revision` is not a string, or `folder` no path.
      ValueError: one of them is not valid.

    Example:
      >>> from jax_ep.checkpoints import Checkpoint, download
      >>> checkpoint = Checkpoint(download("allenai/OLMoE-1B-7B-0924"))  # doctest: +SKIP
      >>> checkpoint.config["model_type"]  # doctest: +SKIP
      'olmoe'

    Source: https://huggingface.co/docs/huggingface_hub/guides/download.
    """
    function = "download"
    hub = files.optional(function, "huggingface_hub")
    check.instance(function, "repo_id", repo_id, str, "a string such as 'owner/name'")
    _check_repo(function, repo_id)
    if revision is not None:
        _check_text(function, "revision", revision)
    if folder is not None:
        folder = files.folder_path(function, folder)
    # Subfolders hold the same weights in other formats.
    patterns = {"allow_patterns": [CONFIG, *_WEIGHTS, *_OTHERS], "ignore_patterns": ["*/*"]}
    return Path(hub.snapshot_download(repo_id, revision=revision, local_dir=folder, **patterns))


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    message: str = "Upload checkpoint",
) -> str:
    """Upload a checkpoint folder to the Hugging Face hub, as one commit.

    The commit has `config.json`, the tensors' files `[...]`, and of other files in the folder the generation config,
    the tokenizer and `README.md`. It removes the tensors' files of a previous checkpoint, known by the names that
    `save` uses, so a reader finds the old checkpoint or the new one. All local checks, which read the files, come
    before anything is sent.

    Args:
      folder: a checkpoint, as `save` writes it.
      repo_id: owner and name; a repository that does not exist is created.
      revision: an existing branch; None uses the main branch.
      private: visibility of a created repository; None uses the default of its owner.
      message: first line of the commit's message.

    Returns:
      The URL of the commit.

    Raises:
      FileNotFoundError: the folder, its config, its tensors or a file of the index does not exist.
      ValueError: a file is broken, or links to one that is not of the checkpoint, or `repo_id`, `revision` or `message`
        is not valid.
      TypeError: `revision`, `private` or `message` has a wrong type.
      PermissionError: huggingface_hub has no access token.
      ImportError: huggingface_hub is not installed.
      huggingface_hub.errors.HfHubHTTPError: the hub rejects the token, the revision or the commit, for example because
        of another commit at the same time.

    Example:
      >>> from jax_ep.checkpoints import push
      >>> push("my_checkpoint", "me/my-model", private=True)  # doctest: +SKIP
      'https://huggingface.co/me/my-model/commit/...'

    Source: https://huggingface.co/docs/huggingface_hub/guides/upload.
    """
    function = "push"
    hub = files.optional(function, "huggingface_hub")
    stored = transaction.open_complete(function, folder)
    _check_repo(function, repo_id)
    _check_text(function, "message", message)
    if revision is not None:
        _check_text(function, "revision", revision)
    if private is not None:
        private = check.flag(function, "private", private)
    if hub.get_token() is None:
        raise PermissionError(
            f"{function}: huggingface_hub has no access token, expected one that may write to {repo_id!r}; run `hf auth"
            " login`, or set the environment variable HF_TOKEN."
        )
    names = _names_to_upload(function, stored)
    operations: list[Any] = [hub.CommitOperationAdd(name, str(stored.folder / name)) for name in sorted(names)]
    api = hub.HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    old = api.repo_info(repo_id, revision=revision)
    previous = _matching((file.rfilename for file in old.siblings or ()), _OF_A_CHECKPOINT)
    operations += [hub.CommitOperationDelete(name) for name in previous if name not in names]
    options = {"commit_message": message, "revision": revision, "parent_commit": old.sha}
    return api.create_commit(repo_id, operations, **options).commit_url


def _names_to_upload(function: str, stored: files.TensorFiles) -> set[str]:
    """Return the names of the files of a commit. Symbolic links among them lead to others, not to anything else."""
    there = sorted(path.name for path in stored.folder.iterdir() if path.is_file())
    names = {CONFIG, *stored.shards, *({INDEX} & set(there)), *_matching(there, (*_OTHERS, "README.md"))}
    folder = stored.folder.resolve()
    cache = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else None  # That of huggingface_hub.
    for name in sorted(names):
        path = (folder / name).resolve()
        if path not in {folder / name for name in names} and path.parent != cache:
            raise ValueError(
                f"{function}: {stored.folder / name} is a link to {path}, expected a file of the checkpoint, since"
                " others may be private; replace the link with a copy of the file."
            )
    return names


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names without a folder that match a pattern."""
    return [name for name in names if "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)]


def _check_text(function: str, name: str, text: Any) -> None:
    """Check a text of a commit, which the hub's client checks when the repository exists, or not at all."""
    check.instance(function, name, text, str, "a string")
    if not text.strip() or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{function}: {name}={shown(text)}, expected a text, in Unicode; pass one.")


def _check_repo(function: str, repo_id: Any) -> None:
    """Check the name of a repository."""
    utils = files.optional(function, "huggingface_hub.utils")  # no attribute of the package before its import
    try:
        utils.validate_repo_id(repo_id)
        if "/" not in str(repo_id):
            raise ValueError("there is no owner")
    except ValueError as error:
        raise ValueError(
            f"{function}: repo_id={shown(repo_id)} is not valid ({error}), expected 'owner/name'; pass the name of a"
            " repository on the hub."
        ) from None
