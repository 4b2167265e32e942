"""Attention Residuals: a sub-layer reads a learned mixture of the stream's earlier sums."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import ones, read, weight, zeros
from k3_jax.config import ModelConfig
from pallas_kernels.attn_res import mix, mix_weights
from sharding import on_shards

F32 = jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bank:
    """The sums of the blocks before this one, oldest first, the embedding among them.

    rows: [B, T, D] each. is_there: for each row a bool, or 1, whether it has been made yet.
    """

    rows: tuple = ()
    is_there: tuple = ()


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

    def __call__(self, sum_BTD, bank: Bank, has_sum):
        """The mixture [B, T, D] of the bank's rows and, where `has_sum`, of the running sum."""
        return self._run(mix, "BTD", sum_BTD, bank, has_sum)

    def weights(self, sum_BTD, bank: Bank, has_sum):
        """weights_JBT of the mixture: of the running sum, then of the bank's rows."""
        return self._run(mix_weights, "JBT", sum_BTD, bank, has_sum)

    def _run(self, fn, letters, sum_BTD, bank, has_sum):
        rows, there = (sum_BTD, *bank.rows), (has_sum, *bank.is_there)
        is_there_J = jnp.stack([jnp.asarray(x, jnp.int32) for x in there])
        probe_D = read(self.norm_D, F32) * read(self.query_D, F32)

        def run(*args):
            return fn(args[:-2], *args[-2:], eps=self.eps)

        # A Pallas call needs shard_map.
        signature = ",".join(["BTD"] * len(rows)) + f",D,. -> {letters}"
        return on_shards(run, signature)(*rows, probe_D, is_there_J)
