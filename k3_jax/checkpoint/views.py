"""Any checkpoint as the released tensors that it holds or would be released as.

`open_view` opens either format. What a view lists is read by pieces, so that looking at a
checkpoint, comparing two and writing one take the memory of a few pieces.
"""

import gzip
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from etils import epath

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.arrays import ArrayInfo, StoredArrays
from k3_jax.checkpoint.hf import PACKED, PREFIX, SCALES, name_table, shape_of, to_released
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.checkpoint.plan import (
    BFLOAT16,
    DEFAULT,
    UINT8,
    VISION,
    Options,
    abstract_leaves,
    n_pieces,
)
from k3_jax.checkpoint.safetensors import Buffer, FormatError, parse_header, read_index
from k3_jax.checkpoint.to_orbax import FILES, HASHES, HEADERS, SOURCE, STATE
from k3_jax.checkpoint.trained import quantized_rule
from k3_jax.config import ModelConfig, from_dict
from k3_jax.quant import mxfp4

AHEAD = 3  # pieces that are being read while one is used


class View(Protocol):
    """`tensors`: dtype and shape by key. `config`: None where none was found.

    `pieces` gives the tensor's bytes in order, as contiguous arrays of its dtype, each good until
    the next is asked for: they may all lie in the buffer.
    `recorded`: the BLAKE3 of each tensor when it was converted, where that is known.
    """

    tensors: dict[str, ArrayInfo]
    config: ModelConfig | None
    recorded: dict[str, str]

    def pieces(self, key: str, buffer: Buffer) -> Iterator[np.ndarray]: ...


def open_view(path) -> "ReleasedView | StoredView":
    """Raises FileNotFoundError, FormatError or ValueError that say what is wrong with `path`."""
    path = epath.Path(path)
    if step := find_step(path):
        return StoredView(step)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; give a checkpoint's directory")
    return ReleasedView(path)


def find_step(path: epath.Path) -> epath.Path | None:
    """The step that `path` means: itself, or its newest whole one; None where it has no steps."""
    if path.name.isdigit() and (path / STATE).exists():
        steps = [path]
    else:
        places = (path / "checkpoints", path)
        steps = next((found for p in places if (found := manifest.numbered(p))), [])
        steps = [step for _, step in reversed(steps)]
    if not steps:
        return None
    faults = {}
    for step in steps:
        faults[step] = manifest.fault(step)
        if faults[step] is None:
            return step
    told = "; ".join(f"{step.name}: {fault}" for step, fault in faults.items())
    raise FormatError(f"{path} has no whole checkpoint ({told})")


class ReleasedView:
    """A directory of safetensors files."""

    def __init__(self, directory: epath.Path):
        self._stored = read_index(directory)
        self.directory = directory
        self.tensors = {key: ArrayInfo(t.dtype, t.shape) for key, t in self._stored.items()}
        path = directory / "config.json"
        precision = dict(dtype="bfloat16", param_dtype="bfloat16")
        self.config = from_hf(path, **precision) if path.exists() else None
        self.recorded: dict[str, str] = {}

    def pieces(self, key: str, buffer: Buffer) -> Iterator[np.ndarray]:
        tensor = self._stored[key]
        n = _n_pieces(tensor)
        with tensor.file.open("rb") as file:
            yield from tensor.pieces(file, n, buffer)


class Piece(NamedTuple):
    """A tensor's lead axis from `start` to `stop`, counted in units of the first letter."""

    start: int
    stop: int


