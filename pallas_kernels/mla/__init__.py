"""Multi-head latent attention: one door for training and scoring, two for the cache.

Kimi K3 report, sec. 2.1.2: 192-wide queries and keys (128 + 64, no rotation), 128-wide values,
softmax in float32. The projections and the output gate belong to the layer.
"""

import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.mla import absorbed, blocks, cached, mosaic, reference, slots
from pallas_kernels.mla.sequence import expand, self_attention_sharded
from pallas_kernels.mla.slots import all_slots, over_slots

IMPLS = ("auto", "blocks", "pallas", "reference")
CACHED_IMPLS = ("auto", "blocks", "pallas")
ABSORBED_IMPLS = ("auto", "plain", "pallas")

__all__ = [
    "absorbed_attention",
    "all_slots",
    "cached_attention",
    "expand",
    "self_attention",
    "self_attention_sharded",
    "write_slots",
]


def self_attention(
    q_BTHq,
    k_BTHq,
    v_BTHv,
    segments_BT,
    *,
    scale,
    impl="auto",
    out_dtype=None,
    keep_largest=False,
):
    """o_t = sum over s <= t of the same non-zero segment of softmax(scale q_t.k_s) v_s.

    segments_BT is int32; 0 marks a pad. A pad's output and every gradient with respect to it are
    exactly 0, and what a pad holds (NaN too) reaches nothing. Scores are never held as [T, T].
    impl: "auto" is "pallas", TPU kernels, on TPU and "blocks" elsewhere; "reference" is the
    definition. out_dtype: q's dtype if None; float32 is what the sums are in.
    keep_largest: the result is (o, largest_H), with each head's largest scale q_t.k_s of a visible
    pair in float32, without a gradient; the least float32 where there is none. Softmax needs it.
    Raises ValueError for shapes, dtypes or an impl that do not fit.
    """
    _check_heads("self_attention", q_BTHq, k_BTHq, v_BTHv)
    _check_int("self_attention", "segments", segments_BT, q_BTHq.shape[:2])
    if k_BTHq.shape[1] != q_BTHq.shape[1]:
        raise ValueError(
            f"self_attention: {q_BTHq.shape[1]} queries but {k_BTHq.shape[1]} keys; "
            "a row attends to itself (cached_attention takes other keys)"
        )
    if impl not in IMPLS:
        raise ValueError(f"self_attention: impl={impl!r} is not one of {IMPLS}")
    if impl == "auto":
        impl = automatic("MLA self-attention", "blocks")
    out_dtype = q_BTHq.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if impl == "reference":
        args = (q_BTHq, k_BTHq, v_BTHv, segments_BT)
        o_BTHv = reference.self_attention(*args, scale=scale).astype(out_dtype)
        if not keep_largest:
            return o_BTHv
        return o_BTHv, reference.largest(q_BTHq, k_BTHq, segments_BT, scale=scale)
    real_BT11 = (segments_BT != 0)[..., None, None]
    q, k, v = (jnp.where(real_BT11, x, 0) for x in (q_BTHq, k_BTHq, v_BTHv))
    options = dict(scale=scale, out_dtype=out_dtype)
    if impl == "pallas":
        o_BTHv, largest_H = mosaic.attend_real(q, k, v, segments_BT, segments_BT, 0, **options)
    else:
        o_BTHv, largest_H = blocks.attend_causal(q, k, v, segments_BT, **options)
    return (o_BTHv, largest_H) if keep_largest else o_BTHv


def cached_attention(q_BTHq, latent_BMS, k_CHk, v_CHv, q_index_BT, *, scale, impl="auto"):
    """o_t = sum over slots s <= q_index_t of softmax(scale q_t.k_s) v_s, in q's dtype.

    For prefill in pieces: keys and values are those of `expand` of the slots. q_index_BT (int32)
    is the slot of each query's own token; a negative one marks a pad, whose output is 0. Slots
    after the last index of a row may hold anything, NaN too.
    impl: "blocks" expands all rows; "pallas" (TPU) one row at a time, and wants a row's queries in
    slots that follow each other, with pads behind them; "auto" is "pallas" on TPU.
    """
    _check_int("cached_attention", "q_index", q_index_BT, q_BTHq.shape[:2])
    if impl not in CACHED_IMPLS:
        raise ValueError(f"cached_attention: impl={impl!r} is not one of {CACHED_IMPLS}")
    if impl == "auto":
        impl = automatic("MLA cached attention", "blocks")
    attend = {"blocks": cached.attend_blocks, "pallas": cached.attend_rows}[impl]
    is_pad_BT11 = (q_index_BT < 0)[..., None, None]
    live_B1S = _live_slots(q_index_BT, latent_BMS.shape[2])[:, None]
    q_BTHq, latent_BMS = jnp.where(is_pad_BT11, 0, q_BTHq), jnp.where(live_B1S, latent_BMS, 0)
    o_BTHv = attend(q_BTHq, jnp.swapaxes(latent_BMS, 1, 2), k_CHk, v_CHv, q_index_BT, scale=scale)
    return jnp.where(is_pad_BT11, 0, o_BTHv)


