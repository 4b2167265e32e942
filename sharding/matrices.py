"""Whole matrices of sharded stacks: each on one device for a while, then back where it rested."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.mesh import AXES
from sharding.rules import named, present


class Stack(NamedTuple):
    """A placed array and the axes of it that make a matrix, in their order; the others count."""

    array: jax.Array
    core: tuple[int, ...]

    @property
    def kind(self):
        """What stacks must share to be handled together: sizes and placement of a matrix."""
        placed = [named(entry) for entry in jax.typeof(self.array).sharding.spec]
        counted = {a for i, axes in enumerate(placed) if i not in self.core for a in axes}
        shape = self.array.shape
        return tuple((shape[i], placed[i]) for i in self.core), frozenset(counted)


def on_whole(fn: Callable, stacks: list[Stack]) -> list[jax.Array]:
    """fn: [n, *matrix] -> [n, *matrix] on the matrices of stacks of one `kind`, placed as before.

    The matrices are dealt out evenly over all devices that hold parts or copies of them, so each
    is computed once, by one device. Parts travel by all-to-all: a device gets as many bytes as
    it gives, and never holds a stack. Where copies rested (`data`), results are gathered. A number
    of matrices that does not divide is filled up with zeros, so fn(0) must be finite.
    """
    (core, counted), rest = stacks[0].kind, range(1, 1 + len(stacks[0].core))
    split = [(dim, axes) for dim, (_, axes) in zip(rest, core, strict=True) if axes]
    taken = counted.union(*(axes for _, axes in split))
    copies = tuple(a for a in present(AXES) if a not in taken)
    n_copies, n_parts = _size(copies), math.prod(_size(axes) for _, axes in split)

    def local(*parts):
        flat = [_flat(x, s.core) for x, s in zip(parts, stacks, strict=True)]
        x, n = jnp.concatenate(flat), sum(map(len, flat))
        x = jnp.pad(x, ((0, -n % (n_copies * n_parts)),) + ((0, 0),) * (x.ndim - 1))
        if copies:
            own = len(x) // n_copies
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(copies) * own, own)
        for dim, axes in split:
            x = jax.lax.all_to_all(x, axes, 0, dim, tiled=True)
        x = fn(x)
        for dim, axes in reversed(split):
            x = jax.lax.all_to_all(x, axes, dim, 0, tiled=True)
        if copies:
            x = jax.lax.all_gather(x, copies, tiled=True, to="invarying")
        ends = [sum(map(len, flat[: i + 1])) for i in range(len(flat))]
        found = jnp.split(x[:n], ends[:-1])
        return [_unflat(y, p.shape, s.core) for y, p, s in zip(found, parts, stacks, strict=True)]

    specs = tuple(jax.typeof(s.array).sharding.spec for s in stacks)
    return jax.shard_map(local, in_specs=specs, out_specs=list(specs))(*(s.array for s in stacks))


def _size(axes) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[a] for a in axes)


def _flat(x, core):
    """[..., *core, ...] -> [n, *core]"""
    order = _order(x.ndim, core)
    return x.transpose(order).reshape(-1, *(x.shape[i] for i in core))


def _unflat(x, shape, core):
    order = _order(len(shape), core)
    back = sorted(range(len(shape)), key=order.__getitem__)
    return x.reshape([shape[i] for i in order]).transpose(back)


def _order(ndim, core):
    return (*(i for i in range(ndim) if i not in core), *core)
