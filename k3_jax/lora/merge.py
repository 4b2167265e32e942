"""Writes W + (alpha / rank) A B: a checkpoint of ours from a frozen base and its adapters.

What has no adapter is copied as it is, packed experts packed. It streams: a chunk of a weight is
read, added to in float32, rounded once to its stored dtype and written. Packed experts that have
adapters are widened, which is exact, and what they become is packed as a conversion would. Called
again after a kill it goes on with the files that are missing.
"""

import contextlib
import math
import re
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
from k3_jax.quant import mxfp4

FORMAT = 1  # of what is stored: a journal of another one is not continued
SHARD_BYTES = 512 << 20
PACK_NUMBERS = 1 << 20  # that are packed at once, in float64


class Job(NamedTuple):
    """Fills the shards `cell` of `arrays` from the base's arrays `names` ("model/..." or
    "vision/..."): one, or the codes and the scales of packed experts that change."""

    names: tuple[str, ...]
    arrays: tuple[Array, ...]
    cell: tuple[int, ...]

    @property
    def id(self) -> str:
        """Its name among all jobs."""
        return "-".join([self.arrays[0].path, *map(str, self.cell)])

    @property
    def n_bytes(self) -> int:
        """Of the files that it writes."""
        return sum(math.prod(a.shard) * a.dtype.itemsize for a in self.arrays)


def merge(
    base: str, adapters: str, to: str, rule: str = "", workers: int = 2, say: Callable = print
) -> None:
    """Writes the merged checkpoint to the directory `to`. rule: of `mxfp4.pack`, for packed experts
    that have adapters.

    Raises FileNotFoundError, FileExistsError, ValueError or OSError that name what is wrong.
    """
    base_step, step, target = found_step(base), found_step(adapters), epath.Path(to)
    told = check_belong(base_step, step)
    meta = with_tokenizer(manifest.read(base_step)["meta"], manifest.read(step)["meta"])
    if (target / STEP / manifest.NAME).exists():
        raise FileExistsError(f"{target} holds a whole checkpoint; give a new directory")
    config = from_dict(ModelConfig, meta["config"]["model"], "config.model")
    source, pairs = StoredArrays(base_step / STATE), StoredArrays(step / STATE)
    adapted = {name.rsplit("/", 1)[0] for name in pairs.info("model")}
    jobs, arrays = plan(base_step, source, config, adapted)
    if unknown := sorted(adapted - {weight_of(name) for name in arrays}):
        raise ValueError(f"{adapters}: {unknown[0]} is no weight of {base}")
    check_rule(rule, [job.names[0] for job in jobs if len(job.names) > 1])
    own = {"base": fingerprint(base_step), "adapters": fingerprint(step), "rule": rule}
    journal = Journal(target, {"merge": FORMAT, **own})
    done = journal.open()
    todo = [job for job in jobs if job.id not in done]
    say(f"{len(adapted)} of {len(arrays)} arrays change, {len(todo)} of {len(jobs)} files to do")
    check_space(target, sum(job.n_bytes for job in todo))
    change = Change(pairs, told["alpha"] / told["rank"], rule)

    def run(job: Job) -> dict:
        path = weight_of(job.names[0])
        fill(job, source, path if path in adapted else None, change, target / STEP / STATE)
        return {}

    run_all(todo, run, journal, workers, say)
    finish(base_step, target / STEP, meta, {**own, **told}, list(arrays.values()))
    journal.remove()


def weight_of(name: str) -> str:
    """The weight that an array is, or is a part of, as adapters name it."""
    return re.sub("^model/|/(packed|scales)$", "", name)


