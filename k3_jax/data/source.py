"""Where documents come from: files and records, counted once and then read in any order.

A document's number follows the name of its file below the glob's first wildcard, then its place in
that file. Nothing here depends on where the folder lies, so a moved data set keeps its order and
its split.
"""

import abc
import collections
import functools
import hashlib
import json
import threading

import grain
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from absl import logging

from k3_jax import chat
from k3_jax.config import SourceConfig
from k3_jax.data.files import File, files_below, files_matching, stdlib_files

# A larger text file is cut into documents of at most this many bytes, at line ends.
PART_BYTES = 1 << 20
SCAN_BYTES = 1 << 24
PARQUET_GROUPS_KEPT = 2


# A text, or a conversation with the parts that are learned.
Document = str | tuple[chat.Part, ...]


class Source(abc.ABC):
    """Random access to the documents of one `SourceConfig`; `has_mask`: not all is learned."""

    has_mask = False

    def __init__(self, config: SourceConfig, files: list[File]):
        self.config = config
        kept = [(file, count) for file in files if (count := self._open(file))]
        if not kept:
            raise ValueError(f"source {config.name!r}: no documents in {len(files)} files")
        self.files = [file for file, _ in kept]
        self.count_F = np.array([count for _, count in kept], np.int64)
        self.first_F = np.cumsum(self.count_F) - self.count_F

    @abc.abstractmethod
    def _open(self, file: File) -> int:
        """Indexes a file; returns its number of documents. Called in the order of `files`."""

    @abc.abstractmethod
    def _read(self, file: File, record: int) -> Document:
        """Document `record` of `file`."""

    @abc.abstractmethod
    def _lengths(self, file: File) -> np.ndarray:
        """Bytes of each document of `file`, as it lies there."""

    def __len__(self) -> int:
        return int(self.count_F.sum())

    @functools.cached_property
    def length_D(self) -> np.ndarray:
        """Bytes of each document; Parquet and ArrayRecord files are read for it, once."""
        return np.concatenate([self._lengths(file) for file in self.files])

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"source {self.config.name!r} has {len(self)} documents, no {index}")
        f = int(np.searchsorted(self.first_F, index, side="right")) - 1
        return self._read(self.files[f], int(index - self.first_F[f]))

    def hashes(self) -> np.ndarray:
        """A uint64 for each document, from its file's name (blake2b) and its place in the file."""
        names = (hashlib.blake2b(f.name.encode(), digest_size=8).digest() for f in self.files)
        seed_F = np.frombuffer(b"".join(names), "<u8")
        record_D = np.arange(len(self)) - np.repeat(self.first_F, self.count_F)
        return splitmix64(np.repeat(seed_F, self.count_F) + splitmix64(record_D.astype(np.uint64)))

    def fingerprint(self) -> dict:
        """What must be equal for two runs to see the same documents under the same numbers."""
        digest = hashlib.blake2b(digest_size=8)
        for file, count in zip(self.files, self.count_F, strict=True):
            digest.update(f"{file.name}\0{file.n_bytes}\0{count}\0".encode())
        c = self.config
        return {
            "format": c.format,
            "field": c.field,
            "documents": len(self),
            "files": digest.hexdigest(),
        }

    def _fail(self, file: File, what: str):
        raise ValueError(f"source {self.config.name!r}: {file.path}{what}")

    def _decode(self, content: bytes, file: File, where: str) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start)
            return self._fail(file, f"{where}, {line} lines on, is not UTF-8: {error.reason}")


class TextSource(Source):
    """One document a file; files above PART_BYTES are cut at line ends."""

    def __init__(self, config: SourceConfig, files: list[File], skip_binary: bool = False):
        self._skip_binary = skip_binary
        self._n_skipped = 0
        self._edges: dict[str, np.ndarray] = {}
        super().__init__(config, files)
        if self._n_skipped:
            logging.info(
                "source %r: skipped %d of %d files that are not UTF-8 text",
                config.name,
                self._n_skipped,
                len(files),
            )

    def _open(self, file: File) -> int:
        if self._skip_binary and not _is_text(file):
            self._n_skipped += 1
            return 0
        self._edges[file.name] = _part_edges(file)
        return len(self._edges[file.name]) - 1

    def _lengths(self, file: File) -> np.ndarray:
        return np.diff(self._edges[file.name])

    def _read(self, file: File, record: int) -> str:
        start, stop = map(int, self._edges[file.name][record : record + 2])
        return self._decode(_read_span(file, start, stop), file, f" from byte {start}")


