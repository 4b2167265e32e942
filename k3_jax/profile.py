"""Profiler traces of a few steps, for xprof."""

import jax
from etils import epath

from k3_jax.config import TrainConfig


class Profiler:
    """Writes traces below `workdir`/profile: of the configured steps, and of the next ones once
    there is a file `workdir`/profile.request, which is removed then.

    A file and not a signal: it wants no process id and no shell on the host, and a signal that
    comes before its handler is there would end the run. Process 0 alone follows a request; the
    configured steps are traced by every process.
    """

    def __init__(self, workdir, config: TrainConfig, say):
        self._folder = epath.Path(workdir) / "profile"
        self._request = epath.Path(workdir) / "profile.request"
        self._first, self._n, self._say = config.profile_at, config.profile_steps, say
        self._last = None  # step of the trace under way

    def __call__(self, step: int, step_fn, *args, **how):
        """step_fn(*args, **how), in a trace when its turn has come."""
        if self._last is None and (step == self._first or self._is_asked()):
            jax.profiler.start_trace(str(self._folder / f"step_{step}"))
            self._last = step + self._n - 1
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            out = step_fn(*args, **how)
        if step == self._last:
            jax.block_until_ready(out)
            self.close()
            told = f"steps {step - self._n + 1} to {step} are traced"
            self._say(f"{told}: xprof --logdir {self._folder}")
        return out

    def close(self) -> None:
        """Ends the trace under way, which is written."""
        if self._last is not None:
            self._last = None
            jax.profiler.stop_trace()

    def _is_asked(self) -> bool:
        if jax.process_index() or not self._request.exists():
            return False
        self._request.unlink()
        return True
