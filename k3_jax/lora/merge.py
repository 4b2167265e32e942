"""Writes W + (alpha / rank) A B: a checkpoint of ours from a frozen base and its adapters.

What has no adapter is copied as it is, packed experts packed. It streams: a chunk of a weight is
read, added to in float32, rounded once to its stored dtype and written. Called again after a kill
it goes on with the files that are missing.
"""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from etils import epath

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.arrays import ArrayInfo, StoredArrays
from k3_jax.checkpoint.hf import Entry, name_table
from k3_jax.checkpoint.journal import Journal, check_space, run_all
from k3_jax.checkpoint.plan import VISION, leaf_array, n_pieces, path_of, shared
from k3_jax.checkpoint.safetensors import Buffer
from k3_jax.checkpoint.to_orbax import FILES, SOURCE, STATE, STEP, copy_others
from k3_jax.checkpoint.zarr import Array, Shard, described, replace_text, write_tree
from k3_jax.config import ModelConfig, from_dict
from k3_jax.lora.adapters import letters, pair
from k3_jax.lora.frozen import KEY, fingerprint, found_step

FORMAT = 1  # of what is stored: a journal of another one is not continued
SHARD_BYTES = 512 << 20


class Job(NamedTuple):
    """Fills one shard of `array` from the base's array `name` ("model/..." or "vision/...")."""

    name: str
    array: Array
    cell: tuple[int, ...]

    @property
    def id(self) -> str:
        """Its name among all jobs."""
        return "-".join([self.array.path, *map(str, self.cell)])

    @property
    def n_bytes(self) -> int:
        """Of the file that it writes."""
        return math.prod(self.array.shard) * self.array.dtype.itemsize


def merge(base: str, adapters: str, to: str, workers: int = 2, say: Callable = print) -> None:
    """Writes the merged checkpoint to the directory `to`.

    Raises FileNotFoundError, FileExistsError, ValueError or OSError that name what is wrong.
    """
    base_step, step, target = found_step(base), found_step(adapters), epath.Path(to)
    told = check_belong(base_step, step)
    meta = with_tokenizer(manifest.read(base_step)["meta"], manifest.read(step)["meta"])
    if (target / STEP / manifest.NAME).exists():
        raise FileExistsError(f"{target} holds a whole checkpoint; give a new directory")
    config = from_dict(ModelConfig, meta["config"]["model"], "config.model")
    source, pairs = StoredArrays(base_step / STATE), StoredArrays(step / STATE)
    jobs, arrays = plan(base_step, source, config)
    adapted = {name.rsplit("/", 1)[0] for name in pairs.info("model")}
    if unknown := sorted(adapted - {name.removeprefix("model/") for name in arrays}):
        raise ValueError(f"{adapters}: {unknown[0]} is no weight of {base}")
    own = {"base": fingerprint(base_step), "adapters": fingerprint(step)}
    journal = Journal(target, {"merge": FORMAT, **own})
    done = journal.open()
    todo = [job for job in jobs if job.id not in done]
    say(f"{len(adapted)} of {len(arrays)} arrays change, {len(todo)} of {len(jobs)} files to do")
    check_space(target, sum(job.n_bytes for job in todo))
    scale = told["alpha"] / told["rank"]

    def run(job: Job) -> dict:
        path = job.name.removeprefix("model/")
        low_rank = pair(path) if path in adapted else None
        fill(job, source, pairs, low_rank, scale, target / STEP / STATE)
        return {}

    run_all(todo, run, journal, workers, say)
    finish(base_step, target / STEP, meta, {**own, **told}, list(arrays.values()))
    journal.remove()


def check_belong(base: epath.Path, adapters: epath.Path) -> dict:
    """What the adapters' checkpoint says of them. Raises ValueError where they are of another base
    or none."""
    told = manifest.read(adapters)["meta"].get(KEY)
    if told is None:
        raise ValueError(f"{adapters} holds no adapters")
    manifest.check_is_model(base, manifest.read(base)["meta"])
    if (found := fingerprint(base)) != told["fingerprint"]:
        raise ValueError(
            f"the adapters in {adapters} belong to another base: {told['base']} of fingerprint "
            f"{told['fingerprint']}; {base} has {found}"
        )
    return told


def with_tokenizer(base: dict, adapters: dict) -> dict:
    """The base's meta; one that names no tokenizer, as those of converted checkpoints, gets the one
    that the adapters were trained with."""
    data = base["config"]["data"]
    own = {"tokenizer": data["tokenizer"] or adapters["config"]["data"]["tokenizer"]}
    return {**base, "config": {**base["config"], "data": {**data, **own}}}