class JsonLinesSource(Source):
    """One JSON object a line, the document in one field; blank lines are passed over."""

    def __init__(self, config: SourceConfig, files: list[File]):
        self._starts: dict[str, np.ndarray] = {}
        super().__init__(config, files)

    def _open(self, file: File) -> int:
        self._starts[file.name] = _line_starts(file)
        count = len(self._starts[file.name])
        if count:
            self._read(file, 0)  # a wrong field name shows before long work starts
        return count

    def _lengths(self, file: File) -> np.ndarray:
        return np.diff(self._starts[file.name], append=file.n_bytes)

    def _read(self, file: File, record: int) -> Document:
        with file.path.open("rb") as f:
            return self._read_from(f, file, record)

    def _read_from(self, f, file: File, record: int) -> Document:
        start = int(self._starts[file.name][record])
        f.seek(start)
        line = self._decode(f.readline(), file, f" from byte {start}")
        try:
            return self._document(json.loads(line))
        except json.JSONDecodeError as error:
            why = f"not JSON: {error}"
        except ValueError as error:
            why = str(error)
        return self._fail(file, f" line {_line_number(file, start)}: {why}")

    def _document(self, row) -> Document:
        field = self.config.field
        try:
            text = row[field]
        except (KeyError, TypeError):
            raise ValueError(f"no field {field!r}") from None
        if not isinstance(text, str):
            raise ValueError(f"field {field!r} is {type(text).__name__}, not a string")
        return text


class ChatSource(JsonLinesSource):
    """One conversation a line, a JSON object as `chat.conversation` takes it. Every line is looked
    at when the source is opened: mending a bad one in the middle of a run would change the data."""

    has_mask = True

    def _open(self, file: File) -> int:
        count = super()._open(file)
        with file.path.open("rb") as f:
            for record in range(count):
                self._read_from(f, file, record)
        return count

    def _document(self, row) -> Document:
        return chat.conversation(row)


class ParquetSource(Source):
    """One document a row. A read decodes a whole row group, so keep groups small (about 16 MiB)
    or convert a large set to ArrayRecord."""

    def __init__(self, config: SourceConfig, files: list[File]):
        self._first_rows: dict[str, np.ndarray] = {}
        self._groups: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        super().__init__(config, files)

    def _open(self, file: File) -> int:
        with file.path.open("rb") as f:
            try:
                table = pq.ParquetFile(f)
            except pa.ArrowInvalid as error:
                return self._fail(file, f" is not a Parquet file: {error}")
            field, names = self.config.field, table.schema_arrow.names
            if field not in names:
                return self._fail(file, f": no field {field!r}, only {', '.join(names)}")
            kind = table.schema_arrow.field(field).type
            if str(kind) not in ("string", "large_string", "string_view"):
                return self._fail(file, f": field {field!r} is {kind}, not string")
            meta = table.metadata
            rows = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        self._first_rows[file.name] = np.cumsum([0, *rows])
        return meta.num_rows

    def _lengths(self, file: File) -> np.ndarray:
        groups = range(len(self._first_rows[file.name]) - 1)
        sizes = [pc.binary_length(self._column(file, group)) for group in groups]
        return np.concatenate([pc.fill_null(size, 0).to_numpy() for size in sizes])

    def _read(self, file: File, record: int) -> str:
        first_G = self._first_rows[file.name]
        group = int(np.searchsorted(first_G, record, side="right")) - 1
        text = self._column(file, group)[record - int(first_G[group])].as_py()
        if text is None:
            return self._fail(file, f" row {record}: field {self.config.field!r} is null")
        return text

    def _column(self, file: File, group: int):
        with self._lock:
            key = (file.name, group)
            if key not in self._groups:
                with file.path.open("rb") as f:
                    table = pq.ParquetFile(f).read_row_group(group, columns=[self.config.field])
                self._groups[key] = table.column(0)
                if len(self._groups) > PARQUET_GROUPS_KEPT:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(key)
            return self._groups[key]


