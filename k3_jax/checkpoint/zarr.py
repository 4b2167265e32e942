"""Arrays in the zarr3 format, written file by file and front to back, for Orbax to read.

Orbax and TensorStore write arrays that are whole in memory. A converter holds a small piece at a
time, so it writes the files itself: an array is cut into shards, one file each, and a shard into
equal chunks that lie in the file uncompressed in the order in which they were made, with an index
of their places at the end ("sharding_indexed" of the zarr3 specification). A reader gets at one
chunk without touching the rest of the file. What Orbax wants beside the arrays are four small JSON
files; they say that there is no OCDBT database.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from etils import epath

from k3_jax.checkpoint.manifest import is_local
from k3_jax.checkpoint.safetensors import Buffer, FormatError, blocks

HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
EMPTY = np.uint64(2**64 - 1)  # the place of a chunk that was not written
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]


class Array(NamedTuple):
    """One array: `path` by dots, as Orbax names it; `shard` and `chunk` are shapes of its rank.

    Shards divide the array and chunks divide a shard.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]


class Shard:
    """One file of an array, open for writing. It gets its name when all chunks are in it."""

    def __init__(self, state: epath.Path, array: Array, cell: tuple[int, ...]):
        """`cell`: which shard, counted in shards along each axis."""
        self.path = state / array.path / "c" / "/".join(map(str, cell))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._array = array
        grid = [n // c for n, c in zip(array.shard, array.chunk, strict=True)]
        self._places = np.full((*grid, 2), EMPTY, "<u8")
        self._at = 0
        # An object appears under its name when it is whole; a file has to be renamed.
        has_draft = is_local(self.path)
        self._draft = self.path.parent / f"{self.path.name}.draft" if has_draft else self.path
        self._file = self._draft.open("wb")
        if has_draft:
            n_bytes = math.prod(array.shard) * array.dtype.itemsize
            reserve(self._file, n_bytes + self._places.nbytes)

    def write(self, at: tuple[int, ...], chunk: np.ndarray) -> None:
        """Adds the chunk at `at`, counted in chunks from the shard's start, in C order."""
        if chunk.dtype != self._array.dtype or chunk.size != np.prod(self._array.chunk):
            raise AssertionError(f"{chunk.dtype} {chunk.shape} is no chunk of {self._array}")
        if self._places[at][0] != EMPTY:
            raise AssertionError(f"chunk {at} of {self.path} is written twice")
        # As integers: numpy moves those faster than bfloat16, and memoryview knows them.
        plain = np.ascontiguousarray(chunk.view(f"u{chunk.itemsize}"))
        for block in blocks(plain):
            self._file.write(block)
        self._places[at] = self._at, chunk.nbytes
        self._at += chunk.nbytes

    def close(self) -> None:
        """Adds the index and gives the file its name."""
        if np.any(self._places == EMPTY):
            raise AssertionError(f"{self.path}: not every chunk was written")
        self._file.write(self._places.tobytes())
        self._file.close()
        if self._draft != self.path:
            self._draft.replace(self.path)

    def discard(self) -> None:
        """Closes without giving the file its name."""
        # The disk that was full when writing is full when flushing.
        with contextlib.suppress(OSError):
            self._file.close()


class PlainFiles:
    """An array in the files that `Shard` makes: a chunk's bytes are read as they are, without what
    TensorStore does to find and copy them."""

    def __init__(self, folder: epath.Path, dtype: np.dtype, shape, shard, chunk):
        self._folder, self._dtype = os.fspath(folder), dtype
        self._shape, self._shard, self._chunk = shape, shard, chunk
        self._places: dict[tuple, np.ndarray] = {}

    @classmethod
    def open(cls, folder: epath.Path) -> "PlainFiles | None":
        """The array in a folder, where its files are local and hold chunks as they are."""
        if not is_local(folder) or not (folder / "zarr.json").exists():
            return None
        told = json.loads((folder / "zarr.json").read_text())
        (codec, *others), shard = told["codecs"], told["chunk_grid"]["configuration"]["chunk_shape"]
        inner = codec.get("configuration", {})
        is_plain = codec["name"] == "sharding_indexed" and not others
        is_plain = is_plain and inner["codecs"] == inner["index_codecs"] == CODECS
        if not is_plain or inner["index_location"] != "end":
            return None
        dtype = np.dtype(told["data_type"])
        return cls(folder / "c", dtype, tuple(told["shape"]), shard, inner["chunk_shape"])

    def inside_a_chunk(self, index: tuple, buffer: Buffer) -> Callable[[], np.ndarray] | None:
        """How to read a slice that one chunk holds in one piece: numbers, then a range, then all.

        None for any other slice. The bytes go to the buffer.
        """
        if [isinstance(i, slice) for i in index] != [False] * (len(index) - 1) + [True]:
            return None
        *lead, cut = index
        n, rest = len(lead), tuple(self._shape[len(index) :])
        size, behind = self._chunk[n], len(index)
        is_whole = tuple(self._chunk[behind:]) == tuple(self._shard[behind:]) == rest
        if set(self._chunk[:n]) - {1} or not is_whole or cut.stop > (cut.start // size + 1) * size:
            return None
        at = (*lead, cut.start)
        cell = tuple(i // s for i, s in zip(at, self._shard, strict=False)) + (0,) * len(rest)
        pairs = zip(at, self._shard, self._chunk, strict=False)
        inner = tuple(i % s // c for i, s, c in pairs) + (0,) * len(rest)
        row = math.prod(rest) * self._dtype.itemsize

        def read():
            path = f"{self._folder}/{'/'.join(map(str, cell))}"
            with open(path, "rb", buffering=0) as file:
                if cell not in self._places:
                    self._places[cell] = self._index(file)
                start = int(self._places[cell][inner][0]) + cut.start % size * row
                data = buffer.take((cut.stop - cut.start) * row)
                file.seek(start)
                if file.readinto(data) != data.nbytes:
                    raise FormatError(f"{path} is cut short: {data.nbytes} bytes at {start}")
            return data.view(self._dtype).reshape(-1, *rest)

        return read

    def _index(self, file) -> np.ndarray:
        """Start and length of each chunk of a file."""
        grid = [s // c for s, c in zip(self._shard, self._chunk, strict=True)]
        n_bytes = math.prod(grid) * 16
        file.seek(-n_bytes, os.SEEK_END)
        return np.frombuffer(file.read(n_bytes), "<u8").reshape(*grid, 2)


def reserve(file, n_bytes: int) -> None:
    """Makes a new local file as long as it will be: a full disk is told at once, and the kernel
    need not find room for every piece."""
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as e:
        # Some file systems cannot; the writes will tell.
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            file.close()
            raise


def write_tree(step: epath.Path, name: str, arrays: list[Array]) -> None:
    """What makes the arrays below `step/name` a tree of Orbax: their descriptions, and its own."""
    tree = {}
    for array in arrays:
        folder = step / name / array.path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zarr.json").write_text(json.dumps(_describe(array)))
        keys = array.path.split(".")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": array.shape,
            },
        }
    layout = dict(use_ocdbt=False, use_zarr3=True, store_array_data_equal_to_fill_value=True)
    content = {"tree_metadata": tree, **layout, "custom_metadata": None}
    replace_text(step / name / "_METADATA", json.dumps(content))
    # No times: an interrupted conversion ends in the same bytes as one that was not.
    content = {"item_handlers": {name: HANDLER}, "metrics": {}, "performance_metrics": {}}
    content |= dict(init_timestamp_nsecs=None, commit_timestamp_nsecs=None, custom_metadata={})
    replace_text(step / "_CHECKPOINT_METADATA", json.dumps(content))
    replace_text(step / "orbax.checkpoint", "")
    replace_text(step / "commit_success.txt", "Converted, and complete.")


def replace_text(path: epath.Path, text: str) -> None:
    """Writes a small file that is never seen half written."""
    draft = path.parent / f"{path.name}.draft"
    draft.write_text(text)
    draft.replace(path)


def described(state: epath.Path, path: str) -> Array | None:
    """The array that `write_tree` told of, None where there is no such file."""
    file = state / path / "zarr.json"
    if not file.exists():
        return None
    told = json.loads(file.read_text())
    (codec,) = told["codecs"]
    shard = told["chunk_grid"]["configuration"]["chunk_shape"]
    chunk = codec["configuration"]["chunk_shape"]
    return Array(path, np.dtype(told["data_type"]), *map(tuple, (told["shape"], shard, chunk)))


def _describe(array: Array) -> dict:
    sharding = {
        "chunk_shape": array.chunk,
        "codecs": CODECS,
        "index_codecs": CODECS,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": str(array.dtype),
        "fill_value": 0,
        "attributes": {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.shard}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
