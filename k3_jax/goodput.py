"""Where the seconds of a run go, over all the times that it was started."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

# productive: steps. data: the device waits for a batch. restart: starting, restoring, and steps
# that had been done before. evaluation: the held-out loss and health.
KINDS = ("productive", "compile", "checkpoint", "data", "evaluation", "restart")
COMPILING = "/jax/core/compile/"  # events of tracing, lowering and compiling


class Spans:
    """The length of what spans of time cover. They come as they end; one may be within the next."""

    def __init__(self):
        self._ended, self._total = [], 0.0

    def add(self, start: float, end: float) -> None:
        while self._ended and self._ended[-1][0] >= start:
            start_within, end_within = self._ended.pop()
            self._total -= end_within - start_within
        self._ended.append((start, end))
        self._total += end - start

    def seconds(self) -> float:
        return self._total


# Of this process: a program that is traced while another one is, is part of it.
_compiling = Spans()
jax.monitoring.register_event_time_span_listener(
    lambda event, start, end, **_: event.startswith(COMPILING) and _compiling.add(start, end)
)


class Clock:
    """Counts every second as one of KINDS; it starts as "restart".

        with clock("checkpoint"): ...

    Outside of such a block seconds are productive once `go_on` was called. Compiling is found
    wherever it happens. A wait for data counts as far as the device has nothing to do meanwhile.
    """

    def __init__(self, now=time.monotonic, compiled=_compiling.seconds):
        self._now, self._compiled = now, compiled
        self._spent = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = "restart", (now(), compiled())
        self._device = ThreadPoolExecutor(1, thread_name_prefix="clock")
        self._idle_since = None

    def go_on(self, told: list[dict], start: int) -> None:
        """What earlier starts spent, by the lines that they told; seconds are productive from here.

        The productive seconds after step `start`, whose steps are made again, become "restart".
        What was spent after the last line is not known.
        """
        self._switch("productive")
        told = [x for x in told if "seconds_productive" in x]
        if not told:
            return
        for kind in KINDS:
            self._spent[kind] += told[-1][f"seconds_{kind}"]
        steps = [0, *(x["step"] for x in told)]
        productive = [0.0, *(x["seconds_productive"] for x in told)]
        lost = productive[-1] - float(np.interp(start, steps, productive))
        self._spent["productive"] -= lost
        self._spent["restart"] += lost

    @contextlib.contextmanager
    def __call__(self, kind: str):
        """Seconds within are of this kind."""
        before, started = self._kind, self._now()
        self._switch(kind)
        try:
            yield
        finally:
            self._switch(before)
            if kind == "data":
                self._give_back(started)

    def device_has(self, values) -> None:
        """The device works until these arrays are there."""

        def wait() -> float:
            jax.block_until_ready(values)
            return self._now()

        self._idle_since = self._device.submit(wait)

    def seconds(self) -> dict[str, float]:
        """{"seconds_productive": ..., ...} of all starts together, and `goodput`, the productive
        part of all."""
        self._switch(self._kind)
        total = sum(self._spent.values())
        told = {f"seconds_{kind}": spent for kind, spent in self._spent.items()}
        return told | {"goodput": self._spent["productive"] / total if total else 0.0}

    def close(self) -> None:
        self._device.shutdown()

    def _switch(self, kind: str) -> None:
        seconds, compiled = self._now(), self._compiled()
        compiling = compiled - self._since[1]
        self._spent["compile"] += compiling
        self._spent[self._kind] += seconds - self._since[0] - compiling
        self._kind, self._since = kind, (seconds, compiled)

    def _give_back(self, started: float) -> None:
        """The part of a wait for data in which the device was at work is productive."""
        if self._idle_since is None:
            return
        ended = self._since[0]
        idle_since = self._idle_since.result() if self._idle_since.done() else ended
        busy = min(max(idle_since, started), ended) - started
        self._spent["data"] -= busy
        self._spent["productive"] += busy
