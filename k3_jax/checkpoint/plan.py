"""Which arrays a released checkpoint becomes, and the jobs that fill them.

A job fills one shard (one file) of one array, two where a tensor's bytes go to two arrays. It reads
each of its tensors once, from front to back in equal pieces, and a piece becomes whole chunks. No
tensor is in two jobs. So a job needs memory for a few pieces, whatever it fills, and what a kill
can cost is the jobs under way.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from k3_jax.checkpoint.hf import EXPERT, Entry, Matched, match, name_table, shape_of
from k3_jax.checkpoint.safetensors import FormatError, without_collection
from k3_jax.checkpoint.zarr import Array
from k3_jax.config import ModelConfig
from k3_jax.model import abstract
from k3_jax.quant import mxfp4
from k3_jax.tree import named_leaves
from sharding import AXES

PIECE_BYTES = 16 << 20  # of a tensor that are held at once, unless one row is larger
CHUNK_BYTES = 1 << 20  # below it, a chunk is not cut along a second axis
SHARD_BYTES = 512 << 20  # of experts in one file
MAX_CUTS = 16  # of a chunk along that second axis
UINT8, BFLOAT16 = np.dtype(np.uint8), np.dtype("bfloat16")
VISION = "vision"
# How the paths of the routed experts' arrays end, packed or not.
EXPERTS = tuple(
    leaf.rsplit("/", 1)[1] + end
    for leaf, _ in EXPERT.values()
    for end in ("", ".packed", ".scales")
)

# What a job does with the bytes of a tensor: they are the leaf's in other order ("move"), go to
# their place as they are ("codes", "scales", "keep"), or change on the way ("widen", "pack").
How = Literal["move", "codes", "scales", "keep", "widen", "pack"]


class Options(NamedTuple):
    """What the caller asked for by name. `quantize`: "", or the rule of `mxfp4.pack`."""

    dequantize: bool = False
    quantize: str = ""
    allow_rounded: bool = False
    shard_bytes: int = SHARD_BYTES


DEFAULT = Options()


class Job(NamedTuple):
    """Fills the shards `cell` of `arrays` from the tensors `names`.

    `cell` counts along the leading axes, those of groups, layers and experts; the others are whole.
    `names` are of the name table, but keys where `how` is "keep".
    """

    how: How
    arrays: tuple[Array, ...]
    cell: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        """Its name among all jobs."""
        return "-".join([self.arrays[0].path, *map(str, self.cell)])

    def keys(self, matched: Matched, name: str) -> tuple[str, ...]:
        """Which tensors of the source it reads for `name`."""
        if self.how == "keep":
            return (name,)
        keys = matched.keys[name]
        return {"codes": keys[:1], "scales": keys[1:]}.get(self.how, keys)

    @property
    def n_bytes(self) -> int:
        """Of the files that it writes."""
        return sum(math.prod(a.shard) * a.dtype.itemsize for a in self.arrays)

    def n_pieces(self, entry: Entry | None) -> int:
        """Into how many pieces its tensors are cut; `entry` is the first of one of them."""
        array, at = self.arrays[0], len(self.cell)
        if self.how in ("move", "widen"):
            at += entry.ours.index(entry.letters[0])
        return array.shape[at] // array.chunk[at]


class Plan(NamedTuple):
    """`table`: entries by name. `arrays`: by path. `jobs`: layer by layer."""

    table: dict[str, list[Entry]]
    matched: Matched
    arrays: dict[str, Array]
    jobs: list[Job]


@functools.cache
def abstract_leaves(c: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The model's leaves by name, float32 where the release is, else bfloat16. Needs no device."""
    narrow = dataclasses.replace(c, param_dtype="bfloat16")
    mesh = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        return named_leaves(abstract(narrow))


@without_collection()
def make_plan(tensors, c: ModelConfig, options: Options) -> Plan:
    """The whole conversion of `tensors` (by key, with dtype and shape), checked.

    Raises FormatError naming a tensor that does not fit, or ValueError when an option has nothing
    to work on.
    """
    leaves, table = abstract_leaves(c), name_table(c)
    matched = match(tensors, table, leaves, c, allow_rounded=options.allow_rounded)
    _check_options(matched, options)
    plan = Plan(table, matched, {}, [])
    names: dict[tuple, list[str]] = {}
    for name in matched.keys:
        entries = table[name]
        for how, places in _targets(name, entries, len(matched.keys[name]) == 2, options):
            if places[0] not in plan.arrays:
                for array in _arrays(how, places, entries, leaves, plan, c):
                    plan.arrays[array.path] = shared(array, options.shard_bytes)
            index, array = entries[0].index, plan.arrays[places[0]]
            cell = tuple(i // n for i, n in zip(index, array.shard, strict=False))
            names.setdefault((how, places, cell), []).append(name)
    for key in matched.kept:
        path = f"{VISION}.{key}"
        plan.arrays[path] = _kept(path, tensors[key])
        names["keep", (path,), ()] = [key]
    _check_paths(plan)
    for (how, places, cell), found in names.items():
        plan.jobs.append(Job(how, tuple(plan.arrays[p] for p in places), cell, tuple(found)))
    return plan


def _check_options(matched, options):
    packed = any(len(keys) == 2 for keys in matched.keys.values())
    if options.dequantize and not packed:
        raise ValueError("--dequantize: no tensor of this checkpoint is packed")
    if options.quantize and (packed or not any(".experts." in name for name in matched.keys)):
        why = "its experts are packed already" if packed else "it has no routed experts"
        raise ValueError(f"--quantize: nothing to do for this checkpoint, {why}")


def _check_paths(plan: Plan):
    """Orbax's tree cannot hold both `a` and `a.b`, and a path is a folder's name."""
    folders = {path[:i] for path in plan.arrays for i, a in enumerate(path) if a == "."}
    for path in plan.arrays:
        if path in folders or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path, re.ASCII):
            raise FormatError(f"tensor {path.removeprefix(f'{VISION}.')!r} cannot be stored so")


