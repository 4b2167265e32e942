"""A latent cache whose slots are dealt over a mesh axis: slot s is the (s // n)-th of device s % n.

Dealt and not cut into stretches, so that a row of any length has its slots on all devices alike.
All of it runs inside shard_map; None as the axis is a cache that is whole.
"""

import jax
import jax.numpy as jnp


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


def all_slots(latent_BSM, axis):
    """The cache of all devices in the order of slots."""
    if axis is None:
        return latent_BSM
    B, _, M = latent_BSM.shape
    return jax.lax.all_gather(latent_BSM, axis, axis=2).reshape(B, -1, M)


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
