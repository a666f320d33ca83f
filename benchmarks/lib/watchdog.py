"""An end for runs that hang: what hangs on a device cannot be taken back from it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ends_the_run(timeout_s: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Unless the block ends in time, calls `give_up`, which completes the report, and ends the process."""

    def end() -> None:
        give_up()
        os._exit(0)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
