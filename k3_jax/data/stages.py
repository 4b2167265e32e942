"""The rows of a run of stages: a loader for each, one after the other."""

from collections.abc import Sequence

import numpy as np

from k3_jax.config import Stage
from k3_jax.data.loader import Loader
from k3_jax.data.source import Source
from k3_jax.tokenizer import Tokenizer
from sharding.hosts import furthest


class StagedLoader:
    """Rows of the stage that is asked for; every process asks for the same ones in order.

    A stage's loader follows from its configuration, the seed, and how far the stage before it read
    in each source. The latter is part of `state()`, so a run may be taken up at any step.
    """

    def __init__(self, stages: Sequence[Stage], tokenizer: Tokenizer, process=0, n_processes=1):
        """Opens all sources of all stages. Raises what is wrong with any of them."""
        self._stages, self._tokenizer = tuple(stages), tokenizer
        self._share = process, n_processes
        self._opened: dict[str, Source] = {}
        for stage in self._stages:
            self._loader_of(stage, {}, (0, 1)).close()
        self._at, self._loader = 0, None

    def rows(self, stage: Stage) -> dict[str, np.ndarray]:
        """The next batch of this process's rows in `stage`: the one at hand, or a later one."""
        if self._loader is None:
            self._enter(0, {})
        while self._stages[self._at] != stage:
            reached = furthest(self._loader.reached())
            self._enter(self._at + 1, self._loader.starts_after(reached))
        return next(self._loader)

    def state(self) -> dict[str, dict]:
        """As `Loader.state`."""
        return self._loader.state()

    def restore(self, step: int, states: dict[str, dict]) -> None:
        """As `Loader.restore`, for the merged states that were saved after `step` of the run."""
        at = sum(stage.last < step for stage in self._stages[:-1])
        starts = next(iter(states.values()))["data"].get("starts", {})
        if step == self._stages[at].last and at + 1 < len(self._stages):
            # All its rows, whichever this process had: the next stage begins after the furthest.
            ended = self._loader_of(self._stages[at], starts, (0, 1))
            ended.restore(states)
            self._enter(at + 1, ended.starts_after(ended.reached()))
            ended.close()
        else:
            self._enter(at, starts)
            self._loader.restore(states)

    def close(self) -> None:
        """Ends the thread. The loader is of no use afterwards."""
        if self._loader is not None:
            self._loader.close()

    def _enter(self, at: int, starts: dict[str, int]) -> None:
        self.close()
        self._at, self._loader = at, self._loader_of(self._stages[at], starts, self._share)

    def _loader_of(self, stage: Stage, starts: dict, share: tuple[int, int]) -> Loader:
        how = dict(process=share[0], n_processes=share[1], starts=starts, opened=self._opened)
        try:
            return Loader(stage.config.data, self._tokenizer, **how)
        except (ValueError, OSError) as e:
            if not stage.name:
                raise
            raise ValueError(f"stages.{stage.name}: {e}") from None
