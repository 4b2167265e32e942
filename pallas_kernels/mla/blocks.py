"""Attention by blocks of queries in plain jnp: one [block, S] score matrix at a time.

`jax.nn.dot_product_attention` is not used here: it demands equal key and value widths (192 and
128 in MLA), so the values would be padded by half, and it rounds its result to the query's type.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.common import dot32

SCORE_BYTES = 32 * 2**20  # one block of float32 scores
MAX_BLOCK = 256  # queries
PREFIXES = 4  # unrolled pieces of a causal row, each with its own key prefix


def attend(q_BTHq, k, v, last_BT, q_segments_BT, k_segments_BS, *, scale, out_dtype):
    """o_t = sum over visible s of softmax(scale q_t.k_s) v_s, softmax in float32; and largest_H.

    k is [B,S,H,q] and v [B,S,H,v], or both lack H and all heads share them. Key s is visible to
    query t iff s <= last_t and both segments agree. last_t < 0 sees nothing and returns 0.
    largest_H is each head's largest scale q_t.k_s of a visible pair, without a gradient: the
    softmax needs the largest of every query anyway. Where no pair is visible, the least float32.
    """
    B, T, H, _ = q_BTHq.shape
    block = query_block(B, T, H, k.shape[1])
    one = partial(_attend_block, k, v, k_segments_BS, scale, out_dtype)
    if block == T:
        return jax.checkpoint(one)(q_BTHq, last_BT, q_segments_BT)
    # Without the checkpoint the backward pass would keep every block's scores: [T, S] again.
    body = jax.checkpoint(lambda xs: one(*xs), prevent_cse=False)
    o_nBbHv, largest_nH = jax.lax.map(body, _queries(block, q_BTHq, last_BT, q_segments_BT))
    o_BTHv = jnp.moveaxis(o_nBbHv, 0, 1).reshape(B, -1, H, v.shape[-1])[:, :T]
    return o_BTHv, jnp.max(largest_nH, axis=0)


def attend_causal(q_BTHq, k_BTHq, v_BTHv, segments_BT, *, scale, out_dtype):
    """`attend` with last_t = t for real rows and -1 for pads (segment 0)."""
    B, T, H, _ = q_BTHq.shape
    block = query_block(B, T, H, T)
    piece = -(-T // (PREFIXES * block)) * block
    last_BT = last_keys(segments_BT)
    outs, largest = [], []
    for start in range(0, T, piece):
        end = min(start + piece, T)
        q, last, segments = (x[:, start:end] for x in (q_BTHq, last_BT, segments_BT))
        keys = (x[:, :end] for x in (k_BTHq, v_BTHv))
        rest = (last, segments, segments_BT[:, :end])
        o_BtHv, largest_H = attend(q, *keys, *rest, scale=scale, out_dtype=out_dtype)
        outs.append(o_BtHv)
        largest.append(largest_H)
    return jnp.concatenate(outs, axis=1), jnp.max(jnp.stack(largest), axis=0)


def last_keys(segments_BT, start=0):
    """The last key that each query sees: its own, where the first query is at `start`; a pad -1."""
    at_T = start + jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    return jnp.where(segments_BT != 0, at_T, -1)


def query_block(B, T, H, S):
    """Queries per block: a power of two whose scores fit SCORE_BYTES, or T if that is less."""
    fits = max(1, SCORE_BYTES // (4 * B * H * S))
    return min(T, MAX_BLOCK, 2 ** int(math.log2(fits)))


def _scores(k, k_segments_BS, scale, q_BTHq, last_BT, q_segments_BT):
    head = "H" if k.ndim == 4 else ""
    slots_S = jnp.arange(k.shape[1], dtype=last_BT.dtype)
    visible_BTS = slots_S <= last_BT[..., None]
    visible_BTS &= q_segments_BT[..., None] == k_segments_BS[:, None]
    scores_BHTS = scale * dot32(f"BTHq,BS{head}q->BHTS", q_BTHq, k)
    # A finite stand-in for -inf: a query that sees nothing gets a mean here and 0 below, never NaN.
    return jnp.where(visible_BTS[:, None], scores_BHTS, jnp.finfo(jnp.float32).min)


def _largest(scores_BHTS):
    # Of each query first, as the softmax does, so that the two share one pass over the scores.
    scores_BHTS = jax.lax.stop_gradient(scores_BHTS)
    largest_BHT1 = jnp.max(scores_BHTS, axis=-1, keepdims=True, initial=-jnp.inf)
    return jnp.max(largest_BHT1, axis=(0, 2, 3))


def _attend_block(k, v, k_segments_BS, scale, out_dtype, q_BTHq, last_BT, q_segments_BT):
    head = "H" if k.ndim == 4 else ""
    scores_BHTS = _scores(k, k_segments_BS, scale, q_BTHq, last_BT, q_segments_BT)
    p_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v.dtype)
    o_BTHv = dot32(f"BHTS,BS{head}v->BTHv", p_BHTS, v)
    o_BTHv = jnp.where((last_BT >= 0)[..., None, None], o_BTHv, 0.0).astype(out_dtype)
    return o_BTHv, _largest(scores_BHTS)


def _queries(block, q_BTHq, last_BT, q_segments_BT):
    cut = partial(_cut, n=-(-q_BTHq.shape[1] // block), block=block)
    return cut(q_BTHq, fill=0), cut(last_BT, fill=-1), cut(q_segments_BT, fill=0)


def _cut(x_BT, *, n, block, fill):
    """[B,T,...] -> [n,B,block,...], padded at the end with `fill`."""
    B, T = x_BT.shape[:2]
    widths = [(0, 0), (0, n * block - T)] + [(0, 0)] * (x_BT.ndim - 2)
    x_BT = jnp.pad(x_BT, widths, constant_values=fill)
    return jnp.moveaxis(x_BT.reshape(B, n, block, *x_BT.shape[2:]), 1, 0)
