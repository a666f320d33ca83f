"""Writes golden_logits.npz: what Transformers computes for the tiny checkpoints of examples/hf/make_tiny_checkpoint.py.

    pip install torch 'transformers>=5.23' safetensors
    python tests/data/make_golden_logits.py

test_serve_hf_moe.py compares the example with it. Run it again after a change of the tiny checkpoints.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "examples" / "hf"))
import make_tiny_checkpoint

SEEDS = {"qwen3_moe": 1, "mixtral": 5, "gpt_oss": 4}  # which meet what `check` asks for
LENGTHS = (3, 9, 17, 31)  # of the prompts: within the sliding windows, and beyond
NEW = 24
MARGIN = 1e-3  # least difference of the two likeliest tokens, relative to the largest logit: rounding must not decide
DISTINCT = 6  # least number of different tokens in a text


def golden(family):
    """Prompts, their logits at every position, and their greedy continuations."""
    seed = SEEDS[family]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint.make(family, Path(folder), seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    rng = np.random.default_rng(seed)
    found = {}
    for index, length in enumerate(LENGTHS):
        prompt = rng.integers(0, make_tiny_checkpoint.READABLE, length)
        text = torch.tensor(prompt)[None]
        with torch.no_grad():
            for _ in range(NEW):  # without a cache: each token from all before it
                logits = model(text, use_cache=False).logits[0]
                text = torch.cat([text, logits[-1:].argmax(-1, keepdim=True)], dim=1)
        logits, new = logits.numpy(), text[0, length:].numpy()
        check(family, logits[length - 1 :], new)
        found |= {f"{family}/prompt{index}": prompt.astype(np.int32), f"{family}/new{index}": new.astype(np.int32)}
        found[f"{family}/logits{index}"] = logits[:length]
    digest = hashlib.sha256(b"".join(make_tiny_checkpoint.weights(family, seed).values())).hexdigest()
    return found | {f"{family}/seed": np.array(seed), f"{family}/digest": np.array(digest)}


def check(family, logits, new):
    """The greedy tokens are well separated and varied."""
    best = np.sort(logits, axis=-1)
    margin = float(((best[:, -1] - best[:, -2]) / np.abs(logits).max()).min())
    distinct = len(set(new.tolist()))
    print(f"{family}: least margin {margin:.1e}, {distinct} different tokens of {len(new)}")
    if margin < MARGIN or distinct < DISTINCT:
        raise SystemExit(f"expected margins of {MARGIN} and {DISTINCT} different tokens: change the seed or the scales")


def main():
    """All families, in one file."""
    found = {}
    for family in make_tiny_checkpoint.CONFIGS:
        found |= golden(family)
    np.savez_compressed(HERE / "golden_logits.npz", **found)


if __name__ == "__main__":
    main()
