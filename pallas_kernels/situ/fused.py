"""SiTU-GLU and its gradient in forms short enough for one pass over memory.

With t = tanh(g / beta), S = beta sigmoid(g), v = tanh(u / lam), all in float32:

    y  = lam S t v
    dg = dy (lam / beta) S v (1 + t (beta - t - S))
    du = dy S t (1 - v^2)

XLA makes one fusion of each. The definition and its autodiff take up to 1.5 times as long: on
tpu7x their arithmetic outlasts the memory traffic (modelled, benchmarks).
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.situ.reference import largest_below


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def situ_glu(gate_x, up_x, beta, linear_beta):
    """The definition's values; what is kept for the backward pass is gate and up."""
    dtype = gate_x.dtype
    t_x, v_x = _tanh(gate_x, beta), _tanh(up_x, linear_beta)
    y_x = _sigmoid(gate_x, beta * linear_beta) * (t_x * v_x)
    top = largest_below(beta * linear_beta, dtype)
    return jnp.clip(y_x.astype(dtype), -top, top)


def _situ_glu_fwd(gate_x, up_x, beta, linear_beta):
    return situ_glu(gate_x, up_x, beta, linear_beta), (gate_x, up_x)


def _situ_glu_bwd(beta, linear_beta, saved, dy_x):
    gate_x, up_x = saved
    t_x, v_x = _tanh(gate_x, beta), _tanh(up_x, linear_beta)
    S_x = _sigmoid(gate_x, beta)
    dyS_x = dy_x.astype(jnp.float32) * S_x
    slope_x = 1 + t_x * ((beta - t_x) - S_x)
    dgate_x = (dyS_x * slope_x) * ((linear_beta / beta) * v_x)
    dup_x = (dyS_x * t_x) * (1 - v_x * v_x)
    # Each gradient is read by two matmuls. Left alone, XLA for TPU computes them anew inside both,
    # for every tile; behind a barrier once, where it can inside the matmul that gives dy.
    return jax.lax.optimization_barrier((dgate_x.astype(gate_x.dtype), dup_x.astype(up_x.dtype)))


situ_glu.defvjp(_situ_glu_fwd, _situ_glu_bwd)


def _tanh(x, scale):
    """tanh(x / scale) in float32."""
    return jnp.tanh(x.astype(jnp.float32) * (1 / scale))


def _sigmoid(gate_x, scale):
    """scale sigmoid(gate) in float32.

    Of a bfloat16 gate as scale / 2 (1 + tanh(gate / 2)), which asks the TPU's unit for
    transcendentals once and not twice. Its error, 1e-7 scale, is a larger part of small values,
    but down to gate = -12 a smaller one than the gate's own rounding made.
    """
    g_x = gate_x.astype(jnp.float32)
    if gate_x.dtype == jnp.float32:
        return scale * jax.nn.sigmoid(g_x)
    return scale / 2 + (scale / 2) * jnp.tanh(0.5 * g_x)
