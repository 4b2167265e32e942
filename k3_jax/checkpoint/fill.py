"""Runs one job of a plan: pieces of tensors in, chunks of shards out."""

import collections
import contextlib
from collections.abc import Iterator

import numpy as np
from blake3 import blake3
from etils import epath

from k3_jax.checkpoint.hf import Entry, to_ours
from k3_jax.checkpoint.plan import BFLOAT16, Job, Plan
from k3_jax.checkpoint.safetensors import Buffer, Stored
from k3_jax.checkpoint.zarr import Array, Shard
from k3_jax.config import ModelConfig
from k3_jax.quant import mxfp4


class Filler:
    """Fills shards below `state`. Its jobs may run in several threads.

    tensors: the source's, by key. rule: of `mxfp4.pack`, for jobs that pack.
    """

    def __init__(
        self, tensors: dict[str, Stored], plan: Plan, c: ModelConfig, state: epath.Path, rule: str
    ):
        self._tensors, self._plan, self._config = tensors, plan, c
        self._state, self._rule = state, rule

    def fill(self, job: Job) -> dict[str, str]:
        """Writes the job's files; returns {key: BLAKE3} of the tensors that it read."""
        sums = {}
        with contextlib.ExitStack() as stack:
            shards = []
            for array in job.arrays:
                whole = (0,) * (len(array.shape) - len(job.cell))
                shards.append(Shard(self._state, array, (*job.cell, *whole)))
                stack.callback(shards[-1].discard)
            # Two handles of one file where two tensors of it are read side by side.
            files, buffers = {}, collections.defaultdict(Buffer)
            for name in job.names:
                entries = self._plan.table.get(name)
                n = job.n_pieces(entries and entries[0])
                keys = job.keys(self._plan.matched, name)
                streams = []
                for place, key in enumerate(keys):
                    tensor = self._tensors[key]
                    at = place, tensor.file
                    if at not in files:
                        files[at] = stack.enter_context(tensor.file.open("rb"))
                    sums[key] = blake3()
                    streams.append(tensor.pieces(files[at], n, buffers[place], sums[key]))
                for i, parts in enumerate(zip(*streams, strict=True)):
                    self._write(job, name, entries, i, parts, shards)
            for shard in shards:
                shard.close()
        return {key: total.hexdigest() for key, total in sums.items()}

    def _write(self, job: Job, name: str, entries, i: int, parts, shards: list[Shard]) -> None:
        """Writes what piece `i` becomes: `parts` are flat, one of each tensor that is read."""
        lead = ()
        if entries:
            ours = zip(entries[0].index, job.arrays[0].shard, strict=False)
            lead = tuple(at % n for at, n in ours)
        if job.how in ("keep", "codes", "scales"):
            _put(shards[0], job.arrays[0], (*lead, i), parts[0])
        elif job.how == "pack":
            rows = parts[0].reshape(-1, 2 * job.arrays[0].shape[-1])
            packed = mxfp4.pack(rows, self._rule)
            for shard, array, part in zip(shards, job.arrays, packed, strict=True):
                _put(shard, array, (*lead, i), part)
        else:
            piece = parts[0]
            if job.how == "widen":
                codes = piece.reshape(-1, mxfp4.BLOCK // 2)
                piece = mxfp4.unpack(codes, parts[1][:, None], BFLOAT16)
            for shard, array, entry in zip(shards, job.arrays, entries, strict=True):
                for at, chunk in _chunks(name, piece, entry, array, i, self._config):
                    _put(shard, array, (*lead, *at), chunk)


def _chunks(name, piece, entry: Entry, array: Array, i: int, c) -> Iterator[tuple]:
    """(place behind the leading axes, chunk) of piece `i` of a tensor, in our order."""
    n_lead = len(entry.index)
    chunk, slab = array.chunk[n_lead:], array.shard[n_lead:]
    axis = entry.ours.index(entry.letters[0])
    shape = tuple(chunk[a] if a == axis else n for a, n in enumerate(slab))
    moved = to_ours(name, piece, entry, shape, c)
    at = [0] * len(slab)
    at[axis] = i
    if axis == 0:
        yield tuple(at), moved
        return
    for at[0] in range(slab[0] // chunk[0]):
        yield tuple(at), moved[at[0] * chunk[0] : (at[0] + 1) * chunk[0]]


def _put(shard: Shard, array: Array, at: tuple[int, ...], chunk: np.ndarray) -> None:
    """`at` may leave out trailing zeros, or have the 0 of an array without axes too many."""
    rank = len(array.shape)
    shard.write((*at, *(0,) * rank)[:rank], chunk)