class StoredView:
    """A step of ours, converted or trained. `options` change what experts are released as."""

    def __init__(self, step: epath.Path, options: Options = DEFAULT, narrow: bool = False):
        self.step = step
        self.meta = manifest.read(step)["meta"]
        self.config = _config_of(step, self.meta)
        # What is trained is what is released: packed, unless numbers are asked for.
        self.trained_rule = quantized_rule(self.meta, int(step.name))
        if self.trained_rule:
            options = options._replace(quantize=self.trained_rule)
        self._options, self._narrow = options, narrow
        self._arrays = StoredArrays(step / STATE)
        self._info = self._arrays.info("model")
        self._table, self._leaves = name_table(self.config), abstract_leaves(self.config)
        _check_leaves(step, self._info, self._leaves)
        self._packed_one: tuple[str, tuple] = "", ()
        told = self.meta.get("convert", {})
        self.is_exact = bool(told.get("exact")) and not (options.dequantize or options.quantize)
        self.is_exact = self.is_exact and not narrow
        # A text model's own names have no prefix: it is the multimodal model's.
        self._has_prefix = told.get("has_prefix", False)
        # Key -> (name of the table or of a kept tensor, which part of it).
        self._where: dict[str, tuple[str, str]] = {}
        self.tensors: dict[str, ArrayInfo] = {}
        self.recorded: dict[str, str] = {}
        self._list_tensors()
        if self.is_exact:
            self._take_source_names()

    def _list_tensors(self):
        """The keys in the release's names and, layer by layer, in a fixed order."""
        for name, (entry, *_) in self._table.items():
            is_expert = ".experts." in name
            shape = shape_of(entry, self._leaves[entry.leaf].shape, self.config)
            is_packed = entry.leaf + "/packed" in self._info
            quantize = self._options.quantize and is_expert and not is_packed
            if (quantize or is_packed) and not self._options.dequantize:
                *lead, width = shape
                self._add(name + PACKED, name, "codes", UINT8, (*lead, width // 2))
                self._add(name + SCALES, name, "scales", UINT8, (*lead, width // mxfp4.BLOCK))
                continue
            dtype = BFLOAT16 if is_packed or quantize else self._info[entry.leaf].dtype
            if self._narrow and self._leaves[entry.leaf].dtype == BFLOAT16:
                dtype = BFLOAT16
            if name.endswith("A_log"):
                shape = (-(-shape[0] // 128) * 128,)
            self._add(name, name, "rounded" if quantize else "plain", dtype, shape)
        for path, info in self._arrays.info(VISION).items():
            self._add(path.replace("/", "."), path, "kept", *info)

    def _add(self, key, name, part, dtype, shape):
        key = key if self._has_prefix else key.removeprefix(PREFIX)
        self._where[key] = name, part
        self.tensors[key] = ArrayInfo(np.dtype(dtype), tuple(shape))

    def _take_source_names(self):
        """Keys and shapes as they were in the source, and what its tensors' hashes were."""
        own = self.step / SOURCE
        self.headers = {
            path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes())
            for path in sorted((own / HEADERS).iterdir(), key=lambda p: p.name)
        }
        found = {}
        for file, header in self.headers.items():
            found |= parse_header(epath.Path(file), header)
        where = {}
        for key, t in found.items():
            if key not in self._where or self.tensors[key].dtype != t.dtype:
                raise FormatError(f"{own}: its headers name {key!r}, which is not stored")
            where[key] = self._where[key]
        self._where = where
        self.tensors = {key: ArrayInfo(t.dtype, t.shape) for key, t in found.items()}
        lines = gzip.decompress((own / HASHES).read_bytes()).decode().splitlines()
        self.recorded = {line[66:]: line[:64] for line in lines}

    @property
    def stored_names(self) -> list[str]:
        """Paths of the model's arrays, those of packed experts with `/packed` and `/scales`."""
        return list(self._info)

    @property
    def files(self) -> epath.Path | None:
        """Where the source's configuration and tokenizer lie; None for a trained checkpoint."""
        path = self.step / SOURCE / FILES
        return path if path.exists() else None

    def pieces(self, key: str, buffer: Buffer) -> Iterator[np.ndarray]:
        name, part = self._where[key]
        info = self.tensors[key]
        if part == "kept":
            read = self._kept(name, info, buffer)
        elif part == "plain":
            read = self._plain(name, info)
        elif part == "rounded":
            read = iter([lambda: mxfp4.unpack(*self._quantized(name), info.dtype)])
        else:
            read = self._expert(name, part, info, buffer)
        for piece in _ahead(read):
            yield np.ascontiguousarray(piece)

    def _kept(self, path, info, buffer):
        """Each reader starts its pieces' reads and returns how to finish each of them."""
        if not info.shape:
            yield self._arrays.start(f"{VISION}/{path}", (0,), buffer)
            return
        for cut in _cuts(info.shape[0], _n_pieces(info)):
            yield self._arrays.start(f"{VISION}/{path}", (slice(*cut),), buffer)

    def _expert(self, name, part, info, buffer):
        (entry,) = self._table[name]
        if entry.leaf + "/packed" not in self._info:
            yield lambda: self._quantized(name)[part == "scales"]
            return
        leaf = f"model/{entry.leaf}/" + ("packed" if part == "codes" else "scales")
        for cut in _cuts(info.shape[0], _n_pieces(info)):
            yield self._arrays.start(leaf, (*entry.index, slice(*cut)), buffer)

    def _quantized(self, name) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of one expert; the last one is kept, for both are asked for in turn."""
        if self._packed_one[0] != name:
            (entry,) = self._table[name]
            shape = shape_of(entry, self._leaves[entry.leaf].shape, self.config)
            info = ArrayInfo(self._info[entry.leaf].dtype, shape)
            parts = [
                mxfp4.pack(piece, self._options.quantize)
                for piece in _ahead(self._plain(name, info))
            ]
            self._packed_one = name, tuple(np.concatenate(x) for x in zip(*parts, strict=True))
        return self._packed_one[1]

    def _plain(self, name, info):
        entries = self._table[name]
        entry, *_ = entries
        lead = len(entry.index) + entry.ours.index(entry.letters[0])
        units = self._leaves[entry.leaf].shape[lead]
        n = 1 if name.endswith("A_log") else n_pieces(units, _n_bytes(info))
        is_packed = entry.leaf + "/packed" in self._info
        for start, stop in _cuts(units, n):
            shape = (info.shape[0] * (stop - start) // units or 1, *info.shape[1:])
            if is_packed:
                yield self._widened(entry, start, stop)
                continue
            reads = []
            for e in entries:
                at = [slice(None)] * len(e.ours)
                at[e.ours.index(e.letters[0])] = slice(start, stop)
                reads.append(self._arrays.start(f"model/{e.leaf}", (*e.index, *at)))
            yield lambda reads=reads, shape=shape: to_released(
                name, [r().astype(info.dtype, copy=False) for r in reads], entries, shape
            )

    def _widened(self, entry, start, stop) -> Callable[[], np.ndarray]:
        at = (*entry.index, slice(start, stop))
        codes, scales = (
            self._arrays.start(f"model/{entry.leaf}/{part}", at) for part in ("packed", "scales")
        )
        return lambda: mxfp4.unpack(codes(), scales(), BFLOAT16)


def _ahead(reads: Iterator[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """The results in order, with a few more reads under way."""
    waiting = []
    for read in reads:
        waiting.append(read)
        if len(waiting) > AHEAD:
            yield waiting.pop(0)()
    for read in waiting:
        yield read()


def _config_of(step: epath.Path, meta: dict) -> ModelConfig:
    manifest.check_is_model(step, meta)
    try:
        return from_dict(ModelConfig, meta["config"]["model"], "config.model")
    except KeyError:
        raise FormatError(f"{step} does not say which model it holds") from None


def _check_leaves(step, info: dict[str, ArrayInfo], leaves) -> None:
    """Raises FormatError unless the stored arrays are the model's, packed or not."""
    for name, leaf in leaves.items():
        parts = [n for n in (name, f"{name}/packed", f"{name}/scales") if n in info]
        if parts == [name] and info[name].shape == leaf.shape:
            continue
        if len(parts) != 2:
            what = f"has shape {info[name].shape}" if name in info else "is missing"
            raise FormatError(f"{step}: {name} of shape {leaf.shape} {what}")
    known = {n + end for n in leaves for end in ("", "/packed", "/scales")}
    if extra := sorted(info.keys() - known):
        raise FormatError(f"{step}: {extra[0]} is no parameter of the model")


def _cuts(units: int, n: int) -> list[Piece]:
    return [Piece(i * units // n, (i + 1) * units // n) for i in range(n)]


def _n_bytes(info) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _n_pieces(info) -> int:
    return n_pieces(info.shape[0], _n_bytes(info)) if info.shape else 1
