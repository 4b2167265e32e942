"""SiTU-GLU by its definition, and the bound of its rounded values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@partial(jax.checkpoint, static_argnums=(2, 3))
def situ_glu(gate_x, up_x, beta, linear_beta):
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), in gate's dtype.

    Autodiff of this, by which gradients are judged, takes no notice of the clip: it only undoes a
    rounding.
    """
    g_x, u_x = gate_x.astype(jnp.float32), up_x.astype(jnp.float32)
    y_x = beta * jnp.tanh(g_x / beta) * jax.nn.sigmoid(g_x)
    y_x *= linear_beta * jnp.tanh(u_x / linear_beta)
    top = largest_below(beta * linear_beta, gate_x.dtype)
    y_x += jax.lax.stop_gradient(jnp.clip(y_x, -top, top) - y_x)
    return y_x.astype(gate_x.dtype)


def largest_below(bound, dtype):
    """The largest number of `dtype` below `bound`, as a float."""
    nearest = np.asarray(bound, dtype)
    below = nearest if float(nearest) < bound else np.nextafter(nearest, np.zeros_like(nearest))
    return float(below)
