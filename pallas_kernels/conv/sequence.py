"""The short causal convolution on a shard of the time axis."""

import jax
import jax.numpy as jnp

from pallas_kernels import halo
from pallas_kernels.conv.reference import first_segment, history_after


def short_conv_sharded(u_BTX, taps_WX, history_BWX, segments_BT, *, axis, impl="auto"):
    """`short_conv` of whole rows whose T is split over the mesh axis `axis`; inside shard_map.

    history is that of the row, and the same on all shards. Each shard gets the last W - 1 inputs
    and segments of the one before it, wherever a document or a pad begins or ends. A document's
    tokens stand together: one that goes on behind another document sees nothing across an edge.
    Returns y of this shard, and the history after the row, the same on all shards and in its
    type too. As in `short_conv`, rows are padded on the right only where that is used; whole
    shards may be pads. The gradient of the history comes from the first shard.
    Raises ValueError for a shard of fewer than W - 1 tokens, and as `short_conv`.
    """
    # The door imports this module.
    from pallas_kernels.conv import short_conv

    n = len(taps_WX) - 1
    is_first = jax.lax.axis_index(axis) == 0
    before_BnX = halo.from_previous(u_BTX, axis, n)
    owner_Bn = halo.from_previous(segments_BT, axis, n)

    def channels(x_Bn):
        return x_Bn.reshape(x_Bn.shape + (1,) * (u_BTX.ndim - 2))

    # The wider of the two, for a row shorter than the history hands some of it on as it came.
    dtype = jnp.promote_types(u_BTX.dtype, history_BWX.dtype)
    before_BnX = jnp.where(channels(owner_Bn != 0), before_BnX, 0).astype(dtype)
    before_BnX = jnp.where(is_first, history_BWX.astype(dtype), before_BnX)
    # The door gives a history to the first document: what belongs to another is none.
    same_Bn = is_first | (owner_Bn == first_segment(segments_BT))
    seen_BnX = jnp.where(channels(same_Bn), before_BnX, 0)
    y_BTX, _ = short_conv(u_BTX, taps_WX, seen_BnX, segments_BT, impl=impl)
    return y_BTX, _after_the_row(u_BTX, before_BnX, segments_BT, axis).astype(history_BWX.dtype)


def _after_the_row(u_BTX, before_BnX, segments_BT, axis):
    after_BnX = history_after(u_BTX, before_BnX, segments_BT)
    # Of the shard with the row's last real token; of the first if all are pads.
    index = jax.lax.axis_index(axis)
    last_B = jax.lax.pmax(jnp.where(jnp.any(segments_BT != 0, 1), index, 0), axis)
    return halo.of_shard(after_BnX, last_B, axis)
