"""Letters become shapes, placements and contractions: how every weight is made and read."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer, normal, ones, zeros
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import act_spec, gathered, weight_spec
from sharding.rules import named

__all__ = [
    "Adapted",
    "Held",
    "ShapesOnly",
    "einsum",
    "is_held",
    "normal",
    "ones",
    "own_ids",
    "read",
    "stacked",
    "weight",
    "zeros",
]


class ShapesOnly:
    """In place of nnx.Rngs: parameters become their shapes, dtypes and resting places.

    What `jax.eval_shape` gives as well, which traces every random number for it.
    """


def weight(
    rngs: nnx.Rngs | ShapesOnly, letters: str, dims: dict, dtype, init: Initializer
) -> nnx.Param:
    """A parameter whose shape and resting place follow from its letters."""
    shape = tuple(dims[a] for a in letters)
    placed = weight_spec(letters, shape)
    if isinstance(rngs, ShapesOnly):
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(placed)))
    return nnx.Param(init(rngs.params(), shape, dtype, out_sharding=placed))


def stacked(cls, *args, n: int, rngs: nnx.Rngs | ShapesOnly, over: str | None = None):
    """`n` equal modules as one, each parameter with a leading axis over them.

    That axis is split over the mesh axis `over`, if one is given.
    """
    if isinstance(rngs, ShapesOnly):
        return jax.tree.map(lambda x: _stacked(x, n, over), cls(*args, rngs=rngs))
    keys = jax.reshard(jax.random.split(rngs.params(), n), P(over))
    return jax.vmap(lambda key: cls(*args, rngs=nnx.Rngs(params=key)))(keys)


def _stacked(x: jax.ShapeDtypeStruct, n: int, over: str | None) -> jax.ShapeDtypeStruct:
    placed = _sharding(P(over, *x.sharding.spec))
    return jax.ShapeDtypeStruct((n, *x.shape), x.dtype, sharding=placed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    """The `index`-th of equal arrays that are stacked, for whoever reads it to take it out.

    A scan slices what it goes over, and one within another slices the slice: without a gradient to
    gather, inference gives its loops an index instead.
    """

    stack: jax.Array
    index: jax.Array

    def taken(self) -> jax.Array:
        """That array."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)

    def put(self, x: jax.Array) -> "Held":
        """With `x` in its place."""
        stack = jax.lax.dynamic_update_index_in_dim(self.stack, x, self.index, 0)
        return Held(stack, self.index)


def is_held(x) -> bool:
    return isinstance(x, Held)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Adapted:
    """A frozen weight W and what is learned beside it: W + scale A B, for whoever reads it.

    W has its inputs' letters before its outputs'. A has the inputs' and K, B has K and the
    outputs'; both may rest in another dtype than W. Routed experts, which may be packed, have a
    pair each (`layers.experts`).
    """

    weight: jax.Array | nnx.Module
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(metadata=dict(static=True))

    def merged(self, dtype=None) -> jax.Array:
        """The sum, in float32 and rounded once, as it is used."""
        weight, a, b = (gathered(x) for x in (self.weight, self.a, self.b))
        ins, outs = "abcd"[: a.ndim - 1], "pqrs"[: b.ndim - 1]
        more = jnp.einsum(
            f"{ins}K,K{outs}->{ins}{outs}",
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
            out_sharding=jax.typeof(weight).sharding.spec,
        )
        return (weight.astype(jnp.float32) + self.scale * more).astype(dtype or weight.dtype)


def _sharding(placed: P) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), placed)


def read(w: nnx.Param, dtype=None) -> jax.Array:
    """The parameter's array as it is used (`sharding.gathered`), cast if asked.

    The cast comes first, so that what travels is the narrow type. Of an `Adapted` parameter it is
    the merged one, whose gradient takes as much memory: for weights that are no plain projection.
    """
    array = w.get_value()
    if isinstance(array, Adapted):
        return array.merged(dtype)
    return gathered(array if dtype is None else array.astype(dtype))


def own_ids(ids: jax.Array, n_own: int) -> tuple[jax.Array, jax.Array]:
    """Token ids within this device's part of a vocabulary split over `tensor`, `n_own` long.

    0 where another device has the id; and whether this one does. Inside shard_map.
    """
    ids = ids - jax.lax.axis_index("tensor") * n_own
    is_own = (ids >= 0) & (ids < n_own)
    return jnp.where(is_own, ids, 0), is_own


def einsum(equation: str, x: jax.Array, w: nnx.Param, *, shape=None) -> jax.Array:
    """`jnp.einsum` of an activation with a parameter, reshaped if asked, in the activation's dtype.

    The result is placed by its letters. float32 means float32: matrix units that would round the
    operands are told not to. Of an `Adapted` parameter x W + scale (x A) B, where x is multiplied
    by A first: no array of W's size is made, forward or backward.
    """
    array, low_rank = w.get_value(), through_rank(equation)
    if not isinstance(array, Adapted):
        (of_x, of_w), placed = equation.split("->")[0].split(","), jax.typeof(x).sharding.spec
        summed = [named(axes) for a, axes in zip(of_x, placed, strict=True) if a not in of_w]
        return _einsum(equation, x, gathered(array.astype(x.dtype), sum(summed, ())), shape)
    if low_rank is None:
        return _einsum(equation, x, array.merged(x.dtype), shape)
    down, up, n_in = low_rank
    weight, a, b = (gathered(v.astype(x.dtype)) for v in (array.weight, array.a, array.b))
    weight = weight if shape is None else weight.reshape(shape)
    narrow = _einsum(down, x, a, (*weight.shape[:n_in], -1))
    more = _einsum(up, array.scale * narrow, b, (-1, *weight.shape[n_in:]))
    return _einsum(equation, x, weight) + more


def through_rank(equation: str) -> tuple[str, str, int] | None:
    """x W as (x A) B: both equations, and how many of W's letters are inputs.

    None where x and W share a letter of the result, so that W is not one matrix for all of x.
    """
    (x, w), out = equation.split("->")[0].split(","), equation.split("->")[1]
    ins = "".join(a for a in w if a in x and a not in out)
    outs = w.removeprefix(ins)
    if not ins or outs == w or any(a in x for a in outs):
        return None
    rows = "".join(a for a in x if a not in ins)
    return f"{x},{ins}K->{rows}K", f"{rows}K,K{outs}->{out}", len(ins)


def _einsum(equation: str, x, array, shape=None) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    array = array if shape is None else array.reshape(shape)
    placed = act_spec(equation.split("->")[1])
    return jnp.einsum(equation, x, array, precision=precision, out_sharding=placed)
