"""What makes KDA's keys, queries and decay from their projections."""

import jax
import jax.numpy as jnp

F32 = jnp.float32
NORM_EPS = 1e-6


def l2_norm(x: jax.Array, eps: float = NORM_EPS) -> jax.Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, in float32 at least: a zero row stays zero."""
    x = x.astype(jnp.promote_types(x.dtype, F32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def log_decay(logit_BTHk, a_log_H, bias_Hk, lower_bound: float):
    """lower_bound * sigmoid(exp(a_log) * (logit + bias)), in float32 at least. Report Eq. 5.

    The natural log of each key channel's retention, in (lower_bound, 0).
    """
    logit_BTHk = logit_BTHk.astype(jnp.promote_types(logit_BTHk.dtype, F32))
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log_H)[:, None] * (logit_BTHk + bias_Hk))
