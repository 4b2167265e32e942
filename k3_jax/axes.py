"""Letters become shapes, placements and contractions: how every weight is made and read."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer, normal, ones, zeros
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import act_spec, gathered, weight_spec

__all__ = [
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


def stacked(cls, *args, n: int, rngs: nnx.Rngs | ShapesOnly):
    """`n` equal modules as one, each parameter with a leading axis over them."""
    if isinstance(rngs, ShapesOnly):
        return jax.tree.map(lambda x: _stacked(x, n), cls(*args, rngs=rngs))
    keys = jax.random.split(rngs.params(), n)
    return jax.vmap(lambda key: cls(*args, rngs=nnx.Rngs(params=key)))(keys)


def _stacked(x: jax.ShapeDtypeStruct, n: int) -> jax.ShapeDtypeStruct:
    placed = _sharding(P(None, *x.sharding.spec))
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


def _sharding(placed: P) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), placed)


def read(w: nnx.Param, dtype=None) -> jax.Array:
    """The parameter's array as it is used (`sharding.gathered`), cast if asked.

    The cast comes first, so that what travels is the narrow type.
    """
    array = w[...]
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
    operands are told not to.
    """
    array = read(w, x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    array = array if shape is None else array.reshape(shape)
    placed = act_spec(equation.split("->")[1])
    return jnp.einsum(equation, x, array, precision=precision, out_sharding=placed)
