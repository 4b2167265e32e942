"""The definition of Kimi Delta Attention: one token at a time."""

import jax
import jax.numpy as jnp


def kda_reference(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, docs_BT):
    """For each t: S = diag(e^g) S;  S += beta k (v - S^T k)^T;  o = S^T q.  K3 report, sec. 2.1.1.

    Everything is computed in the state's dtype (float32, or float64 for an oracle). `docs_BT`
    counts the row's documents: the incoming state belongs to document 0, every later document
    starts from a zero state. A token with beta = 0 and g = 0 leaves the state as it is.
    """
    dtype, exact = state_BHkv.dtype, jax.lax.Precision.HIGHEST

    def token(carry, x):
        state_BHkv, last_B = carry
        q_BHk, k_BHk, v_BHv, g_BHk, beta_BH, doc_B = x
        decay_BHk = jnp.where((doc_B == last_B)[:, None, None], jnp.exp(g_BHk), 0)
        state_BHkv = state_BHkv * decay_BHk[..., None]
        error_BHv = v_BHv - jnp.einsum("BHk,BHkv->BHv", k_BHk, state_BHkv, precision=exact)
        state_BHkv += (beta_BH[..., None] * k_BHk)[..., None] * error_BHv[..., None, :]
        o_BHv = jnp.einsum("BHk,BHkv->BHv", q_BHk, state_BHkv, precision=exact)
        return (state_BHkv, doc_B), o_BHv

    floats = (x.astype(dtype) for x in (q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH))
    time_first = tuple(jnp.moveaxis(x, 1, 0) for x in (*floats, docs_BT))
    first_B = jnp.zeros_like(docs_BT[:, 0])
    (state_BHkv, _), o_TBHv = jax.lax.scan(token, (state_BHkv, first_B), time_first)
    return jnp.moveaxis(o_TBHv, 0, 1).astype(v_BTHv.dtype), state_BHkv
