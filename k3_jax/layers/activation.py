"""SiTU-GLU, the activation of all three kinds of FFN."""

import jax
import jax.numpy as jnp


@jax.checkpoint
def situ_glu(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta). Report Eq. 12.

    In float32, back in gate's dtype; bounded by beta * linear_beta. Saves only its inputs.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    out = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear_beta * jnp.tanh(u / linear_beta)
    return out.astype(gate.dtype)
