"""One endless list of documents out of several."""

import functools
import hashlib
import sys

import grain
import numpy as np

from k3_jax.data.source import Document, splitmix64
from k3_jax.data.split import Split

WINDOW = 4096


class Mixture:
    """Documents of several parts by weight; each part is shuffled as a whole, anew each time it
    repeats, and read in that order.

    Which part comes next is shuffled within windows of WINDOW documents: a plain mixture is
    periodic, and rows that read every n-th document of it would meet one part each. As parts are
    read in order, the first n documents of the list are the first few of every part (`passed`).
    """

    def __init__(self, parts: dict[str, tuple[Split, float]], seed: int, starts: dict[str, int]):
        """starts: documents of each part to pass over, repeats counted; none by default."""
        self.names = tuple(parts)
        self._seed = seed
        self._lists = [
            grain.MapDataset.source(documents).shuffle(seed=_seed(seed, name)).repeat()
            for name, (documents, _) in parts.items()
        ]
        self._starts = [starts.get(name, 0) for name in parts]
        ratios = [float(weight).as_integer_ratio() for _, weight in parts.values()]
        unit = max(below for _, below in ratios)  # they are powers of 2
        self._weights = [above * (unit // below) for above, below in ratios]
        self._window = functools.lru_cache(8)(self._make_window)
        for documents in self._lists:
            documents[0]  # Grain sets up its statistics on the first read, not to be in threads

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, n: int) -> Document:
        part_W, index_W = self._window(n // WINDOW)
        part = part_W[n % WINDOW]
        return self._lists[part][self._starts[part] + int(index_W[n % WINDOW])]

    def passed(self, n: int) -> dict[str, int]:
        """How many documents of each part are among the first `n`."""
        counts = self._counts(n // WINDOW * WINDOW)
        counts += np.bincount(self._window(n // WINDOW)[0][: n % WINDOW], minlength=len(counts))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _counts(self, n: int) -> np.ndarray:
        """The same before shuffling: by weight, to less than one document."""
        counts, left = [], sum(self._weights)
        for weight in self._weights:
            others = n * (left - weight) // left
            counts.append(n - others)
            n, left = others, left - weight
        return np.array(counts)

    def _make_window(self, w: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each document of window `w`, and its index in that part."""
        first, last = self._counts(w * WINDOW), self._counts((w + 1) * WINDOW)
        part_W = np.repeat(np.arange(len(first)), last - first)
        key = splitmix64(np.array([_seed(self._seed, f"/{w}")], np.uint64))
        part_W = part_W[np.argsort(splitmix64(key + np.arange(WINDOW, dtype=np.uint64)))]
        index_W = np.empty(WINDOW, np.int64)
        for part, start in enumerate(first):
            places = np.flatnonzero(part_W == part)
            index_W[places] = start + np.arange(len(places))
        return part_W, index_W


def _seed(seed: int, name: str) -> int:
    """31 bits that differ between parts, and between neighbouring seeds: Grain adds the number
    of the repeat to a seed, so that seed 0 in its repeat 1 would be seed 1 in its repeat 0."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
