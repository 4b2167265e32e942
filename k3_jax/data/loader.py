"""The order of documents, the rows of this process, and the position to resume from.

Order. Sources are mixed by weight (shares of documents, not of tokens) into one endless list, in
which each is shuffled as a whole, anew each time it repeats. A source with `lengths` is several
here, one for each length: what is drawn oftener repeats sooner. Row stream b of the global batch
reads documents b, b + batch, b + 2*batch, ... of the list, with `interleave` of them open at a
time: the stream's rows come from them in turn. So each document is read once for each time its
source repeats, by one row stream. Rows advance by tokens, so two rows may be in different repeats.

Processes. Row streams belong to the batch, not to a process: process p of n holds rows
[p*batch/n, (p+1)*batch/n). A state has one entry per row stream, hence any number of processes that
divides the batch can take it up, and every row goes on at its next token.

Stages. The list of a later stage begins, in each source, after all that any row of the stage before
it had begun to read: nothing comes again before its source repeats. What a slower row had not come
to by then, and the rest of documents that were open, is left out until then.
"""

import concurrent.futures
import itertools
import weakref

import grain
import numpy as np

from k3_jax import chat
from k3_jax.config import DataConfig
from k3_jax.data.mixture import Mixture
from k3_jax.data.pack import Row, RowStream, Turns
from k3_jax.data.source import Source, open_source
from k3_jax.data.split import Split
from k3_jax.tokenizer import Tokenizer

MAX_READERS = 16
HELDOUT_SEED = 0


