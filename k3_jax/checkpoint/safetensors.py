"""Safetensors files as bytes, with bfloat16 as numpy sees it through ml_dtypes.

A file is 8 bytes with the length of a JSON header, the header, and the tensors' bytes without gaps.
An index names the file of every tensor. What does not add up is refused before a tensor is read:
a header that lies would otherwise give numbers of another tensor.
"""

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
BLOCK_BYTES = 512 << 10
MAX_HEADER = 100_000_000  # bytes, the format's own limit


class FormatError(ValueError):
    """A checkpoint's files are damaged, or are not those of the model; the message says which."""


class Buffer:
    """Memory for one piece after another. New memory for each costs as much as the reading."""

    def __init__(self):
        self._bytes = np.empty(0, np.uint8)

    def take(self, n: int) -> np.ndarray:
        """`n` bytes; what was taken before is not used any more."""
        if len(self._bytes) < n:
            self._bytes = np.empty(n, np.uint8)
        return self._bytes[:n]


def blocks(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of a contiguous array, a block at a time.

    What is read, hashed and written by blocks stays in a core's cache from one to the next.
    """
    data = memoryview(array.reshape(-1).view(np.uint8))
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


class Stored(NamedTuple):
    """Where one tensor lies: its file, dtype, shape and byte range in the file."""

    file: epath.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        with self.file.open("rb") as f:
            return next(self.pieces(f, 1)).reshape(self.shape)

    def pieces(
        self, file, n: int, buffer: Buffer | None = None, total=None
    ) -> Iterator[np.ndarray]:
        """The tensor as `n` equal byte ranges in order, from an open file.

        `n` divides the bytes of the tensor. The arrays are flat and have the tensor's dtype.
        buffer: where each piece is put in place of the last; else each is a new array. total: a
        hash that takes in what is read.
        """
        size = (self.stop - self.start) // n
        file.seek(self.start)
        for _ in range(n):
            data = (buffer or Buffer()).take(size)
            for block in blocks(data):
                have = 0
                while have < len(block) and (got := file.readinto(block[have:])):
                    have += got
                if have < len(block):
                    raise FormatError(f"{self.file} ends inside a tensor: it is truncated")
                if total is not None:
                    total.update(block)
            yield data.view(self.dtype)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Half a million small objects that stay: looking for cycles among them takes most of the
    time of making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@without_collection()
def read_index(directory) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory by name.

    Uses the index file, or the lone safetensors files where there is no index. Raises
    FileNotFoundError or FormatError naming the file when something is missing or does not add up.
    """
    directory = epath.Path(directory)
    where, total = _read_where(directory / INDEX)
    files = sorted({*where.values()} if where else names_in(directory))
    if not files:
        raise FileNotFoundError(f"{directory} has neither {INDEX} nor a .safetensors file")
    tensors: dict[str, Stored] = {}
    for name in files:
        found = read_header(directory / name)
        if both := sorted(tensors.keys() & found.keys()):
            other = tensors[both[0]].file.name
            raise FormatError(f"{directory}: {both[0]!r} is in {other} and in {name}")
        tensors |= found
    if where:
        _check_where(directory / INDEX, where, total, tensors)
    return tensors


def names_in(directory: epath.Path) -> list[str]:
    """The names of its safetensors files, whether an index names them or not."""
    return sorted(p.name for p in directory.glob("*.safetensors"))


def _read_where(index: epath.Path):
    """({tensor: file name}, total bytes or None) of an index; ({}, None) where there is none."""
    if not index.exists():
        return {}, None
    content = parse(index, index.read_bytes())
    where = content.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise FormatError(f"{index} has no weight_map")
    for name, file in where.items():
        plain = isinstance(file, str) and file == os.path.basename(file) and "\\" not in file
        if not plain or "\0" in file or not file.endswith(".safetensors"):
            raise FormatError(f"{index}: {name!r} is said to be in {file!r}, which is no file name")
    metadata = content.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return where, total


def _check_where(index, where, total, tensors):
    if lost := sorted(set(where) - set(tensors)):
        raise FormatError(
            f"{index} names {len(lost)} tensors that no file holds, such as {lost[0]!r}"
        )
    if extra := sorted(set(tensors) - set(where)):
        raise FormatError(
            f"{index} lacks {len(extra)} tensors that are in the files, such as {extra[0]!r} in "
            f"{tensors[extra[0]].file.name}"
        )
    for name, file in where.items():
        if tensors[name].file.name != file:
            found = tensors[name].file.name
            raise FormatError(f"{index}: {name!r} is said to be in {file}, and is in {found}")
    n_bytes = sum(t.stop - t.start for t in tensors.values())
    # The key is optional; True == 1 in Python, and no size is a bool.
    if total is not None and (isinstance(total, bool) or total != n_bytes):
        raise FormatError(f"{index}: total_size is {total!r}, the tensors have {n_bytes} bytes")


def read_header(file: epath.Path) -> dict[str, Stored]:
    """The tensors of one file, which lie in it without gap or overlap up to its last byte."""
    data, size = raw_header(file)
    out = parse_header(file, data)
    at = max((t.stop for t in out.values()), default=len(data))
    if at > size:
        last = max(out, key=lambda name: out[name].stop)
        raise FormatError(f"{file} is truncated: {last!r} ends at byte {at} of {size}")
    if at < size:
        raise FormatError(f"{file} has {size - at} bytes more than its header tells of")
    return out


def parse_header(file: epath.Path, data: bytes) -> dict[str, Stored]:
    """The tensors that a header tells of, length field included, without gap or overlap."""
    n = len(data)
    entries = parse(file, data[8:])
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{file}: __metadata__ is not a mapping of names to strings")
    out = {name: _stored(file, name, entry, n) for name, entry in entries.items()}
    at, before = n, "the header"
    for name, t in sorted(out.items(), key=lambda item: item[1][3:]):
        if t.start != at:
            what = "overlaps" if t.start < at else "leaves a gap after"
            raise FormatError(f"{file}: {name!r} at byte {t.start} {what} {before}, up to {at}")
        at, before = t.stop, repr(name)
    return out


def raw_header(file: epath.Path) -> tuple[bytes, int]:
    """The length field and header as they stand in the file, and the file's size."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing")
    size = file.stat().length
    with file.open("rb") as f:
        head = f.read(8)
        n = int.from_bytes(head, "little")
        if size < 8 or n > size - 8:
            raise FormatError(
                f"{file} is no safetensors file: its header would take {n} of {size} bytes"
            )
        if n > MAX_HEADER:
            raise FormatError(f"{file}: a header of {n} bytes; the format allows {MAX_HEADER}")
        return head + f.read(n), size


def make_header(entries: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """The length field and header of a file with these tensors in this order."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in entries.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=NAMES[dtype], shape=list(shape), data_offsets=[at, stop])
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse(file, data: bytes) -> dict:
    """A JSON object whose keys are named once; FormatError naming the file."""

    def once(pairs):
        out = dict(pairs)
        if len(out) < len(pairs):
            keys = [k for k, _ in pairs]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise FormatError(f"{file}: {twice!r} is there twice")
        return out

    try:
        content = json.loads(data, object_pairs_hook=once)
    except FormatError:
        raise
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{file}: its header is not JSON ({ascii(str(e))})") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file}: its header is not a JSON object")
    return content


def _stored(file, name, entry, n: int) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{file}: {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{file}: {name!r} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(x) is not int or x < 0 for x in numbers):
            raise FormatError(f"{file}: {name!r} has {numbers!r} where whole numbers belong")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise FormatError(f"{file}: {name!r} {shape} {dtype} of {size} bytes is not at {offsets}")
    return Stored(file, DTYPES[dtype], tuple(shape), n + offsets[0], n + offsets[1])
