"""Prefill and decode of Qwen3-MoE or gpt-oss in transformers, with random bfloat16 weights: the baseline of serve.py.

It runs in a separate process, and needs PyTorch and transformers, but not JAX. The argument is a JSON object:
`config` of the model, `cases` of serve.py, `steps` per sample, `rounds`, and `quick` to run without a GPU. It
prints a JSON object per measured or failed row, at once, so that a kill loses only what is missing.

Decode steps have a static cache and run eagerly, and on a GPU also as a CUDA graph of the eager step. Experts are
"grouped_mm", and for one token also "batched_mm", which reads a copy of the weights of each assignment. Attention is
"sdpa", and "eager" for gpt-oss, whose sinks "sdpa" lacks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

WARMUP = 2
EAGER_STEPS = 4  # per sample; eager steps are slow
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
Step = Callable[[torch.Tensor], torch.Tensor]


def wait() -> None:
    """Wait for the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()


class Decoding:
    """Decode steps of one batch over a static cache, whose last position is written by the last step of a sample."""

    def __init__(self, model: Any, batch: int, length: int, steps: int) -> None:
        config = model.config
        self.model, self.first, self.steps = model, length - steps, steps
        self.cache = StaticCache(config=config, max_cache_len=length)
        sizes = {"batch_size": batch, "num_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        self.cache.early_initialization(**sizes, dtype=torch.bfloat16, device=DEVICE)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.token = torch.randint(config.vocab_size, (batch, 1), device=DEVICE)
        self.rewind()

    def rewind(self) -> None:
        """Go back to the first position of a sample."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.first)
            if layer.is_sliding:
                layer.cumulative_length_int = self.first

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Decode one token of each text, and return the most likely next ones."""
        logits = self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def touched(self) -> float:
        """Return the mean number of distinct experts per layer that a step chooses."""
        chosen: list[int] = []
        name = "router" if self.model.config.model_type == "gpt_oss" else "gate"
        gates = [getattr(layer.mlp, name) for layer in self.model.model.layers]
        hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(len(out[2].unique()))) for gate in gates]
        self.step(self.token)
        for hook in hooks:
            hook.remove()
        self.rewind()
        return sum(chosen) / len(chosen)

    def samples(self, step: Step, rounds: int, steps: int) -> list[float]:
        """Return the seconds per step of each sample; all steps start without a wait."""
        found = []
        for _ in range(WARMUP + rounds):
            self.rewind()
            wait()
            began, token = time.perf_counter(), self.token
            for _ in range(steps):
                token = step(token)
            wait()
            found.append((time.perf_counter() - began) / steps)
        return found[WARMUP:]

    def as_graph(self) -> Step:
        """Return the step as a CUDA graph, whose input and output are one tensor."""
        token = self.token.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(token)
        torch.cuda.current_stream().wait_stream(stream)
        self.rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(self.step(token))

        def replay(_: torch.Tensor) -> torch.Tensor:
            graph.replay()
            return token

        return replay


def measure_prefill(model: Any, case: dict[str, Any], rounds: int) -> list[float]:
    """Return the seconds of each prefill."""
    tokens = torch.randint(model.config.vocab_size, (case["batch"], case["length"]), device=DEVICE)
    found = []
    for _ in range(WARMUP + rounds):
        wait()
        began = time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1)
        wait()
        found.append(time.perf_counter() - began)
    return found[WARMUP:]


def attempt(variant: str, case: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
    """Print a row, or the error that it ends in."""
    try:
        found = run()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps({"variant": f"transformers, {variant}", "case": case, **found}), flush=True)


def measure_decode(model: Any, case: dict[str, Any], steps: int, rounds: int, *, graph: bool) -> None:
    """Measure the steps, eager or as a graph, with each implementation of the experts that suits the batch."""
    for experts in ("grouped_mm", "batched_mm") if case["batch"] == 1 else ("grouped_mm",):

        def run(experts: str = experts) -> dict[str, Any]:
            model.set_experts_implementation(experts)
            decoding = Decoding(model, case["batch"], case["length"], steps)
            touched = decoding.touched()
            step = decoding.as_graph() if graph else decoding.step
            samples = decoding.samples(step, rounds, steps if graph else min(EAGER_STEPS, steps))
            return {"samples": samples, "touched_experts": touched}

        attempt(f"{'CUDA graph' if graph else 'eager'}, {experts}", case, run)


def main(arguments: Sequence[str]) -> None:
    """Measure everything; graphs, whose capture may fail, come last."""
    settings = json.loads(arguments[0])
    if not (ON_GPU or settings["quick"]):
        sys.exit("PyTorch sees no GPU")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    with torch.device(DEVICE):
        config = AutoConfig.for_model(**settings["config"], tie_word_embeddings=False)
        attention = "eager" if config.model_type == "gpt_oss" else "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    model.set_experts_implementation("grouped_mm")
    rounds, steps = settings["rounds"], settings["steps"]
    for graph in (False, True) if ON_GPU else (False,):
        for case in settings["cases"]:
            if case["phase"] == "decode":
                measure_decode(model, case, steps, rounds, graph=graph)
            elif not graph:
                attempt("eager, grouped_mm", case, lambda case=case: {"samples": measure_prefill(model, case, rounds)})


if __name__ == "__main__":
    main(sys.argv[1:])
