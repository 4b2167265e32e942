"""Latent attention on a shard of the time axis: own queries, the latents of all shards."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask_info,
)

from pallas_kernels.common import automatic, vary, varying
from pallas_kernels.mla import blocks, splash

IMPLS = ("auto", "blocks", "splash")
EXPANDED_BYTES = 1 << 30  # of keys and values at a time
ATTENDED = "mla attended"


def self_attention_sharded(
    q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, *, scale, axis, impl="auto", keep_largest=False
):
    """`self_attention` of whole rows whose T is split over the mesh axis `axis`; inside shard_map.

    latent is [normed c | r shared by all heads]; a head's key is [k^T c | r], its value v^T c.
    Latents and segments of all shards are gathered, M numbers a token and not H times as many.
    Keys and values are then made from them for as many heads at a time as fit EXPANDED_BYTES, and
    made again in the backward pass. The gradient of the latents is summed in float32; those of k
    and v are each shard's own part.

    "splash" (TPU) and "blocks" as in `self_attention`. The kernels skip tiles behind the diagonal,
    which is where the shard's index puts it, so that shard i of n does (2 i + 1) / n^2 of the
    row's work and the time is that of the last: 2 - 1/n times an even split. "blocks" computes
    everything that it masks: on every shard as much as the last.
    keep_largest as in `self_attention`; of this shard's queries.
    Raises ValueError for shapes, dtypes or an impl that do not fit.
    """
    _check(q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, impl)
    if impl == "auto":
        impl = automatic("MLA self-attention over shards", "blocks", tpu="splash")
    splash_kernels = partial(attend_from, interpret=False, keep_largest=keep_largest)
    attend = {"blocks": _blocks, "splash": splash_kernels}[impl]
    found = attend_heads(attend, q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, scale, axis)
    return found if keep_largest else found[0]


def attend_heads(attend, q_BTHq, latent_BTM, k_CHk, v_CHv, segments_BT, scale, axis):
    """Heads by groups; attend(q, k, v, first_position, segments_BT, segments_BS, scale) -> o and
    largest_H, or None."""
    B, T, H, _ = q_BTHq.shape
    start = jax.lax.axis_index(axis) * T
    real_BT11 = (segments_BT != 0)[..., None, None]
    q_BTHq = jnp.where(real_BT11, q_BTHq, 0)
    latent_BSM = gathered(jnp.where(real_BT11[..., 0], latent_BTM, 0), axis)
    segments_BS = jax.lax.all_gather(segments_BT, axis, axis=1, tiled=True)

    def heads(q_BThq, k_Chk, v_Chv):
        k_BShq, v_BShv = expand(latent_BSM.astype(q_BTHq.dtype), k_Chk, v_Chv)
        return attend(q_BThq, k_BShq, v_BShv, start, segments_BT, segments_BS, scale)

    size = heads_at_a_time(B, segments_BS.shape[1], H, q_BTHq, v_CHv)
    if size == H:
        o_BTHv, largest_H = heads(q_BTHq, k_CHk, v_CHv)
    else:
        # What attention came to is kept, so that its forward kernel runs once.
        policy = jax.checkpoint_policies.save_only_these_names(ATTENDED)
        one = jax.checkpoint(lambda x: heads(*x), policy=policy, prevent_cse=False)
        groups = [_split(x, size) for x in (q_BTHq, k_CHk, v_CHv)]
        o_GBThv, largest_Gh = jax.lax.map(one, groups)
        o_BTHv = jnp.moveaxis(o_GBThv, 0, 2).reshape(B, T, H, -1)
        largest_H = None if largest_Gh is None else largest_Gh.reshape(H)
    return jnp.where(real_BT11, o_BTHv, 0), largest_H


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


def _blocks(q_BTHq, k_BSHq, v_BSHv, start, segments_BT, segments_BS, scale):
    return blocks.attend(
        q_BTHq, k_BSHq, v_BSHv, _last(start, segments_BT), segments_BT, segments_BS,
        scale=scale, out_dtype=q_BTHq.dtype,
    )  # fmt: skip


def _last(start, segments_BT):
    """The last key that each query sees: its own, -1 for a pad."""
    at_T = start + jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    return jnp.where(segments_BT != 0, at_T, -1)


def attend_from(
    q_BTHq, k_BSHq, v_BSHv, start, segments_BT, segments_BS, scale, *, interpret, keep_largest
):
    """Queries at positions start, start + 1, ... among the keys."""
    largest_H, at = None, (_last(start, segments_BT), segments_BT, segments_BS)
    if keep_largest:
        largest_H = blocks.largest(q_BTHq, k_BSHq, *at, scale=scale)
    T, lanes = q_BTHq.shape[1], splash.LANES
    tile = min(splash.TILE, -(-T // lanes) * lanes)
    q_BTHq = (q_BTHq.astype(jnp.float32) * scale).astype(q_BTHq.dtype)
    # Queries behind the shard's end have segment 0, whatever the next shard has there.
    queries = (splash.lengthen(x, -T % tile) for x in (q_BTHq, segments_BT))
    q_BTHq, segments_BT = queries
    keys = (splash.lengthen(x, -x.shape[1] % tile) for x in (k_BSHq, v_BSHv, segments_BS))
    args = (q_BTHq, *keys, segments_BT, start)
    axes = frozenset().union(*map(varying, args))
    return _attend(*(vary(x, axes) for x in args), tile, interpret)[:, :T], largest_H


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q_BTHq, k_BSHq, v_BSHv, segments_BS, segments_BT, start, tile, interpret):
    return _attend_fwd(q_BTHq, k_BSHq, v_BSHv, segments_BS, segments_BT, start, tile, interpret)[0]


def _attend_fwd(q_BTHq, k_BSHq, v_BSHv, segments_BS, segments_BT, start, tile, interpret):
    def run(q, k, v, *rest):
        heads = map(splash.swap_head_and_time, (q, k, v))
        o_BHTv, pullback = jax.vjp(lambda *qkv: _kernels(*qkv, *rest, tile, interpret), *heads)
        return splash.swap_head_and_time(o_BHTv), pullback

    return splash.unchecked(run, q_BTHq, k_BSHq, v_BSHv, segments_BS, segments_BT, start)


def _attend_bwd(tile, interpret, pullback, do_BTHv):
    return *splash._attend_bwd(tile, interpret, pullback, do_BTHv)[:3], None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _kernels(q_BHTq, k_BHSq, v_BHSv, segments_BS, segments_BT, start, tile, interpret):
    """The shipped kernels with a mask of our own: theirs are fixed when a program is made."""
    forward, backward = mask_tiles(start, q_BHTq.shape[2], k_BHSq.shape[2], tile)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.SplashAttentionKernel(
        forward, forward, backward,
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": tile for name in names}),
        is_mqa=False, save_residuals=False, attn_logits_soft_cap=None,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE, mask_function=_is_visible,
        residual_checkpoint_name=ATTENDED, interpret=interpret,
    )  # fmt: skip

    def row(q, k, v, segments_S, segments_T):
        ids = splash_attention_kernel.SegmentIds(segments_T, segments_S)
        return kernel(q, k, v, segment_ids=ids)

    return jax.vmap(row)(q_BHTq, k_BHSq, v_BHSv, segments_BS, segments_BT)


def _is_visible(query, key):
    return query >= key


def mask_tiles(start, T, S, tile):
    """What the kernels are told of a causal mask whose queries begin at position `start`.

    Which tiles [1, queries, keys] have a visible pair, and which tile to fetch at each step: a
    step that is skipped names one that is there already. For walks along the keys, and for those
    of the gradients of keys, along the queries. In scalar memory, hence the narrow types.
    """
    first = jnp.arange(T // tile, dtype=jnp.int32)[:, None]
    keys = jnp.arange(S // tile, dtype=jnp.int32)[None]
    at = start.astype(jnp.int32)
    last_key = (at + tile * (first + 1) - 1) // tile
    first_query = jnp.minimum(jnp.maximum(first, (tile * keys - at) // tile), T // tile - 1)
    visible = (keys <= last_key)[None].astype(jnp.int8)
    sequence = at + jnp.arange(T, dtype=jnp.int32)

    def info(fetched):
        return splash_attention_mask_info.MaskInfo(
            data_next=fetched[None].astype(jnp.int16), mask_next=None, block_mask=visible,
            partial_mask_blocks=None, q_sequence=sequence,
        )  # fmt: skip

    return info(jnp.minimum(keys, last_key)), info(first_query)


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