def plan(
    step: epath.Path, source: StoredArrays, c: ModelConfig
) -> tuple[list[Job], dict[str, Array]]:
    """A job for each file, and the arrays by name. Files are cut as the base's are, and those of a
    trained base, which are a database, as a conversion would."""
    entries = {entry.leaf: entry for found in name_table(c).values() for entry in found}
    arrays, jobs = {}, []
    for top in ("model", VISION):
        for path, info in source.info(top).items():
            name = f"{top}/{path}"
            array = described(step / STATE, path_of(path) if top == "model" else f"{top}.{path}")
            arrays[name] = array or laid_out(path, info, entries[path])
    for name, array in arrays.items():
        grid = [n // s for n, s in zip(array.shape, array.shard, strict=True)]
        jobs += [Job(name, array, cell) for cell in np.ndindex(*grid)]
    return jobs, arrays


def laid_out(path: str, info: ArrayInfo, entry: Entry) -> Array:
    """The files of a leaf of a trained base."""
    sizes = dict(zip(entry.ours, info.shape[len(entry.index) :], strict=True))
    n_bytes = math.prod(sizes.values()) * info.dtype.itemsize
    n = n_pieces(sizes[entry.letters[0]], n_bytes)
    return shared(leaf_array(path_of(path), info.dtype, info.shape, entry, n), SHARD_BYTES)


def fill(job: Job, source, pairs, low_rank, scale: float, state: epath.Path) -> None:
    """Writes a shard, chunk by chunk; low_rank: the names of A and B, or None."""
    array, buffer = job.array, Buffer()
    starts = [i * s for i, s in zip(job.cell, array.shard, strict=True)]
    grid = [s // c for s, c in zip(array.shard, array.chunk, strict=True)]
    with contextlib.ExitStack() as stack:
        shard = Shard(state, array, job.cell)
        stack.callback(shard.discard)
        for at in np.ndindex(*grid):
            places = zip(starts, at, array.chunk, strict=True)
            cuts = [slice(start + i * n, start + (i + 1) * n) for start, i, n in places]
            chunk = source.start(job.name, index_of(cuts, array), buffer)().reshape(array.chunk)
            if low_rank:
                more = scale * product(pairs, *low_rank, cuts)
                chunk = (chunk.astype(np.float32) + more).astype(array.dtype)
            shard.write(at, chunk)
        shard.close()


def index_of(cuts: list[slice], array: Array) -> tuple:
    """The chunk's place as numbers, then slices, as short as can be: so written, it is read as it
    lies in its file where it lies there in one piece."""
    lead = next((i for i, n in enumerate(array.chunk) if n > 1), len(cuts) - 1)
    index = [*(cut.start for cut in cuts[:lead]), *cuts[lead:]]
    while len(index) > lead + 1 and array.chunk[len(index) - 1] == array.shape[len(index) - 1]:
        index.pop()
    return tuple(index)


def product(pairs: StoredArrays, a_name: str, b_name: str, cuts: list[slice]) -> np.ndarray:
    """The part of A B that lies at `cuts` of the weight, which are of one layer."""
    n_in, n_out = (len(letters(name)) - 1 for name in (a_name, b_name))
    at = len(cuts) - n_in - n_out
    lead, ins, outs = cuts[:at], cuts[at : at + n_in], cuts[at + n_in :]
    a = pairs.start(f"model/{a_name}", (*lead, *ins, slice(None)))()
    b = pairs.start(f"model/{b_name}", (*lead, slice(None), *outs))()
    rank = a.shape[-1]
    shape = [cut.stop - cut.start for cut in cuts]
    return (a.reshape(-1, rank) @ b.reshape(rank, -1)).reshape(shape)


def finish(base: epath.Path, step: epath.Path, meta: dict, told: dict, arrays: list) -> None:
    """Writes what tells of the arrays, the manifest last."""
    write_tree(step, STATE, arrays)
    (step / "data").mkdir(exist_ok=True)
    replace_text(step / "data" / "0.json", "{}")
    if (base / SOURCE / FILES).exists():
        copy_others(base / SOURCE / FILES, step / SOURCE / FILES)
    if "convert" in meta:
        # No released files have these weights: they are written anew.
        meta = {**meta, "convert": {**meta["convert"], "exact": False}}
    manifest.write(step, {**meta, "merged": told})
