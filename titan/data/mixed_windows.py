"""Windows of several sources: the rows of a logical stream of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from titan.data.mixture import Schedule
from titan.data.packing import State, Window, WindowStream
from titan.data.token_windows import TokenWindows


class MixedStream:
    """See `WindowStream`. Its windows are the same rows of every step, from `first` on.

    Of token files all streams count the windows of the whole batch, and each reads those of its rows; of text each
    stream has a part of its own.

    Args:
        schedule: shared by all streams of the process.
        streams: of each source, in order.
    """

    def __init__(self, schedule: Schedule, streams: Sequence[WindowStream], first: int) -> None:
        sources = schedule.mixture.sources
        self._names = [source.name for source in sources]
        self._streams: list[WindowStream] = []
        self._has: dict[int, Callable[[int], bool]] = {}
        for number, (source, stream) in enumerate(zip(sources, streams, strict=True)):
            if not source.text.infinite:
                ending = stream if isinstance(stream, TokenWindows) else ReadAhead(stream)
                self._has[number] = ending.has
                stream = ending
            self._streams.append(stream)
        self._schedule = schedule
        self._first = first
        self._step = 0

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """See `WindowStream`. `count` is this stream's rows of a step."""
        self._step += 1
        tells = self._first == 0 and wanted.start == 0  # other streams, and processes, find the same
        if (rows := self._schedule.rows(self._step, self._has, tells=tells)) is None:
            return None
        start = self._first + wanted.start
        ours = rows[start : start + len(wanted)]
        windows = []
        for number, stream in enumerate(self._streams):
            whole = isinstance(stream, TokenWindows)
            first, last = (0, len(rows)) if whole else (self._first, self._first + count)
            before, total = rows[first:start].count(number), rows[first:last].count(number)
            taken = stream.take(total, range(before, before + ours.count(number))) if total else []
            if taken is None:
                return None
            windows.append(iter(taken))
        return [next(windows[number]) for number in ours]

    def state_dict(self) -> State:
        """The position of every source, by name, and of the schedule."""
        positions = {name: stream.state_dict() for name, stream in zip(self._names, self._streams, strict=True)}
        return {"schedule": self._schedule.state_dict(), "sources": positions}

    def load_state_dict(self, state: State) -> None:
        """Go to a position of the same sources."""
        self._step = state["schedule"]["step"]
        self._schedule.load_state_dict(state["schedule"])
        for name, stream in zip(self._names, self._streams, strict=True):
            stream.load_state_dict(state["sources"][name])


class ReadAhead:
    """A stream of text that ends, of which only reading tells how many windows are left."""

    def __init__(self, stream: WindowStream) -> None:
        self._stream = stream
        self._read: list[Window] = []

    def has(self, count: int) -> bool:
        """Whether so many windows are left. They are read, and have to be taken before the position is."""
        while len(self._read) < count:
            if (window := self._stream.take(1, range(1))) is None:
                return False
            self._read += window
        return True

    def take(self, count: int, wanted: range) -> list[Window] | None:
        """See `WindowStream`."""
        if not self.has(count):
            return None
        taken, self._read = self._read[:count], self._read[count:]
        return taken[wanted.start : wanted.stop]

    def state_dict(self) -> State:
        """See `WindowStream`."""
        assert not self._read
        return self._stream.state_dict()

    def load_state_dict(self, state: State) -> None:
        """See `WindowStream`."""
        self._read = []
        self._stream.load_state_dict(state)