def absorbed_attention(
    q_BTHC, q_pe_BTHr, latent_BMS, q_index_BT, *, scale, first=0, axis=None, impl="auto"
):
    """o_t = sum over slots s <= q_index_t of softmax(scale (q_t.c_s + q_pe_t.k_pe_s)) c_s.

    The decode form: M = C + r, a slot is [c | k_pe], shared by all heads. The query is already
    multiplied by the key half of kv_b, and the value half is applied to the result [B,T,H,C] by
    the caller. q_index_BT, pads and dead slots as in `cached_attention`.
    first: row b of the queries is row first + b (int32, traced) of a cache that may hold more rows,
    of other layers.
    axis: the mesh axis over which slots are dealt (`slots`), and H is split; inside shard_map.
    impl: "plain" is jnp; "pallas" a TPU kernel for up to 8 queries a row and C in multiples of
    128, without a gradient, which reads the live part of the cache once; "auto" is "pallas" on TPU
    for what it can take, else "plain". Raises ValueError for what does not fit.
    """
    (C, r), M = (q_BTHC.shape[-1], q_pe_BTHr.shape[-1]), latent_BMS.shape[1]
    if C + r != M or q_BTHC.shape[:3] != q_pe_BTHr.shape[:3]:
        raise ValueError(
            f"absorbed_attention: q {q_BTHC.shape} and q_pe {q_pe_BTHr.shape} must "
            f"agree in B, T, H and their widths must sum to the latent's M={M}"
        )
    _check_int("absorbed_attention", "q_index", q_index_BT, q_BTHC.shape[:2])
    if impl not in ABSORBED_IMPLS:
        raise ValueError(f"absorbed_attention: impl={impl!r} is not one of {ABSORBED_IMPLS}")
    q_BTHM = jnp.concatenate([q_BTHC, q_pe_BTHr], axis=-1)
    if impl == "auto":
        reason = absorbed.fits(q_BTHM, latent_BMS, C)
        impl = automatic("MLA absorbed attention", "plain", obstacle=reason)
    attend = absorbed.attend if impl == "pallas" else absorbed.attend_plain
    if axis is None:
        return attend(q_BTHM, latent_BMS, q_index_BT, scale=scale, C=C, first=first)

    def with_lse(q, index):
        return attend(q, latent_BMS, index, scale=scale, C=C, first=first, with_lse=True)

    return over_slots(with_lse, q_BTHM, q_index_BT, axis).astype(q_BTHC.dtype)


def write_slots(latent_BMS, new_BTM, slots_BT, *, first=0, axis=None, impl="auto"):
    """The cache with new_bt in slot slots_bt (int32) of its row first + b; where that is -1, a pad,
    or beyond the end, nothing is written.

    impl: "plain" is a scatter; "pallas" (TPU) wants the slots of a row to follow each other, with
    pads behind them, and writes them where they lie: beside a scatter XLA makes two copies of the
    cache, for it wants another layout. "auto" is "pallas" on TPU. axis as in `absorbed_attention`.
    """
    _check_int("write_slots", "slots", slots_BT, new_BTM.shape[:2])
    if impl not in ABSORBED_IMPLS:
        raise ValueError(f"write_slots: impl={impl!r} is not one of {ABSORBED_IMPLS}")
    if impl == "auto":
        impl = automatic("MLA cache write", "plain")
    put = {"plain": slots.write_plain, "pallas": slots.write}[impl]
    return put(latent_BMS, new_BTM.astype(latent_BMS.dtype), slots_BT, first, axis)


def _live_slots(q_index_BT, S):
    return jnp.arange(S) <= q_index_BT.max(axis=1, keepdims=True)


def _check_heads(door, q_BTHq, k_BSHq, v_BSHv):
    shapes = f"q {q_BTHq.shape}, k {k_BSHq.shape}, v {v_BSHv.shape}"
    if not q_BTHq.ndim == k_BSHq.ndim == v_BSHv.ndim == 4:
        raise ValueError(f"{door}: q, k, v must be [B,T,H,q], [B,S,H,q], [B,S,H,v]; got {shapes}")
    (B, _, H, width), S = q_BTHq.shape, k_BSHq.shape[1]
    if k_BSHq.shape != (B, S, H, width) or v_BSHv.shape[:3] != (B, S, H):
        raise ValueError(f"{door}: B, H, S and the q-k width must agree; got {shapes}")
    if not q_BTHq.dtype == k_BSHq.dtype == v_BSHv.dtype:
        raise ValueError(
            f"{door}: q, k, v must share one dtype; got {q_BTHq.dtype}, "
            f"{k_BSHq.dtype}, {v_BSHv.dtype}"
        )


def _check_int(door, name, x_BT, shape):
    if x_BT.shape != shape or not jnp.issubdtype(x_BT.dtype, jnp.integer):
        raise ValueError(
            f"{door}: {name} must be integers of shape {shape}; got {x_BT.dtype} {x_BT.shape}"
        )
