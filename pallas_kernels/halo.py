"""What crosses the edges of time's shards, inside `jax.shard_map`.

T is split over a named mesh axis in contiguous pieces of one length, the row's start on index 0.
"""

import jax
import jax.numpy as jnp


def from_previous(x_BTx, axis, n=1):
    """The n rows that stand before this shard's first: the last of the shard before, [B, n, ...].

    Zeros on the first shard. Raises ValueError if a shard has fewer rows.
    """
    _check("from_previous", x_BTx, n)
    to_next = [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)]
    return _send(x_BTx[:, -n:], axis, to_next)


def from_next(x_BTx, axis, n=1):
    """The n rows that stand behind this shard's last: the first of the shard behind, [B, n, ...].

    Zeros on the last shard. Raises ValueError if a shard has fewer rows.
    """
    _check("from_next", x_BTx, n)
    to_previous = [(i + 1, i) for i in range(jax.lax.axis_size(axis) - 1)]
    return _send(x_BTx[:, :n], axis, to_previous)


def of_shard(x, index, axis):
    """x of the one shard (an integer or an array [B] of them), on every shard and of a type that
    does not vary over the axis. A sum: what stands on other shards may be NaN."""
    chosen = jnp.asarray(jax.lax.axis_index(axis) == index)
    chosen = chosen.reshape(chosen.shape + (1,) * (x.ndim - chosen.ndim))
    return jax.lax.psum(jnp.where(chosen, x, 0), axis)


def _send(x, axis, pairs):
    return jax.lax.ppermute(x, axis, pairs) if pairs else jnp.zeros_like(x)


def _check(name, x_BTx, n):
    if not 0 < n <= x_BTx.shape[1]:
        raise ValueError(
            f"{name}: {n} rows are wanted from a neighbour, but a shard of {x_BTx.shape} has "
            f"{x_BTx.shape[1]}; split T over fewer shards"
        )
