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
from typing import NamedTuple

import numpy as np
from etils import epath

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
        is_local = "://" not in os.fspath(self.path)
        self._draft = self.path.parent / f"{self.path.name}.draft" if is_local else self.path
        self._file = self._draft.open("wb")
        if is_local:
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
        self._file.write(plain.reshape(-1).view(np.uint8))
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
        replace_text(folder / "zarr.json", json.dumps(_describe(array)))
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
