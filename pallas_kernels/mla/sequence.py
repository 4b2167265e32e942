"""Latent attention on a shard of the time axis: own queries, the latents of all shards."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.mla import blocks, mosaic

IMPLS = ("auto", "blocks", "pallas")
EXPANDED_BYTES = 1 << 30  # of keys and values at a time


def self_attention_sharded(
    q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, *, scale, axis, impl="auto", keep_largest=False
):
    """`self_attention` of whole rows whose T is split over the mesh axis `axis`; inside shard_map.

    latent is [normed c | r shared by all heads]; a head's key is [k^T c | r], its value v^T c.
    Latents and segments of all shards are gathered, M numbers a token and not H times as many.
    Keys and values are then made from them for as many heads at a time as fit EXPANDED_BYTES, and
    made again in the backward pass. The gradient of the latents is summed in float32; those of k
    and v are each shard's own part.

    "pallas" (TPU) and "blocks" as in `self_attention`. The kernel skips blocks behind the diagonal,
    which is where the shard's index puts it, so that shard i of n does (2 i + 1) / n^2 of the
    row's work and the time is that of the last: 2 - 1/n times an even split. "blocks" computes
    everything that it masks: on every shard as much as the last.
    keep_largest as in `self_attention`; of this shard's queries.
    Raises ValueError for shapes, dtypes or an impl that do not fit.
    """
    _check(q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, impl)
    if impl == "auto":
        impl = automatic("MLA self-attention over shards", "blocks")
    attend = {"blocks": _blocks, "pallas": mosaic.attend_real}[impl]
    found = attend_heads(attend, q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, scale, axis)
    return found if keep_largest else found[0]


def attend_heads(attend, q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, scale, axis):
    """Heads by groups; attend(q, k, v, segments_BT, segments_BS, first_position, scale=scale) -> o
    and largest_H."""
    B, T, H, _ = q_BTHq.shape
    start = jax.lax.axis_index(axis) * T
    real_BT11 = (segments_BT != 0)[..., None, None]
    q_BTHq = jnp.where(real_BT11, q_BTHq, 0)
    latent_BSM = gathered(jnp.where(real_BT11[..., 0], latent_BTM, 0), axis)
    segments_BS = jax.lax.all_gather(segments_BT, axis, axis=1, tiled=True)

    def heads(q_BThq, k_Chk, v_Chv):
        k_BShq, v_BShv = expand(latent_BSM.astype(q_BTHq.dtype), k_Chk, v_Chv)
        return attend(q_BThq, k_BShq, v_BShv, segments_BT, segments_BS, start, scale=scale)

    size = heads_at_a_time(B, segments_BS.shape[1], H, q_BTHq, v_CHv)
    if size == H:
        o_BTHv, largest_H = heads(q_BTHq, k_CHk, v_CHv)
    else:
        # What attention came to is kept, so that its forward kernel runs once.
        policy = jax.checkpoint_policies.save_only_these_names(mosaic.ATTENDED)
        one = jax.checkpoint(lambda x: heads(*x), policy=policy, prevent_cse=False)
        groups = [_split(x, size) for x in (q_BTHq, k_CHk, v_CHv)]
        o_GBThv, largest_Gh = jax.lax.map(one, groups)
        o_BTHv = jnp.moveaxis(o_GBThv, 0, 2).reshape(B, T, H, -1)
        largest_H = largest_Gh.reshape(H)
    return o_BTHv, largest_H


def _split(x_Hx, size):
    """[..., H, x] -> [G, ..., size, x]"""
    groups = x_Hx.reshape(*x_Hx.shape[:-2], -1, size, x_Hx.shape[-1])
    return jnp.moveaxis(groups, -3, 0)


def heads_at_a_time(B, S, H, q_BTHq, v_CHv):
    """The most heads, a divisor of H, whose keys and values fit EXPANDED_BYTES; at least one."""
    a_head = B * S * (q_BTHq.shape[-1] + v_CHv.shape[-1]) * q_BTHq.dtype.itemsize
    fit = max(EXPANDED_BYTES // a_head, 1)
    return max(n for n in range(1, H + 1) if H % n == 0 and n <= fit)


def expand(latent_BSM, k_CHk, v_CHv):
    """Keys [k^T c | r] and values v^T c of the heads that k and v have, from rows [c | r]."""
    (C, H, _), (B, S, M) = k_CHk.shape, latent_BSM.shape
    c_BSC, shared_BS1r = latent_BSM[..., :C], latent_BSM[..., None, C:]
    precision = jax.lax.Precision.HIGHEST if latent_BSM.dtype == jnp.float32 else None
    k_BSHk = jnp.einsum("BSC,CHk->BSHk", c_BSC, k_CHk, precision=precision)
    v_BSHv = jnp.einsum("BSC,CHv->BSHv", c_BSC, v_CHv, precision=precision)
    shared_BSHr = jnp.broadcast_to(shared_BS1r, (B, S, H, M - C))
    return jnp.concatenate([k_BSHk, shared_BSHr], -1), v_BSHv


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x_BTM, axis):
    """x of all shards along time, as float32, though it travels as it is.

    Its gradient comes back in float32: it is a sum over heads and over all shards behind.
    """
    return jax.lax.all_gather(x_BTM, axis, axis=1, tiled=True).astype(jnp.float32)


def _gathered_fwd(x_BTM, axis):
    return gathered(x_BTM, axis), jnp.zeros((0,), x_BTM.dtype)


def _gathered_bwd(axis, like, dx_BSM):
    dx_BTM = jax.lax.psum_scatter(dx_BSM, axis, scatter_dimension=1, tiled=True)
    return (dx_BTM.astype(like.dtype),)


gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _blocks(q_BTHq, k_BSHq, v_BSHv, segments_BT, segments_BS, start, *, scale):
    return blocks.attend(
        q_BTHq, k_BSHq, v_BSHv, blocks.last_keys(segments_BT, start), segments_BT, segments_BS,
        scale=scale, out_dtype=q_BTHq.dtype,
    )  # fmt: skip


def _check(q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, impl):
    (B, T, H, q), (C, _, k) = q_BTHq.shape, k_CHk.shape
    wants = {
        "latent": (latent_BTM.shape, (B, T, C + q - k)),
        "k": (k_CHk.shape, (C, H, k)),
        "v": (v_CHv.shape, (C, H, v_CHv.shape[-1])),
        "segments": (segments_BT.shape, (B, T)),
    }
    for name, (got, want) in wants.items():
        if got != want:
            raise ValueError(
                f"self_attention_sharded: {name} has shape {got}; q {q_BTHq.shape} and "
                f"k {k_CHk.shape} want {want}"
            )
    dtypes = [x.dtype for x in (q_BTHq, latent_BTM, k_CHk, v_CHv)]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"self_attention_sharded: q, latent, k and v must share a dtype, got {dtypes}"
        )
    if impl not in IMPLS:
        raise ValueError(f"self_attention_sharded: impl={impl!r} is not one of {IMPLS}")