def check_rule(rule: str, packed: list[str]) -> None:
    """Raises ValueError where packed experts change and no rule says how, or one has no use."""
    if packed and not rule:
        raise ValueError(
            f"{weight_of(packed[0])} is packed and has adapters: to be packed again their sum is "
            "rounded. Say by which rule, as of convert's --quantize mxfp4: --rule ceil (clips "
            "nothing) or --rule floor (saturates above 6 units)"
        )
    if rule and not packed:
        raise ValueError(f"--rule {rule}: no packed experts have adapters")


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
    step: epath.Path, source: StoredArrays, c: ModelConfig, adapted: set[str]
) -> tuple[list[Job], dict[str, Array]]:
    """A job for each file, or for two, and the arrays by name. Files are cut as the base's are, and
    those of a trained base, which are a database, as a conversion would."""
    entries = {entry.leaf: entry for found in name_table(c).values() for entry in found}
    arrays, jobs = {}, []
    for top in ("model", VISION):
        for path, info in source.info(top).items():
            name = f"{top}/{path}"
            array = described(step / STATE, path_of(path) if top == "model" else f"{top}.{path}")
            arrays[name] = array or laid_out(path, info, entries[path])
    together: dict[str, list[str]] = {}
    for name in arrays:
        weight = weight_of(name)
        together.setdefault(weight if weight in adapted else name, []).append(name)
    for names in map(sorted, together.values()):  # codes before scales, of the same cells
        found = tuple(arrays[name] for name in names)
        grid = [n // s for n, s in zip(found[0].shape, found[0].shard, strict=True)]
        jobs += [Job(tuple(names), found, cell) for cell in np.ndindex(*grid)]
    return jobs, arrays


def laid_out(path: str, info: ArrayInfo, entry: Entry) -> Array:
    """The files of a leaf of a trained base."""
    sizes = dict(zip(entry.ours, info.shape[len(entry.index) :], strict=True))
    n_bytes = math.prod(sizes.values()) * info.dtype.itemsize
    n = n_pieces(sizes[entry.letters[0]], n_bytes)
    return shared(leaf_array(path_of(path), info.dtype, info.shape, entry, n), SHARD_BYTES)


class Change(NamedTuple):
    """What weights get: `scale` A B of `pairs`; `rule` is as in `merge`."""

    pairs: StoredArrays
    scale: float
    rule: str

    def of(self, path: str, chunks: list[np.ndarray], cuts: list[slice]) -> list[np.ndarray]:
        """What a chunk of a weight, or of its codes and scales, becomes; cuts: of the first."""
        if len(chunks) == 1:
            (chunk,) = chunks
            more = self.scale * product(self.pairs, path, cuts)
            return [(chunk.astype(np.float32) + more).astype(chunk.dtype)]
        # The released order: outputs before inputs, of which a chunk has all.
        (*lead, outs, _), inputs = cuts, slice(0, 2 * chunks[0].shape[-1])
        more = np.swapaxes(self.scale * product(self.pairs, path, [*lead, inputs, outs]), -1, -2)
        n = -(-more.size // PACK_NUMBERS)
        slabs = zip(*(np.array_split(x, n, axis=-2) for x in (*chunks, more)), strict=True)
        packed = [mxfp4.pack(mxfp4.unpack(*old) + more, self.rule) for *old, more in slabs]
        return [np.concatenate(parts, axis=-2) for parts in zip(*packed, strict=True)]


def fill(job: Job, source, path: str | None, change: Change, state: epath.Path) -> None:
    """Writes the job's shards, chunk by chunk; path: of a weight that changes."""
    first, buffers = job.arrays[0], [Buffer() for _ in job.arrays]
    grid = [s // c for s, c in zip(first.shard, first.chunk, strict=True)]
    with contextlib.ExitStack() as stack:
        shards = [Shard(state, array, job.cell) for array in job.arrays]
        for shard in shards:
            stack.callback(shard.discard)
        for at in np.ndindex(*grid):
            cuts = [cuts_of(array, job.cell, at) for array in job.arrays]
            parts = zip(job.names, job.arrays, cuts, buffers, strict=True)
            chunks = [
                source.start(name, index_of(cut, array), buffer)().reshape(array.chunk)
                for name, array, cut, buffer in parts
            ]
            chunks = change.of(path, chunks, cuts[0]) if path else chunks
            for shard, chunk in zip(shards, chunks, strict=True):
                shard.write(at, chunk)
        for shard in shards:
            shard.close()


def cuts_of(array: Array, cell: tuple[int, ...], at: tuple[int, ...]) -> list[slice]:
    """Where in the array the chunk `at` of a shard lies."""
    places = zip(cell, array.shard, at, array.chunk, strict=True)
    starts = ((i * shard + j * chunk, chunk) for i, shard, j, chunk in places)
    return [slice(start, start + n) for start, n in starts]


def index_of(cuts: list[slice], array: Array) -> tuple:
    """The chunk's place as numbers, then slices, as short as can be: so written, it is read as it
    lies in its file where it lies there in one piece."""
    lead = next((i for i, n in enumerate(array.chunk) if n > 1), len(cuts) - 1)
    index = [*(cut.start for cut in cuts[:lead]), *cuts[lead:]]
    while len(index) > lead + 1 and array.chunk[len(index) - 1] == array.shape[len(index) - 1]:
        index.pop()
    return tuple(index)


def product(pairs: StoredArrays, path: str, cuts: list[slice]) -> np.ndarray:
    """The part of A B that lies at `cuts` of the weight, which are of one layer, and of one of its
    experts."""
    a_name, b_name = pair(path)
    n_in, n_out = (len(set(letters(name)) - set("EK")) for name in (a_name, b_name))
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
