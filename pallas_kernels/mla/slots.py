"""A latent cache whose slots are dealt over a mesh axis: slot s is the (s // n)-th of device s % n.

Dealt and not cut into stretches, so that a row of any length has its slots on all devices alike.
All of it runs inside shard_map; None as the axis is a cache that is whole.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying

LANES = 128


def own_slots(slots, axis):
    """Where this device holds each slot; -1 for a slot of another device, and for -1, a pad."""
    if axis is None:
        return slots
    n = jax.lax.axis_size(axis)
    is_own = (slots >= 0) & (slots % n == jax.lax.axis_index(axis))
    return jnp.where(is_own, slots // n, -1)


def last_own_slots(slots, axis):
    """The last place here whose slot is not after the given one; negative where there is none."""
    return (slots - jax.lax.axis_index(axis)) // jax.lax.axis_size(axis)


def all_slots(latent_BMS, axis):
    """The cache of all devices in the order of slots."""
    if axis is None:
        return latent_BMS
    B, M, _ = latent_BMS.shape
    return jax.lax.all_gather(latent_BMS, axis, axis=3).reshape(B, M, -1)


def over_slots(attend, q_BTHM, q_index_BT, axis):
    """attend(q, q_index) -> (o_BTHC, lse_BTH) over the slots of each device, put together.

    Queries come with this device's heads, and so does the result, float32: a device sees all heads
    on its own slots, and gets its heads back with the weights of a softmax over devices.
    """
    n, (B, T, h, _) = jax.lax.axis_size(axis), q_BTHM.shape
    q_BTHM = jax.lax.all_gather(q_BTHM, axis, axis=2, tiled=True)
    parts = attend(q_BTHM, last_own_slots(q_index_BT, axis))
    # Heads [n h] -> [n, h], and n from the heads' devices to the slots'.
    o_nBThC, lse_nBTh = (
        jax.lax.all_to_all(jnp.moveaxis(x.reshape(B, T, n, h, *x.shape[3:]), 2, 0), axis, 0, 0)
        for x in parts
    )
    return jnp.sum(jax.nn.softmax(lse_nBTh, axis=0)[..., None] * o_nBThC, axis=0)


def write_plain(latent_BMS, new_BTM, slots_BT, first, axis):
    """`pallas_kernels.mla.write_slots` in jnp."""
    rows, places_BT = first + jnp.arange(len(new_BTM)), own_slots(slots_BT, axis)
    # What is not written here has place -1, which would wrap; one past the end is dropped.
    places_BT = jnp.where(places_BT < 0, latent_BMS.shape[2], places_BT)
    return latent_BMS.at[rows[:, None], :, places_BT].set(new_BTM, mode="drop")


def write(latent_BMS, new_BTM, slots_BT, first, axis, interpret=False):
    """The same on a TPU: the few blocks of 128 places that hold a row's slots are read, changed and
    put back."""
    (B, T, M), S = new_BTM.shape, latent_BMS.shape[2]
    n, device = (1, 0) if axis is None else (jax.lax.axis_size(axis), jax.lax.axis_index(axis))
    lanes = LANES if S % LANES == 0 else S
    blocks = min(pl.cdiv(pl.cdiv(T, n), lanes) + 1, S // lanes)
    start_B1, count_B1 = slots_BT[:, :1], jnp.sum(slots_BT >= 0, axis=1, keepdims=True)
    # The blocks from the one with the first place that may be written on; none beyond the end.
    block_B = jnp.clip(start_B1[:, 0] // n // lanes, 0, S // lanes - blocks)
    place_BS = block_B[:, None] * lanes + jnp.arange(blocks * lanes)
    from_BS = place_BS * n + device - start_B1
    is_new_BS = (from_BS >= 0) & (from_BS < count_B1)
    new_BSM = jnp.take_along_axis(new_BTM, jnp.clip(from_BS, 0, T - 1)[..., None], axis=1)
    where = block_B, jnp.full(1, first, jnp.int32)
    args = (*where, is_new_BS[:, None].astype(jnp.int32), jnp.swapaxes(new_BSM, 1, 2), latent_BMS)
    axes = frozenset().union(*map(varying, args))
    args = [vary(x, axes) for x in args]

    def at(rows, width):
        """The block of a row, counted from its first one or in the whole cache."""
        index = (lambda b, j, *_: (b, 0, j)) if rows is None else rows
        return pl.BlockSpec((1, width, lanes), index)

    def in_cache(b, j, block, first):
        return first[0] + b, 0, block[b] + j

    return pl.pallas_call(
        _write_kernel,
        name="write_slots",
        out_shape=jax.ShapeDtypeStruct(
            latent_BMS.shape,
            latent_BMS.dtype,
            manual_axis_type=jax.typeof(args[-1]).manual_axis_type,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, blocks),
            in_specs=[at(None, 1), at(None, M), at(in_cache, M)],
            out_specs=at(in_cache, M),
        ),
        input_output_aliases={4: 0},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=B * blocks * lanes * (3 * M * latent_BMS.dtype.itemsize + 4),
        ),
        interpret=interpret,
    )(*args)


def _write_kernel(_, __, is_new_1S, new_MS, old_MS, out_MS):
    out_MS[0] = jnp.where(is_new_1S[0] != 0, new_MS[0], old_MS[0])
