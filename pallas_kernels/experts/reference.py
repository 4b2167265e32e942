"""Grouped matmul by its definition: one expert after the other, float32, every row each time."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_NL, w_ELF, sizes_E, preferred_element_type=None):
    """y_n = x_n w_e for the rows n of group e; rows after the last group give 0."""
    ends_E = jnp.cumsum(sizes_E)
    rows_N1 = jnp.arange(x_NL.shape[0])[:, None]
    y_NF = jnp.zeros((x_NL.shape[0], w_ELF.shape[2]), jnp.float32)
    for e in range(w_ELF.shape[0]):
        mine_N1 = (rows_N1 >= ends_E[e] - sizes_E[e]) & (rows_N1 < ends_E[e])
        x = jnp.where(mine_N1, x_NL.astype(jnp.float32), 0.0)
        y = jnp.matmul(x, w_ELF[e].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        y_NF = y_NF + jnp.where(mine_N1, y, 0.0)
    return y_NF.astype(preferred_element_type or x_NL.dtype)
