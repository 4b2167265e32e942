"""Parts of a source: training or held out, and by the length of its documents."""

import numpy as np

from k3_jax.config import LengthConfig
from k3_jax.data.source import Document, Source


class Split:
    """The documents of `source` whose hash puts them into `part` ("train" or "holdout").

    A document is held out when its hash lies in the lowest `holdout` (0..1) of the hash range.
    """

    def __init__(self, source: Source, holdout: float, part: str):
        is_held_D = source.hashes() < np.uint64(int(holdout * 2**63) * 2)
        self._source = source
        self._index = np.flatnonzero(is_held_D if part == "holdout" else ~is_held_D)
        if not len(self._index):
            raise ValueError(
                f"source {source.config.name!r}: none of its {len(source)} documents fall into "
                f"{part!r} with holdout={holdout}; change holdout or add documents"
            )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Document:
        return self._source[self._index[index]]

    def by_length(self, lengths: tuple[LengthConfig, ...]) -> list[tuple[int, "Split", float]]:
        """(least bytes, its documents, how often they are drawn) of each length that has some.

        The shares add to 1 and are as the number of documents times `LengthConfig.times`.
        """
        if not lengths:
            return [(0, self, 1.0)]
        table = {0: 1.0} | {x.min_bytes: x.times for x in lengths}
        least = sorted(table)
        place_D = np.searchsorted(least, self._source.length_D[self._index], side="right") - 1
        drawn = np.array([table[n] for n in least]) * np.bincount(place_D, minlength=len(least))
        return [
            (n, self._only(place_D == i), float(drawn[i] / drawn.sum()))
            for i, n in enumerate(least)
            if drawn[i]
        ]

    def _only(self, is_in_D: np.ndarray) -> "Split":
        """Those of its documents."""
        part = object.__new__(Split)
        part._source, part._index = self._source, self._index[is_in_D]
        return part
