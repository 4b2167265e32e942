"""Fake devices as ranks of an exchange, and the exchange that CPU lacks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(**sizes):
    n = int(np.prod(list(sizes.values())))
    axis_types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types, devices=jax.devices()[:n])


def documented_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What the documentation of `jax.lax.ragged_all_to_all` says, for CPU, which lacks it (T20).

    NaN (or the largest integer) where a sender and a receiver disagree on a size, or a slice lies
    outside an array.
    """
    R = jax.lax.axis_size(axis_name)
    rank = jax.lax.axis_index(axis_name)
    gathered = [
        jax.lax.all_gather(a, axis_name)
        for a in (operand, input_offsets, send_sizes, output_offsets)
    ]
    result, n_from, n_to = output, operand.shape[0], output.shape[0]
    is_float = jnp.issubdtype(operand.dtype, jnp.inexact)
    fault = jnp.asarray(jnp.nan if is_float else jnp.iinfo(operand.dtype).max, operand.dtype)
    per_rank = len(recv_sizes) // R
    for i in range(len(recv_sizes)):
        source, j = i // per_rank, rank * per_rank + i % per_rank
        start, size, to = (a[source, j] for a in gathered[1:])
        inside = jnp.arange(n_to) - to
        row = gathered[0][source][jnp.clip(start + inside, 0, n_from - 1)]
        is_wrong = (size != recv_sizes[i]) | (start + size > n_from) | (to + size > n_to)
        is_wrong |= (start < 0) | (to < 0)
        came = ((inside >= 0) & (inside < size)).reshape(-1, *(1,) * (operand.ndim - 1))
        result = jnp.where(is_wrong, fault, jnp.where(came, row, result))
    return result


def on_ranks(local, mesh, *axes):
    """`local` on each device's part of its arguments, whose first axes are split over `axes`."""
    spec = P(*axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(lambda *args: mapped(*(jax.reshard(a, NamedSharding(mesh, spec)) for a in args)))