class ArrayRecordSource(Source):
    """One UTF-8 document a record."""

    def __init__(self, config: SourceConfig, files: list[File]):
        self._readers: dict[str, grain.sources.ArrayRecordDataSource] = {}
        super().__init__(config, files)

    def _open(self, file: File) -> int:
        try:
            self._readers[file.name] = grain.sources.ArrayRecordDataSource(str(file.path))
        except (RuntimeError, ValueError) as error:
            return self._fail(file, f" is not an ArrayRecord file: {error}")
        return len(self._readers[file.name])

    def _lengths(self, file: File) -> np.ndarray:
        return np.array([len(record) for record in self._readers[file.name]])

    def _read(self, file: File, record: int) -> str:
        return self._decode(self._readers[file.name][record], file, f" record {record}")


def open_source(config: SourceConfig) -> Source:
    """Lists and indexes the files of a source. Raises ValueError or FileNotFoundError."""
    if config.format == "stdlib":
        return TextSource(config, stdlib_files(), skip_binary=True)
    if config.format == "files":
        return TextSource(config, files_below(config), skip_binary=True)
    kinds = {
        "text": TextSource,
        "jsonl": JsonLinesSource,
        "chat": ChatSource,
        "parquet": ParquetSource,
        "array_record": ArrayRecordSource,
    }
    if config.format not in kinds:
        raise ValueError(
            f"source {config.name!r}: format {config.format!r} is not one of "
            f"stdlib, files, {', '.join(kinds)}"
        )
    return kinds[config.format](config, files_matching(config))


def _is_text(file: File) -> bool:
    content = file.path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _read_span(file: File, start: int, stop: int) -> bytes:
    with file.path.open("rb") as f:
        f.seek(start)
        return f.read(stop - start)


def _part_edges(file: File) -> np.ndarray:
    """Byte offsets between the parts of a text file; [0, size] for a small one, [0] if empty."""
    edges = [0]
    while file.n_bytes - edges[-1] > PART_BYTES:
        part = _read_span(file, edges[-1], edges[-1] + PART_BYTES + 1)
        cut = part.rfind(b"\n", 0, PART_BYTES) + 1
        if not cut:
            # A line longer than a part is cut, but not inside a character (10xxxxxx continues one).
            cut = PART_BYTES
            while cut > PART_BYTES - 4 and part[cut] & 0xC0 == 0x80:
                cut -= 1
        edges.append(edges[-1] + cut)
    return np.array(edges + [file.n_bytes] * (file.n_bytes > 0), np.int64)


def _line_starts(file: File) -> np.ndarray:
    """Byte offsets of the lines of a file that are not blank."""
    ends, at = [], 0
    with file.path.open("rb") as f:
        while block := f.read(SCAN_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 0x0A) + at)
            at += len(block)
    end_N = np.concatenate([*ends, [at]]).astype(np.int64)
    start_N = np.concatenate([[0], end_N[:-1] + 1])
    # Only a line of at most two characters can be blank ("" or "\r") without being malformed.
    keep_N = end_N > start_N
    for n in np.flatnonzero(keep_N & (end_N - start_N <= 2)):
        keep_N[n] = bool(_read_span(file, int(start_N[n]), int(end_N[n])).strip())
    return start_N[keep_N]


def _line_number(file: File, start: int) -> int:
    """The line (from 1) that begins at byte `start`; only for messages."""
    line = 1
    with file.path.open("rb") as f:
        while block := f.read(min(SCAN_BYTES, start - f.tell())):
            line += block.count(b"\n")
    return line


def splitmix64(x_D: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of uint64 that spreads neighbouring values."""
    x_D = x_D + np.uint64(0x9E3779B97F4A7C15)
    x_D = (x_D ^ (x_D >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_D = (x_D ^ (x_D >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_D ^ (x_D >> np.uint64(31))
