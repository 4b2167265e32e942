"""Attention Residuals: a sub-layer reads a learned mixture of the stream's earlier sums."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import ones, read, weight, zeros
from k3_jax.config import ModelConfig

F32 = jnp.float32


class AttnRes(nnx.Module):
    """MIX of k3-facts 3.3 (report Eq. 8-10): softmax over candidates j of key_j . (norm * query).

    key_j is the candidate's row over its root mean square; the values are the rows themselves.
    The query starts at zero, so that a fresh model averages its candidates (what K3 started from
    is not published).
    """

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        dims = dict(D=c.width)
        self.eps = c.norm_eps
        self.norm_D = weight(rngs, "D", dims, c.param_dtype, ones)
        self.query_D = weight(rngs, "D", dims, c.param_dtype, zeros)

    def __call__(self, candidates: tuple[jax.Array, ...]):
        """J rows [B, T, D], oldest first -> their mixture [B, T, D]; a lone one is its own."""
        if len(candidates) == 1:
            return candidates[0]
        probe_D = read(self.norm_D, F32) * read(self.query_D, F32)
        return _mix(candidates, probe_D, self.eps)


# The backward pass keeps the candidates as they are, not their float32 copies (T31).
@functools.partial(jax.checkpoint, static_argnums=2)
def _mix(candidates, probe_D, eps):
    scores = []
    for row_BTD in candidates:
        row = row_BTD.astype(F32)
        scale = jax.lax.rsqrt(jnp.mean(row * row, axis=-1) + eps)
        scores.append(jnp.einsum("BTD,D->BT", row, probe_D, precision="highest") * scale)
    weights_JBT = jax.nn.softmax(jnp.stack(scores), axis=0)
    mixed = sum(
        w_BT[..., None] * row.astype(F32) for w_BT, row in zip(weights_JBT, candidates, strict=True)
    )
    return mixed.astype(candidates[0].dtype)
