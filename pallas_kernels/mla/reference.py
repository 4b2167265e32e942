"""Multi-head latent attention by its definition: full score matrices, float32, no blocks."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def _attend(scores_BHTS, visible_BTS, v_BSHv):
    """sum_s softmax_s(scores) v, over visible s only; 0 for a query that sees nothing."""
    visible_B1TS = visible_BTS[:, None]
    weights = jnp.where(visible_B1TS, jnp.exp(scores_BHTS - _peak(scores_BHTS, visible_B1TS)), 0.0)
    total = weights.sum(-1, keepdims=True)
    p_BHTS = weights / jnp.where(total == 0.0, 1.0, total)
    return jnp.einsum("BHTS,BSHv->BTHv", p_BHTS, v_BSHv, precision=HIGHEST)


def _peak(scores_BHTS, visible_B1TS):
    peak = jnp.where(visible_B1TS, scores_BHTS, -jnp.inf).max(-1, keepdims=True)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0.0))


def self_attention(q_BTHq, k_BTHq, v_BTHv, segments_BT, *, scale):
    """o_t = sum over s <= t of the same non-zero segment of softmax(scale q_t.k_s) v_s."""
    real_BT11 = (segments_BT != 0)[..., None, None]
    v_BTHv = jnp.where(real_BT11, v_BTHv.astype(jnp.float32), 0.0)
    return _attend(*_within(q_BTHq, k_BTHq, segments_BT, scale), v_BTHv).astype(q_BTHq.dtype)


def largest(q_BTHq, k_BTHq, segments_BT, *, scale):
    """Each head's largest scale q_t.k_s over the pairs that `self_attention` sees."""
    scores_BHTS, visible_BTS = _within(q_BTHq, k_BTHq, segments_BT, scale)
    least = jnp.finfo(jnp.float32).min
    return jnp.where(visible_BTS[:, None], scores_BHTS, least).max((0, 2, 3))


def _within(q_BTHq, k_BTHq, segments_BT, scale):
    """Scores of a row with itself, and which pairs are visible."""
    real_BT11 = (segments_BT != 0)[..., None, None]
    q, k = (jnp.where(real_BT11, x.astype(jnp.float32), 0.0) for x in (q_BTHq, k_BTHq))
    T = q.shape[1]
    causal_TS = jnp.arange(T)[:, None] >= jnp.arange(T)
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    visible_BTS = causal_TS & same_BTS & real_BT11[..., 0]
    return scale * jnp.einsum("BTHq,BSHq->BHTS", q, k, precision=HIGHEST), visible_BTS


def cached_attention(q_BTHq, k_BSHq, v_BSHv, q_index_BT, *, scale):
    """o_t = sum over slots s <= q_index_t of softmax(scale q_t.k_s) v_s."""
    q, k, v = (x.astype(jnp.float32) for x in (q_BTHq, k_BSHq, v_BSHv))
    visible_BTS = jnp.arange(k.shape[1]) <= q_index_BT[..., None]
    scores_BHTS = scale * jnp.einsum("BTHq,BSHq->BHTS", q, k, precision=HIGHEST)
    return _attend(scores_BHTS, visible_BTS, v).astype(q_BTHq.dtype)


def absorbed_attention(q_BTHC, q_pe_BTHr, latent_BSM, q_index_BT, *, scale):
    """o_t = sum over slots s <= q_index_t of softmax(scale (q_t.c_s + q_pe_t.k_pe_s)) c_s."""
    q, q_pe, latent = (x.astype(jnp.float32) for x in (q_BTHC, q_pe_BTHr, latent_BSM))
    C = q.shape[-1]
    c_BSC, k_pe_BSr = latent[..., :C], latent[..., C:]
    visible_BTS = jnp.arange(latent.shape[1]) <= q_index_BT[..., None]
    scores_BHTS = scale * (
        jnp.einsum("BTHC,BSC->BHTS", q, c_BSC, precision=HIGHEST)
        + jnp.einsum("BTHr,BSr->BHTS", q_pe, k_pe_BSr, precision=HIGHEST)
    )
    shape_BSHC = (*c_BSC.shape[:2], q.shape[2], C)
    c_BSHC = jnp.broadcast_to(c_BSC[:, :, None], shape_BSHC)
    return _attend(scores_BHTS, visible_BTS, c_BSHC).astype(q_BTHC.dtype)
