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
    """weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate), all in float32, back in x's dtype.

    Heads lie side by side on the last axis, each as wide as weight, with a mean of its own. The
    mean, and its way back to the head's channels, are float32 products with a matrix of 0 and 1: to
    give heads an axis of their own would make a TPU move all of x.
    """
    n, x32 = weight.shape[0], x.astype(jnp.float32)
    head_X = jnp.arange(x.shape[-1]) // n
    own_XH = (head_X[:, None] == jnp.arange(x.shape[-1] // n)).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    mean = jnp.einsum("...X,XH->...H", x32 * x32, own_XH, precision=exact) / n
    scale = jnp.einsum("...H,XH->...X", jax.lax.rsqrt(mean + eps), own_XH, precision=exact)
    gated = x32 * scale * jnp.tile(weight.astype(jnp.float32), x.shape[-1] // n)
    # Behind a barrier, or XLA for TPU computes all this anew for every tile of the next product.
    return jax.lax.optimization_barrier(
        (gated * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
    )
