"""Synchronization of all processes of a program through the key-value store of `jax.distributed`.

Allocating memory that every process sees hangs if one process does not take part. Before such a step, all processes
meet: each publishes what it is about to do, and continues only when all have arrived with the same request.

All-to-alls in traced programs are compared without waiting: each process publishes what it traces, and a process that
comes later detects a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax

_REMEDY = (
    " Every process must call init() and finalize(), and trace the same programs in the same order;"
    " init(heap_bytes=...) in each of them allocates once, up front."
)
_FAILED = "failed: "

# Per process, like the store: a restarted context must not find the keys of the previous one.
_serials = itertools.count()
_comparisons = itertools.count()


class Meetings:
    """Barriers of all processes, which every process reaches in the same order.

    A process waits `timeout_s` for the others. After it misses one meeting, all later ones fail at once, because the
    processes are out of step.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._broken: str | None = None

    def meet(self, function: str, purpose: str, *, same: str = "", payload: str = "") -> list[str]:
        """Wait until every process has reached this meeting.

        Args:
          function: the public function to name in errors.
          purpose: description of the joint step.
          same: further text that must agree in all processes. If it has several parts, separated by "; ", errors show
            those that differ.
          payload: text that this process sends to the others.

        Returns:
          The payloads of all processes, in process order.

        Raises:
          jax.errors.JaxRuntimeError: a process is late, or requests something else; the message says which.
        """
        client, num_processes, me = _client(function), jax.process_count(), jax.process_index()
        together = f"{function}: {purpose} takes all {num_processes} processes together, but"
        if self._broken is not None:
            raise jax.errors.JaxRuntimeError(f"{together} they are no longer in step: {self._broken}.{_REMEDY}")
        serial = next(_serials)
        folder = f"jax_ep/meetings/{serial}"
        request = f"{function}: {purpose}" + (f", {same}" if same else "")
        try:
            client.key_value_set(f"{folder}/{me}", f"{request}\n{payload}")
            client.wait_at_barrier(f"jax_ep/meetings/{serial}", max(1, int(1000 * self._timeout_s)))
            texts = _read_all(client, folder)
            # Every process at this meeting has finished reading the previous one.
            client.key_value_delete(f"jax_ep/meetings/{serial - 1}/{me}")
        except jax.errors.JaxRuntimeError as error:
            self._broken = self._reason(client, folder, num_processes)
            raise jax.errors.JaxRuntimeError(f"{together} {self._broken}.{_REMEDY}") from error
        answers = [texts[process].split("\n", 1) for process in range(num_processes)]
        if len({wanted for wanted, _ in answers}) > 1:
            requests = _by_process({process: wanted for process, (wanted, _) in enumerate(answers)})
            raise jax.errors.JaxRuntimeError(f"{together} they want different things: {requests}.{_REMEDY}")
        return [answer for _, answer in answers]

    def attempt(
        self, function: str, purpose: str, step: Callable[[], str], undo: Callable[[], None] | None = None
    ) -> list[str]:
        """Run a step that may fail in one process, then meet; if it failed in any process, all undo it and raise.

        Args:
          function: see `meet`.
          purpose: see `meet`.
          step: returns the payload that this process sends to the others.
          undo: undoes the step in all processes together, including those where it failed.

        Returns:
          What `step` returned in every process, in process order.

        Raises:
          jax.errors.JaxRuntimeError: the step failed in a process; the message has the first one and its reason.
        """
        cause: Exception | None = None
        try:
            payload = step()
        except Exception as error:  # Report any failure to the other processes.
            cause, payload = error, f"{_FAILED}{type(error).__name__}: {error}"
        answers = self.meet(function, purpose, payload=payload)
        failed = next((process for process, text in enumerate(answers) if text.startswith(_FAILED)), None)
        if failed is None:
            return answers
        if undo is not None:
            undo()
        reason = answers[failed].removeprefix(_FAILED)
        raise jax.errors.JaxRuntimeError(f"{function}: {purpose}: process {failed}: {reason}") from cause

    def _reason(self, client: Any, folder: str, num_processes: int) -> str:
        """Describe why a meeting failed."""
        try:
            arrived = _read_all(client, folder)
        except jax.errors.JaxRuntimeError:
            return "the coordinator of jax.distributed, in process 0, does not answer"
        missing = [process for process in range(num_processes) if process not in arrived]
        if missing:
            return f"processes {missing} have not arrived within {self._timeout_s:g} s"
        return f"some arrived after the others had given up, after {self._timeout_s:g} s"


class Comparison:
    """Checks that all processes trace the same all-to-alls in the same order with the same sizes.

    All processes create the comparison together with their context, one at a time.
    """

    def __init__(self) -> None:
        self._folder = f"jax_ep/exchanges/{next(_comparisons)}"
        self._count = itertools.count(1)

    def compare(self, function: str, sizes: str) -> None:
        """Publish what this process traces, and compare it with what other processes have published; does not wait.

        Raises:
          jax.errors.JaxRuntimeError: another process has traced something else.
        """
        client, me, number = _client(function), jax.process_index(), next(self._count)
        folder = f"{self._folder}/{number}"
        client.key_value_set(f"{folder}/{me}", f"{function}, {sizes}")
        texts = _read_all(client, folder)
        if len(set(texts.values())) > 1:
            raise jax.errors.JaxRuntimeError(
                f"{function}: the processes run different programs: as all-to-all number {number} since init() on its"
                f" mesh, {_by_process(texts)}. All must trace the same programs in the same order, with the same sizes"
                " on every rank: pad the tokens of a smaller batch with expert id -1."
            )


def configured_processes() -> int:
    """Return the number of processes passed to `jax.distributed.initialize`, which may exceed the actual number."""
    from jax._src import distributed  # JAX has no public name for it

    return int(distributed.global_state.num_processes)


def _by_process(texts: dict[int, str]) -> str:
    """Describe each process's text, with equal texts merged and common parts after the first omitted."""
    processes: dict[str, list[int]] = {}
    for process, text in sorted(texts.items()):
        processes.setdefault(text, []).append(process)
    common = set.intersection(*(set(text.split("; ")[1:]) for text in processes))
    parts = []
    for text, group in processes.items():
        name = f"process {group[0]}" if len(group) == 1 else f"processes {group}"
        parts.append(f"{name}: {', '.join(part for part in text.split('; ') if part not in common)}")
    return "; ".join(parts)


def _client(function: str) -> Any:
    from jax._src import distributed  # JAX has no public name for its key-value store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"{function}: {jax.process_count()} processes without a coordinator; call jax.distributed.initialize()"
            " in each of them before anything else of JAX."
        )
    return client


def _read_all(client: Any, folder: str) -> dict[int, str]:
    """Read the text of each process that has arrived at a meeting."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(f"{folder}/")}
