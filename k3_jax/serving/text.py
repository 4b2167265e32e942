"""A row's ids as text while they come, cut before the first stop string."""

from collections.abc import Callable


class GrowingText:
    """`text` grows by what can no longer become part of a stop string; `show` is told of it."""

    def __init__(self, stream, stops: tuple[str, ...], show: Callable[[str], None] | None = None):
        self.text = ""
        self._stream, self._stops, self._show = stream, stops, show
        self._held = ""
        self._is_stopped = False

    def push(self, token: int) -> bool:
        """Whether a stop string is now complete."""
        self._take(self._stream.push(token))
        return self._is_stopped

    def flush(self) -> str:
        """The whole text, after the last token."""
        self._take(self._stream.flush())
        self._release(len(self._held))
        return self.text

    def _take(self, new: str) -> None:
        if self._is_stopped:
            return
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._release(min(found))
            self._held, self._is_stopped = "", True
        else:
            self._release(len(self._held) - self._n_undecided())

    def _n_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) - 1 for s in self._stops), default=0)
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stops):
                return n
        return 0

    def _release(self, n: int) -> None:
        sure, self._held = self._held[:n], self._held[n:]
        self.text += sure
        if sure and self._show is not None:
            self._show(sure)
