"""The definition of a KDA decode step: a few tokens for each row, one after the other, in jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gate import l2_norm, log_decay

F32 = jnp.float32


def kda_decode_reference(
    q_BtHk,
    k_BtHk,
    v_BtHv,
    logit_BtHk,
    beta_BtH,
    gate_BtHv,
    q_taps_WHk,
    k_taps_WHk,
    v_taps_WHv,
    a_log_H,
    bias_Hk,
    out_norm_v,
    state_BHkv,
    q_past_BWHk,
    k_past_BWHk,
    v_past_BWHv,
    active_B,
    accept_B=None,
    *,
    lower_bound: float,
    eps: float,
):
    """What `kda_decode` computes (same arguments and results), with nothing fused. k3-facts 3.4.

    Keeps every state and picks one per row at the end: t + 1 copies of the states in memory.
    """
    t = q_BtHk.shape[1]
    exact = jax.lax.Precision.HIGHEST
    accept_B = jnp.full(active_B.shape, t) if accept_B is None else accept_B
    accept_B = jnp.where(active_B, jnp.clip(accept_B, 0, t), 0)

    def kept(all_bB, axis):
        """all_bB[accept] for each row, where `axis` counts the accepted tokens."""
        rows = jnp.moveaxis(all_bB, axis, 1)
        return rows[jnp.arange(rows.shape[0]), accept_B]

    q_BtHk, q_pasts = _conv(q_BtHk, q_taps_WHk, q_past_BWHk)
    k_BtHk, k_pasts = _conv(k_BtHk, k_taps_WHk, k_past_BWHk)
    v_BtHv, v_pasts = _conv(v_BtHv, v_taps_WHv, v_past_BWHv)
    q_BtHk = l2_norm(q_BtHk) * q_BtHk.shape[-1] ** -0.5
    k_BtHk = l2_norm(k_BtHk)
    decay_BtHk = jnp.exp(log_decay(logit_BtHk, a_log_H, bias_Hk, lower_bound))
    beta_BtH = jax.nn.sigmoid(beta_BtH.astype(F32))

    S, states, outs = state_BHkv, [state_BHkv], []
    for n in range(t):
        k_BHk = k_BtHk[:, n]
        S = S * decay_BtHk[:, n, :, :, None]
        error_BHv = v_BtHv[:, n] - jnp.einsum("BHk,BHkv->BHv", k_BHk, S, precision=exact)
        S = S + k_BHk[..., None] * (beta_BtH[:, n, :, None] * error_BHv)[:, :, None]
        states.append(S)
        outs.append(jnp.einsum("BHk,BHkv->BHv", q_BtHk[:, n], S, precision=exact))

    o_BtHv = jnp.stack(outs, axis=1).astype(gate_BtHv.dtype).astype(F32)
    o_BtHv = o_BtHv * jax.lax.rsqrt(jnp.mean(o_BtHv**2, axis=-1, keepdims=True) + eps)
    y_BtHv = o_BtHv * out_norm_v * jax.nn.sigmoid(gate_BtHv.astype(F32))
    y_BtHv = jnp.where(active_B[:, None, None, None], y_BtHv, 0).astype(gate_BtHv.dtype)
    return y_BtHv, kept(jnp.stack(states), 0), *(kept(p, 0) for p in (q_pasts, k_pasts, v_pasts))


def _conv(u_BtHx, taps_WHx, past_BWHx):
    """SiLU(sum_w taps[w] u[t - W + 1 + w]) rounded to u's dtype, and the pasts after 0 .. t."""
    W, t = taps_WHx.shape[0], u_BtHx.shape[1]
    u_BtHx = jnp.concatenate([past_BWHx, u_BtHx], axis=1)
    windows = [u_BtHx[:, w : w + t].astype(F32) * taps_WHx[w] for w in range(W)]
    y_BtHx = jax.nn.silu(sum(windows)).astype(u_BtHx.dtype).astype(F32)
    return y_BtHx, jnp.stack([u_BtHx[:, n : n + W - 1] for n in range(t + 1)])
