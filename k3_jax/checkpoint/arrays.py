"""The arrays of a stored step, read a slice at a time, without Orbax, a mesh or a device.

Reads what Store.save writes (arrays in an OCDBT database) and what a conversion writes (a folder
per array). Orbax restores whole trees onto meshes; this is for those who pass over a checkpoint.
"""

import ast
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from k3_jax.checkpoint.manifest import is_local
from k3_jax.checkpoint.safetensors import Buffer, FormatError
from k3_jax.checkpoint.zarr import PlainFiles

# Decoded chunks of a database that are kept: slices of one chunk are read one after another.
CACHE_BYTES = 512 << 20


class ArrayInfo(NamedTuple):
    """What a listing tells."""

    dtype: np.dtype
    shape: tuple[int, ...]


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

    def start(
        self, name: str, index: tuple, buffer: Buffer | None = None
    ) -> Callable[[], np.ndarray]:
        """Starts to read a slice; what it returns gives it as a numpy array.

        buffer: may be where the array lies.
        """
        if name not in self._files:
            folder = self._state / name.replace("/", ".")
            self._files[name] = None if self._is_database else PlainFiles.open(folder)
        if (files := self._files[name]) and (
            read := files.inside_a_chunk(index, buffer or Buffer())
        ):
            return read
        self._open_all([name])
        return self._open[name][index].read().result

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
        base = f"file://{os.path.abspath(where)}" if is_local(where) else where
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
