"""Loops over stacked layers, how inference keeps them from copying what they go over, and what
training recomputes in them."""

import jax
import jax.numpy as jnp

from k3_jax.axes import Held, is_held
from k3_jax.layers.experts import Packed
from k3_jax.layers.moe import CAME_BACK
from pallas_kernels.common import automatic


def repeat(step, carry, xs, caches, n: int):
    """`jax.lax.scan` over `n` stacked things; one alone runs without a loop.

    step(carry, xs, caches) -> carry, caches, ys. What is `Held`, as caches are, is not sliced: the
    loop passes on where in its stack each thing is, and has the stacks of the caches as a carry, so
    that they are changed where they lie.
    """
    xs, structure = jax.tree.flatten(xs, is_leaf=is_held)

    def within(held, i):
        return Held(held.stack, held.index * n + i)

    def one(carry, given):
        (carry, arrays), (i, sliced) = carry, given
        rest = iter(sliced)
        each = [within(x, i) if is_held(x) else next(rest) for x in xs]
        here = jax.tree.map(lambda x, old: within(Held(x, old.index), i), arrays, caches)
        carry, here, ys = step(carry, jax.tree.unflatten(structure, each), here)
        return (carry, stacks(here)), ys

    sliced = [x for x in xs if not is_held(x)]
    if n > 1:
        start = carry, stacks(caches)
        (carry, after), ys = jax.lax.scan(one, start, (jnp.arange(n, dtype=jnp.int32), sliced))
    else:
        given = 0, [jnp.squeeze(x, 0) for x in sliced]
        (carry, after), ys = one((carry, stacks(caches)), given)
        ys = jax.tree.map(lambda y: y[None], ys)
    return carry, jax.tree.map(lambda x, old: Held(x, old.index), after, caches), ys


def remat(fn, name: str, level: str):
    """`fn` recomputed in the backward pass when the remat `name` works at this `level`."""
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(CAME_BACK)
    if name == "dots" and level == "layer":
        kept = policies.save_from_both_policies(kept, policies.dots_with_no_batch_dims_saveable)
    elif name != level:
        return fn
    return jax.checkpoint(fn, policy=kept)


def stacks(caches):
    """The arrays that held caches are in."""
    return jax.tree.map(lambda x: x.stack, caches, is_leaf=is_held)


def held(blocks):
    """The blocks as inference has them, whose loops pass on where a layer's weights are.

    On a GPU that is so of packed experts alone: XLA hands a product a slice by a loop's counter
    without a copy, and by another index copies it (one row of k3_mini on an H200: 5.6 and 7.5 ms
    a token, `benchmarks.decode`).
    """
    which = automatic("weights in loops of inference", "held", tpu="held", gpu="experts held")

    def choose(x):
        return hold(x) if isinstance(x, Packed) or which == "held" else x

    return jax.tree.map(choose, blocks, is_leaf=lambda x: isinstance(x, Packed))


def hold(tree):
    """Each array, which is stacked over groups and layers, as the first `Held` of its stack."""
    return jax.tree.map(lambda x: Held(x.reshape(-1, *x.shape[2:]), jnp.zeros((), jnp.int32)), tree)


def of_turn(layer, turn):
    """The weights of a stage's `turn`-th block, where it has them stacked (`k3_jax.pipeline`)."""
    if turn is None:
        return layer
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, turn, keepdims=False), layer)


def taken(layer):
    """A layer's own weights; packed experts go on to their kernel, which reads of the stack its
    part."""

    def take(x):
        return x.taken() if is_held(x) else x

    return jax.tree.map(take, layer, is_leaf=lambda x: isinstance(x, Held | Packed))
