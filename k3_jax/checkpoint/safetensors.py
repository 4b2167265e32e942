"""Reading safetensors as bytes, with bfloat16 as numpy sees it through ml_dtypes."""

import json
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
}
INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """Where one tensor lies: its file, dtype, shape and byte range in the file."""

    file: epath.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        with self.file.open("rb") as f:
            f.seek(self.start)
            data = f.read(self.stop - self.start)
        if len(data) != self.stop - self.start:
            raise ValueError(f"{self.file} ends inside a tensor: it is truncated")
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def read_index(directory) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory by name.

    Uses the index file, or the lone safetensors file where there is no index. Raises
    FileNotFoundError or ValueError naming the file when something is missing or does not add up.
    """
    directory = epath.Path(directory)
    index = directory / INDEX
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
        files = sorted(set(where.values()))
    else:
        files = sorted(p.name for p in directory.glob("*.safetensors"))
        where = None
    if not files:
        raise FileNotFoundError(f"{directory} has neither {INDEX} nor a .safetensors file")
    tensors: dict[str, Stored] = {}
    for name in files:
        tensors |= read_header(directory / name)
    if where is not None:
        if lost := sorted(set(where) - set(tensors)):
            raise ValueError(
                f"{index} names {len(lost)} tensors that no file holds, such as {lost[0]}"
            )
    return tensors


def read_header(file: epath.Path) -> dict[str, Stored]:
    """The tensors of one file, checked against the file's size."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing")
    size = file.stat().length
    with file.open("rb") as f:
        n = int.from_bytes(f.read(8), "little")
        if size < 8 or n > size - 8:
            raise ValueError(
                f"{file} is no safetensors file: its header would take {n} of {size} bytes"
            )
        try:
            header = json.loads(f.read(n))
        except ValueError as e:
            raise ValueError(
                f"{file} is no safetensors file: its header is not JSON ({e})"
            ) from None
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{file}: {name} has dtype {entry['dtype']}; known: {', '.join(DTYPES)}"
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = (8 + n + x for x in entry["data_offsets"])
        if stop - start != math.prod(shape) * dtype.itemsize or start < 8 + n:
            raise ValueError(
                f"{file}: {name} {shape} {dtype} does not fit its {stop - start} bytes"
            )
        if stop > size:
            raise ValueError(f"{file} is truncated: {name} ends at byte {stop} of {size}")
        out[name] = Stored(file, dtype, shape, start, stop)
    return out