def _targets(name, entries, is_packed: bool, options) -> list[tuple[How, tuple[str, ...]]]:
    """What becomes of one tensor of the table: (how, paths of the arrays that it goes to)."""
    paths = tuple(path_of(entry.leaf) for entry in entries)
    both = paths[0] + ".packed", paths[0] + ".scales"
    if not is_packed and not (options.quantize and ".experts." in name):
        return [("move", paths)]
    if not is_packed:
        return [("pack", both)]
    if options.dequantize:
        return [("widen", paths)]
    return [("codes", both[:1]), ("scales", both[1:])]


def path_of(leaf: str) -> str:
    """The leaf's place in the stored tree, as Orbax writes it."""
    return "model." + leaf.replace("/", ".")


def _arrays(how, paths, entries, leaves, plan, c) -> Iterator[Array]:
    """The arrays of a leaf, as if every shard had one layer's and one expert's part."""
    entry, *_ = entries
    leaf = leaves[entry.leaf].shape
    shape, dtype = shape_of(entry, leaf, c), plan.matched.dtypes[entry.leaf]
    if how in ("move", "widen"):
        dtype = BFLOAT16 if how == "widen" else dtype
        sizes = dict(zip(entry.ours, leaf[len(entry.index) :], strict=True))
        units = sizes[entry.letters[0]]
        n = n_pieces(units, math.prod(shape) * dtype.itemsize)
        for path, entry in zip(paths, entries, strict=True):
            yield leaf_array(path, dtype, leaves[entry.leaf].shape, entry, n)
        return
    rows, width = shape
    n = n_pieces(rows, rows * width * (BFLOAT16.itemsize if how == "pack" else 1))
    for path in paths:
        last = width // (2 if path.endswith(".packed") else mxfp4.BLOCK)
        lead = len(entry.index)
        whole = (*leaf[:lead], rows, last)
        yield Array(path, UINT8, whole, (1,) * lead + whole[lead:], (1,) * lead + (rows // n, last))


def leaf_array(path, dtype, shape, entry: Entry, n: int) -> Array:
    """Chunks hold the rows of one of `n` pieces. They are cut along the leaf's first axis as well,
    where a mesh splits it, so that a device needs not read what is another's."""
    lead = len(entry.index)
    at, first = lead + entry.ours.index(entry.letters[0]), lead
    chunk = [*(1,) * lead, *shape[lead:]]
    chunk[at] //= n
    cuts = 1
    while (
        at != first
        and chunk[first] % 2 == 0
        and cuts < MAX_CUTS
        and math.prod(chunk) * dtype.itemsize >= 2 * CHUNK_BYTES
    ):
        chunk[first], cuts = chunk[first] // 2, cuts * 2
    return Array(path, dtype, shape, (1,) * lead + shape[lead:], tuple(chunk))


def _kept(path, tensor) -> Array:
    shape = tensor.shape or (1,)
    n = n_pieces(shape[0], math.prod(shape) * tensor.dtype.itemsize)
    return Array(path, tensor.dtype, shape, shape, (shape[0] // n, *shape[1:]))


def n_pieces(units: int, n_bytes: int) -> int:
    """Into how many equal pieces `units` rows are cut, so that each has at most PIECE_BYTES."""
    fit = (n for n in range(1, units) if units % n == 0 and n_bytes <= n * PIECE_BYTES)
    return next(fit, units)


def shared(array: Array, n_bytes: int) -> Array:
    """The array with as many experts to a shard as `n_bytes` hold.

    Their number is halved until they fit, as meshes halve it, so that no device's experts begin
    inside a shard more often than need be. Codes and scales of an expert are in shards of the same
    number, by the bytes that the codes would have.
    """
    if not array.path.endswith(EXPERTS):
        return array
    experts = array.shape[2]
    each = math.prod(array.shape[3:]) * array.dtype.itemsize
    if array.path.endswith(".scales"):
        each *= mxfp4.BLOCK // 2
    while experts % 2 == 0 and experts * each > n_bytes:
        experts //= 2
    return array._replace(shard=(1, 1, experts, *array.shape[3:]))
