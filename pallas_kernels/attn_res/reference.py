"""MIX in jnp, by its definition."""

import functools

import jax
import jax.numpy as jnp

F32 = jnp.float32


# The backward pass keeps the candidates as they are, not their float32 copies (T31).
@functools.partial(jax.checkpoint, static_argnums=2)
def mix_reference(candidates, probe_D, eps, is_there_J):
    """sum_j softmax_j(row_j . probe / rms(row_j)) row_j over those there are; rows [B, T, D]."""
    weights_JBT = mix_weights(candidates, probe_D, is_there_J, eps=eps)
    mixed = sum(
        w_BT[..., None] * row.astype(F32) for w_BT, row in zip(weights_JBT, candidates, strict=True)
    )
    return mixed.astype(candidates[0].dtype)


def mix_weights(candidates, probe_D, is_there_J, *, eps):
    """weights_JBT = softmax_j(row_j . probe / rms(row_j)) over those there are, 0 for others."""
    scores = []
    for row_BTD in candidates:
        row = row_BTD.astype(F32)
        scale = jax.lax.rsqrt(jnp.mean(row * row, axis=-1) + eps)
        scores.append(jnp.einsum("BTD,D->BT", row, probe_D, precision="highest") * scale)
    return jax.nn.softmax(jnp.stack(scores), axis=0, where=is_there_J[:, None, None] != 0)
