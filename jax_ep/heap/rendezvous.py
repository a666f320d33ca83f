"""Steps that all processes of a program take together, through the key-value store of `jax.distributed`.

Allocating memory that every process sees hangs where one of them does not take part. So before such a step all
processes meet: each says what it is about to do, and goes on only when all have come and want the same.
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

# Of the whole process, as the store is: a context that starts again must not find the keys of the one before.
_serials = itertools.count()


class Meetings:
    """Meetings of all processes, each of them at the same place in its own order of meetings.

    Once a process has missed one, all later ones fail at once: the processes are no longer in step.

    Args:
      timeout_s: how long a process waits for the others.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._broken: str | None = None

    def meet(self, function: str, purpose: str, *, same: str = "", words: str = "") -> list[str]:
        """Waits until every process has come to this meeting.

        Args:
          function: the public function that asks for it, for messages.
          purpose: what the processes are about to do together, in words.
          same: further words in which all processes must agree.
          words: what this process tells the others.

        Returns:
          The `words` of every process, in their order.

        Raises:
          jax.errors.JaxRuntimeError: a process has not come in time, or wants something else; the message says which.
        """
        client, num_processes, me = _client(function), jax.process_count(), jax.process_index()
        together = f"{function}: {purpose} takes all {num_processes} processes together, but"
        if self._broken is not None:
            raise jax.errors.JaxRuntimeError(f"{together} they are no longer in step: {self._broken}.{_REMEDY}")
        serial = next(_serials)
        folder = f"jax_ep/meetings/{serial}"
        wish = f"{function}: {purpose}" + (f", {same}" if same else "")
        try:
            client.key_value_set(f"{folder}/{me}", f"{wish}\n{words}")
            client.wait_at_barrier(f"jax_ep/meetings/{serial}", max(1, int(1000 * self._timeout_s)))
            told = _told(client, folder)
            # Who has come to this meeting has read everything of the one before.
            client.key_value_delete(f"jax_ep/meetings/{serial - 1}/{me}")
        except jax.errors.JaxRuntimeError as error:
            self._broken = self._absence(client, folder, num_processes)
            raise jax.errors.JaxRuntimeError(f"{together} {self._broken}.{_REMEDY}") from error
        answers = [told[process].split("\n", 1) for process in range(num_processes)]
        if len({theirs for theirs, _ in answers}) > 1:
            wishes = "; ".join(f"process {process}: {theirs}" for process, (theirs, _) in enumerate(answers))
            raise jax.errors.JaxRuntimeError(f"{together} they want different things: {wishes}.{_REMEDY}")
        return [said for _, said in answers]

    def attempt(
        self, function: str, purpose: str, step: Callable[[], str], undo: Callable[[], None] | None = None
    ) -> list[str]:
        """Takes a step that may fail in one process alone, then meets: where it failed in one, all undo it and raise.

        Args:
          function: as for `meet`.
          purpose: as for `meet`.
          step: returns what this process tells the others.
          undo: takes the step back, in all processes together; in one where it failed too.

        Returns:
          What `step` has returned in every process, in their order.

        Raises:
          jax.errors.JaxRuntimeError: the step failed somewhere; the message has the first process and its reason.
        """
        cause: Exception | None = None
        try:
            words = step()
        except Exception as error:  # whatever it is, the others must hear of it
            cause, words = error, f"{_FAILED}{type(error).__name__}: {error}"
        said = self.meet(function, purpose, words=words)
        failed = next((process for process, text in enumerate(said) if text.startswith(_FAILED)), None)
        if failed is None:
            return said
        if undo is not None:
            undo()
        reason = said[failed].removeprefix(_FAILED)
        raise jax.errors.JaxRuntimeError(f"{function}: {purpose}: process {failed}: {reason}") from cause

    def _absence(self, client: Any, folder: str, num_processes: int) -> str:
        """Why a meeting has failed, in words."""
        try:
            came = _told(client, folder)
        except jax.errors.JaxRuntimeError:
            return "the coordinator of jax.distributed, in process 0, does not answer"
        missing = [process for process in range(num_processes) if process not in came]
        if missing:
            return f"processes {missing} have not come to it within {self._timeout_s:g} s"
        return f"some came after the others had given up, which they do after {self._timeout_s:g} s"


def _client(function: str) -> Any:
    from jax._src import distributed  # JAX has no public name for its key-value store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"{function}: {jax.process_count()} processes without a coordinator; call jax.distributed.initialize()"
            " in each of them before anything else of JAX."
        )
    return client


def _told(client: Any, folder: str) -> dict[int, str]:
    """What each process that has come to a meeting says."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(f"{folder}/")}