class Loader:
    """Endless batches of this process's rows: {"tokens", "segments"}, each int32 [rows, seq_len].

    Segments count the documents of a row from 1; rows are full. Where a source has conversations,
    "mask" is 1 for each token to be learned, of other sources all, and rows may end in pads of
    segment 0. A thread builds up to `config.prefetch` batches ahead; `state()` never runs ahead of
    the last batch handed out. An error while reading (a bad record) is raised by `next`, and the
    position stays before the batch.

    starts: how many documents of each part to pass over, from `starts_after` of the stage before.
    opened: sources by name, which stages share; what is opened here is added.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        split: str = "train",
        process: int = 0,
        n_processes: int = 1,
        seed: int | None = None,
        starts: dict[str, int] | None = None,
        opened: dict[str, Source] | None = None,
    ):
        seed = config.seed if seed is None else seed
        rows = _own_rows(config, process, n_processes)
        sources = _open_sources(config, tokenizer, {} if opened is None else opened)
        self._config, self._starts = config, starts or {}
        self._documents = _mixture(sources, config, split, seed, self._starts)
        self._fingerprint = _fingerprint(config, tokenizer, split, seed, sources)
        if len(self._documents.names) > 1:
            self._fingerprint["parts"] = list(self._documents.names)
        if starts:
            self._fingerprint["starts"] = starts
        batches = _batches(sources, self._documents, rows, config.interleave, tokenizer, config)
        self._batches = _Prefetch(batches, config.prefetch)
        # Runs at interpreter exit too, before the modules that Grain's own clean-up needs are gone.
        self._finalizer = weakref.finalize(self, self._batches.close)

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._batches)

    def state(self) -> dict[str, dict]:
        """JSON-able; row number -> position after the last batch handed out.

        Merge the dicts of all processes (the keys are disjoint) before `restore`.
        """
        return {
            str(row): {"turn": turn, "streams": streams, "data": self._fingerprint}
            for row, (turn, streams) in self._batches.get_state().items()
        }

    def restore(self, states: dict[str, dict]):
        """Continues every row of this process where the merged `states` of all processes say.

        The number of processes may have changed. Raises ValueError if a row is missing or the
        states belong to another data configuration, and names what differs.
        """
        rows = list(self._batches.get_state())
        missing = [row for row in rows if str(row) not in states]
        if missing:
            raise ValueError(
                f"data state lacks rows {missing} of this process; it has rows "
                f"{sorted(map(int, states))}: merge the states of all processes that saved it"
            )
        for row in rows:
            saved, here = states[str(row)]["data"], self._fingerprint
            differing = [k for k in sorted({*saved, *here}) if saved.get(k) != here.get(k)]
            if differing:
                raise ValueError(
                    f"data state of row {row} belongs to other data: "
                    + "; ".join(f"{k} was {saved.get(k)!r}, is {here.get(k)!r}" for k in differing)
                )
        positions = {r: (states[str(r)]["turn"], states[str(r)]["streams"]) for r in rows}
        self._batches.set_state(positions)

    def reached(self) -> int:
        """How far into the list of documents any row of this process has read."""
        furthest = 0
        for row, (_, streams) in self._batches.get_state().items():
            for turn, (document, token) in enumerate(streams):
                if n_begun := document + (token > 0):
                    last = turn + len(streams) * (n_begun - 1)
                    furthest = max(furthest, row + self._config.batch * last + 1)
        return furthest

    def starts_after(self, n_documents: int) -> dict[str, int]:
        """Where the next stage begins in each part when this one had reached `n_documents`, the
        furthest of all processes. Parts that this stage did not read stay where they were."""
        passed = self._documents.passed(n_documents)
        return self._starts | {k: self._starts.get(k, 0) + n for k, n in passed.items()}

    def close(self):
        """Ends the thread. The loader is of no use afterwards."""
        self._finalizer()


class _Prefetch(grain.experimental.ThreadPrefetchDatasetIterator):
    """Grain's thread; its `close`, called once more when the object dies, trips over modules that
    are gone by then."""

    def close(self):
        if not self._closed:
            super().close()


class _Batches:
    """Stacks one row of each stream; all or none of the streams advance."""

    def __init__(self, streams: dict[int, Turns], names: tuple[str, ...]):
        """names: the fields of a `Row` that a batch has."""
        self._streams, self._names = streams, names
        # Reading waits for storage and BPE releases the interpreter lock, so readers work side by
        # side. Each has many rows, because a task for every row costs more than packing the row.
        n_readers = min(len(streams), MAX_READERS)
        all_streams = list(streams.values())
        cuts = [len(streams) * i // n_readers for i in range(n_readers + 1)]
        self._groups = [all_streams[a:b] for a, b in itertools.pairwise(cuts)]
        self._pool = concurrent.futures.ThreadPoolExecutor(n_readers, thread_name_prefix="rows")

    def __next__(self) -> dict[str, np.ndarray]:
        before = self.get_state()
        reads = [self._pool.submit(_next_rows, group) for group in self._groups]
        concurrent.futures.wait(reads)
        try:
            rows = [row for read in reads for row in read.result()]
        except BaseException as error:
            self.set_state(before)
            if isinstance(error, Exception):
                raise
            # A panic in a tokenizer's Rust code is no Exception: Grain's thread would die without
            # a word and the training loop would wait for ever.
            raise RuntimeError(f"building a batch failed: {error}") from error
        return {name: np.stack([getattr(row, name) for row in rows]) for name in self._names}

    def get_state(self) -> dict[int, tuple]:
        return {row: stream.position for row, stream in self._streams.items()}

    def set_state(self, state: dict[int, tuple]):
        for row, stream in self._streams.items():
            stream.position = state[row]


def _next_rows(group: list[Turns]) -> list[Row]:
    return [next(stream) for stream in group]


def heldout_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    process: int,
    n_processes: int,
    n_batches: int,
):
    """Exactly `n_batches` batches of this process's rows of held-out documents, for evaluation.

    The same every time and for every `config.seed`: all held-out documents of all sources
    (weights do not count) in one fixed shuffled order, each packed once, row stream b taking
    documents b, b + batch, ... When a row stream has no more documents its rows are all segment 0.
    The number of batches is given and not found, so that all processes take equally many steps.
    """
    rows = _own_rows(config, process, n_processes)
    sources = _open_sources(config, tokenizer, {})
    parts = [Split(source, config.holdout, "holdout") for source in sources]
    documents = grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in parts])
    documents = documents.shuffle(seed=HELDOUT_SEED)
    batches = _batches(sources, documents, rows, 1, tokenizer, config)
    return (next(batches) for _ in range(n_batches))


def _batches(sources, documents, rows: range, n_turns: int, tokenizer, config) -> _Batches:
    documents[0]  # Grain sets up its statistics on the first read, which must not be in threads

    def turns(row):
        numbers = range(row, len(documents), config.batch)
        parts = (numbers[i::n_turns] for i in range(n_turns))
        return Turns([RowStream(documents, part, tokenizer, config.seq_len) for part in parts])

    has_mask = any(source.has_mask for source in sources)
    names = Row._fields if has_mask else ("tokens", "segments")
    return _Batches({row: turns(row) for row in rows}, names)


def _own_rows(config: DataConfig, process: int, n_processes: int) -> range:
    if not 0 <= process < n_processes:
        raise ValueError(f"process {process} is not one of 0..{n_processes - 1}")
    if config.batch < 1 or config.batch % n_processes:
        raise ValueError(
            f"data.batch={config.batch} rows do not divide over {n_processes} processes"
        )
    n_rows = config.batch // n_processes
    return range(process * n_rows, (process + 1) * n_rows)


def _open_sources(
    config: DataConfig, tokenizer: Tokenizer, opened: dict[str, Source]
) -> list[Source]:
    if config.seq_len < 1 or config.prefetch < 0 or not 0 <= config.holdout < 1:
        raise ValueError(
            f"data needs seq_len >= 1, prefetch >= 0 and 0 <= holdout < 1, not "
            f"seq_len={config.seq_len}, prefetch={config.prefetch}, holdout={config.holdout}"
        )
    names = [source.name for source in config.sources]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"data.sources must be at least one, each with its own name, not {names}")
    for source in config.sources:
        if not source.weight > 0:
            raise ValueError(f"source {source.name!r}: weight {source.weight} is not above 0")
        if source.name not in opened:
            opened[source.name] = open_source(source)
    sources = [opened[source.name] for source in config.sources]
    if any(source.has_mask for source in sources):
        chat.check_tokenizer(tokenizer)
    return sources


def _mixture(sources, config: DataConfig, split: str, seed: int, starts: dict) -> Mixture:
    """The endless list of documents of the module's docstring."""
    if split not in ("train", "holdout"):
        raise ValueError(f'split {split!r} is neither "train" nor "holdout"')
    parts = {}
    for c, source in zip(config.sources, sources, strict=True):
        for least, documents, share in Split(source, config.holdout, split).by_length(c.lengths):
            name = f"{c.name} from {least} bytes" if least else c.name
            parts[name] = documents, c.weight * share
    return Mixture(parts, seed, starts)


def _fingerprint(config, tokenizer, split, seed, sources) -> dict:
    """All that decides which token comes at which position."""
    flat = {
        "seed": seed,
        "split": split,
        "batch": config.batch,
        "seq_len": config.seq_len,
        "interleave": config.interleave,
        "holdout": config.holdout,
        "tokenizer": tokenizer.name,
        "n_sources": len(sources),
    }
    for i, (c, source) in enumerate(zip(config.sources, sources, strict=True)):
        own = {"name": c.name, "weight": c.weight, **source.fingerprint()}
        if c.lengths:
            own["lengths"] = [[x.min_bytes, x.times] for x in c.lengths]
        for key, value in own.items():
            flat[f"sources[{i}].{key}"] = value
    return flat
