"""Steps that all processes of a program take together, through the key-value store of `jax.distributed`.

Allocating memory that every process sees hangs where one of them does not take part. So before such a step all
processes meet: each says what it is about to do, and goes on only when all have come and want the same.

Exchanges of programs are compared without a meeting: each process says what it traces, and whoever comes later sees
that it differs.
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
_comparisons = itertools.count()


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
          same: further words in which all processes must agree; of several parts, with "; " between them, an error has
            those that differ.
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
            wishes = _by_process({process: theirs for process, (theirs, _) in enumerate(answers)})
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


class Comparison:
    """What all processes trace, one exchange after another: in the same order with the same sizes, or it says so.

    Processes with a context make it together, and no more than one at a time.
    """

    def __init__(self) -> None:
        self._folder = f"jax_ep/exchanges/{next(_comparisons)}"
        self._count = itertools.count(1)

    def compare(self, function: str, sizes: str) -> None:
        """Says what this process traces, and looks at what others that have come as far said; waits for nobody.

        Raises:
          jax.errors.JaxRuntimeError: another process has traced something else.
        """
        client, me, number = _client(function), jax.process_index(), next(self._count)
        folder = f"{self._folder}/{number}"
        client.key_value_set(f"{folder}/{me}", f"{function}, {sizes}")
        told = _told(client, folder)
        if len(set(told.values())) > 1:
            raise jax.errors.JaxRuntimeError(
                f"{function}: the processes run different programs: as exchange number {number} since init() on its"
                f" mesh, {_by_process(told)}. All must trace the same programs in the same order, with the same sizes"
                " on every rank: pad the tokens of a smaller batch with expert id -1."
            )


def processes_asked_for() -> int:
    """How many processes `jax.distributed.initialize` was told of here, which may be more than there are."""
    from jax._src import distributed  # JAX has no public name for it

    return int(distributed.global_state.num_processes)


def _by_process(words: dict[int, str]) -> str:
    """What each process says: those that say the same once, and of the parts behind the first those that differ."""
    processes: dict[str, list[int]] = {}
    for process, text in sorted(words.items()):
        processes.setdefault(text, []).append(process)
    common = set.intersection(*(set(text.split("; ")[1:]) for text in processes))
    said = []
    for text, who in processes.items():
        name = f"process {who[0]}" if len(who) == 1 else f"processes {who}"
        said.append(f"{name}: {', '.join(part for part in text.split('; ') if part not in common)}")
    return "; ".join(said)


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
