"""Work beside training, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Starts `work` at once. A process that ends doesn't wait for it: what was half done is mended at the next start.

    Args:
        work: touches no process group that the main thread uses meanwhile.
        name: the thread's, as stack dumps show it.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, at most so many seconds, whatever came of it."""
        self._thread.join(seconds)

    def result(self) -> None:
        """Wait for the end. Raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
