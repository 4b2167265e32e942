"""Attention Residuals: a sub-layer reads a learned mixture of the stream's earlier sums."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import ones, read, weight, zeros
from k3_jax.config import ModelConfig
from pallas_kernels.attn_res import mix
from sharding import on_shards

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

        def run(*args):
            return mix(args[:-1], args[-1], eps=self.eps)

        # A Pallas call needs shard_map.
        signature = ",".join(["BTD"] * len(candidates)) + ",D -> BTD"
        return on_shards(run, signature)(*candidates, probe_D)
