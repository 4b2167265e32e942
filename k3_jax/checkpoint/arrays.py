"""The arrays of a stored step, read a slice at a time, without Orbax, a mesh or a device.

Reads what Store.save writes (arrays in an OCDBT database) and what a conversion writes (a folder
per array). Orbax restores whole trees onto meshes; this is for those who pass over a checkpoint.
"""

import ast
import json
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from k3_jax.checkpoint.safetensors import FormatError
from k3_jax.checkpoint.zarr import CODECS

# Decoded chunks of a database that are kept: slices of one chunk are read one after another.
CACHE_BYTES = 512 << 20


class ArrayInfo(NamedTuple):
    """What a listing tells."""

    dtype: np.dtype
    shape: tuple[int, ...]


class PlainFiles:
    """An array in files of uncompressed chunks, as `zarr` writes them: a chunk's bytes are read as
    they are, without what TensorStore does to find and copy them."""

    def __init__(self, folder: epath.Path, dtype: np.dtype, shape, shard, chunk):
        self._folder, self._dtype = os.fspath(folder), dtype
        self._shape, self._shard, self._chunk = shape, shard, chunk
        self._places: dict[tuple, np.ndarray] = {}

    def inside_a_chunk(self, index: tuple) -> Callable[[], np.ndarray] | None:
        """How to read a slice that one chunk holds in one piece: numbers, then a range, then all.

        None for any other slice.
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
                out = np.empty((cut.stop - cut.start, *rest), self._dtype)
                file.seek(start)
                if file.readinto(out.reshape(-1).view(np.uint8)) != out.nbytes:
                    raise FormatError(f"{path} is cut short: {out.nbytes} bytes at {start}")
            return out

        return read

    def _index(self, file) -> np.ndarray:
        """Start and length of each chunk of a file."""
        grid = [s // c for s, c in zip(self._shard, self._chunk, strict=True)]
        n_bytes = math.prod(grid) * 16
        file.seek(-n_bytes, os.SEEK_END)
        return np.frombuffer(file.read(n_bytes), "<u8").reshape(*grid, 2)


class StoredArrays:
    """The tree below `state` of a step; names are paths by slashes."""

    def __init__(self, state: epath.Path):
        file = state / "_METADATA"
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing: {state} holds no tree of Orbax")
        try:
            told = json.loads(file.read_text())
            self._paths = [ast.literal_eval(path) for path in told["tree_metadata"]]
        except (ValueError, KeyError, SyntaxError) as e:
            raise FormatError(f"{file} is damaged: {e}") from None
        self._state = state
        self._driver = "zarr3" if told.get("use_zarr3") else "zarr"
        self._is_database = told.get("use_ocdbt", True)
        limit = CACHE_BYTES if self._is_database else 0
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": limit}})
        self._open: dict[str, ts.TensorStore] = {}
        self._files: dict[str, PlainFiles | None] = {}

    def info(self, top: str) -> dict[str, ArrayInfo]:
        """Every array below the top-level name `top`, by its path there."""
        found = [path for path in self._paths if path[0] == top]
        self._open_all(["/".join(path) for path in found])
        out = {}
        for path in found:
            array = self._open["/".join(path)]
            out["/".join(path[1:])] = ArrayInfo(array.dtype.numpy_dtype, tuple(array.shape))
        return out

    def start(self, name: str, index: tuple) -> Callable[[], np.ndarray]:
        """Starts to read a slice; what it returns gives it as a numpy array."""
        if name not in self._files:
            self._files[name] = self._plain_files(name)
        if (files := self._files[name]) and (read := files.inside_a_chunk(index)):
            return read
        self._open_all([name])
        return self._open[name][index].read().result

    def _plain_files(self, name: str) -> "PlainFiles | None":
        """The array's files where they are local and hold chunks as they are."""
        folder = self._state / name.replace("/", ".")
        if self._is_database or "://" in os.fspath(folder) or not (folder / "zarr.json").exists():
            return None
        told = json.loads((folder / "zarr.json").read_text())
        (codec, *others), shard = told["codecs"], told["chunk_grid"]["configuration"]["chunk_shape"]
        inner = codec.get("configuration", {})
        is_plain = codec["name"] == "sharding_indexed" and not others
        is_plain = is_plain and inner["codecs"] == inner["index_codecs"] == CODECS
        if not is_plain or inner["index_location"] != "end":
            return None
        dtype = np.dtype(told["data_type"])
        return PlainFiles(folder / "c", dtype, tuple(told["shape"]), shard, inner["chunk_shape"])

    def _open_all(self, names: list[str]) -> None:
        futures = {
            name: ts.open(self._spec(name), open=True, context=self._context)
            for name in names
            if name not in self._open
        }
        for name, future in futures.items():
            try:
                self._open[name] = future.result()
            except ValueError as e:
                raise FormatError(f"{self._state}: {name} cannot be opened: {e}") from None

    def _spec(self, name: str) -> dict:
        where = os.fspath(self._state)
        base = where if "://" in where else f"file://{os.path.abspath(where)}"
        key = name.replace("/", ".") + "/"
        if self._is_database:
            store = {"driver": "ocdbt", "base": base + "/", "path": key}
        else:
            store = f"{base}/{key}"
        return {
            "driver": self._driver,
            "kvstore": store,
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
        }
