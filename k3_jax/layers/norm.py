"""Root-mean-square norms."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * round(x / sqrt(mean(x^2) + eps)) over the last axis. k3-facts 3.1.

    Statistics in float32; rounded to x's dtype before the weight multiplies, as released.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * (x32 * scale).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate), all in float32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    gated = x32 * scale * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return gated.astype(x.dtype)
