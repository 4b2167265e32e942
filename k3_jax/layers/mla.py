"""Gated multi-head latent attention without positions."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import Held, einsum, normal, ones, read, weight
from k3_jax.config import ModelConfig
from k3_jax.layers.norm import rms_norm
from k3_jax.state import MlaCache, Rows
from pallas_kernels.mla import (
    absorbed_attention,
    all_slots,
    cached_attention,
    expand,
    self_attention,
    self_attention_sharded,
    write_slots,
)
from sharding import ACTIVATION, TOKENS, on_shards, present


class Mla(nnx.Module):
    """y = W_o (attention(q, k, v) * sigmoid(W_g x)), keys and values from a latent. k3-facts 3.5.

    A head's key is [k from the latent | r shared by all heads]; there is no rotation.
    """

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        m = c.mla
        dims = dict(D=c.width, H=m.n_heads, Q=m.query_latent, C=m.kv_latent, k=m.key_dim)
        dims |= dict(
            v=m.value_dim, q=m.key_dim + m.shared_key_dim, M=m.kv_latent + m.shared_key_dim
        )

        def matrix(letters):
            return weight(rngs, letters, dims, c.param_dtype, normal(c.init_std))

        self.config = c
        self.q_a_DQ, self.q_b_QHq = matrix("DQ"), matrix("QHq")
        self.kv_a_DM, self.k_b_CHk, self.v_b_CHv = matrix("DM"), matrix("CHk"), matrix("CHv")
        self.gate_DHv, self.out_HvD = matrix("DHv"), matrix("HvD")
        self.q_norm_Q = weight(rngs, "Q", dims, c.param_dtype, ones)
        self.kv_norm_C = weight(rngs, "C", dims, c.param_dtype, ones)

    def __call__(self, x_BTD, rows: Rows, cache: MlaCache | None):
        """x_BTD -> y_BTD and the cache with the rows' tokens in it; the cache's array is Held.

        Without a cache, with rows.keep_largest, in its place each head's largest logit of the call.
        """
        eps, C = self.config.mla.latent_norm_eps, self.config.mla.kv_latent
        q_BTQ = rms_norm(einsum("BTD,DQ->BTQ", x_BTD, self.q_a_DQ), read(self.q_norm_Q), eps)
        q_BTHq = einsum("BTQ,QHq->BTHq", q_BTQ, self.q_b_QHq)
        kv_BTM = einsum("BTD,DM->BTM", x_BTD, self.kv_a_DM)
        c_BTC = rms_norm(kv_BTM[..., :C], read(self.kv_norm_C), eps)
        latent_BTM = jnp.concatenate([c_BTC, kv_BTM[..., C:]], axis=-1)
        if cache is None:
            o_BTHv, *cache = self._within_rows(q_BTHq, latent_BTM, rows)
            cache = cache[0] if cache else None
        else:
            write, held = on_shards(_write, "ZBMS,,BTM,BT -> ZBMS"), cache.latent_BMS
            held = Held(write(held.stack, held.index, latent_BTM, rows.slots_BT), held.index)
            cache = MlaCache(held)
            read_cache = self._absorbed if q_BTHq.shape[1] == 1 else self._expanded
            o_BTHv = read_cache(q_BTHq, held, rows)
        gate_BTHv = jax.nn.sigmoid(einsum("BTD,DHv->BTHv", x_BTD, self.gate_DHv))
        return einsum("BTHv,HvD->BTD", o_BTHv * gate_BTHv, self.out_HvD), cache

    @property
    def scale(self) -> float:
        return (self.config.mla.key_dim + self.config.mla.shared_key_dim) ** -0.5

    def _within_rows(self, q_BTHq, latent_BTM, rows):
        """Attention among a call's own tokens, each document by itself: (o_BTHv,), or with
        rows.keep_largest (o_BTHv, largest_H)."""
        keep, options = rows.keep_largest, dict(scale=self.scale, keep_largest=rows.keep_largest)

        def attend(q, latent, segments, *key_value_b):
            if present(("seq",)):
                found = self_attention_sharded(
                    q, latent, *key_value_b, segments, axis="seq", **options
                )
            else:
                found = self_attention(q, *expand(latent, *key_value_b), segments, **options)
            if not keep:
                return found
            o, largest = found
            return o, jax.lax.pmax(largest, present(TOKENS)) if present(TOKENS) else largest

        found = on_shards(attend, "BTHq,BTM,BT,CHk,CHv -> BTHv" + ",H" * keep)(
            q_BTHq, latent_BTM, rows.segments_BT, *self._key_value_b(q_BTHq.dtype)
        )
        return found if keep else (found,)

    def _expanded(self, q_BTHq, held, rows):
        """A piece of a prompt against the whole cache, keys and values widened from the latent."""

        def attend(q, latent, slots, *key_value_b):
            latent = all_slots(latent, _dealt_over())
            return cached_attention(q, latent, *key_value_b, slots, scale=self.scale)

        return on_shards(attend, "BTHq,BMS,BT,CHk,CHv -> BTHv")(
            q_BTHq, held.taken(), rows.slots_BT, *self._key_value_b(q_BTHq.dtype)
        )

    def _key_value_b(self, dtype):
        return read(self.k_b_CHk, dtype), read(self.v_b_CHv, dtype)

    def _absorbed(self, q_BTHq, held, rows):
        """One token against the cache as it is: W_uk goes into the query, W_uv after the sum."""
        k = self.config.mla.key_dim
        q_BTHC = einsum("BTHk,CHk->BTHC", q_BTHq[..., :k], self.k_b_CHk)

        def attend(q, q_shared, latent_ZBMS, index, slots):
            rows, where = _rows(latent_ZBMS, index)
            return absorbed_attention(q, q_shared, rows, slots, scale=self.scale, **where)

        o_BTHC = on_shards(attend, "BTHC,BTHr,ZBMS,,BT -> BTHC")(
            q_BTHC, q_BTHq[..., k:], held.stack, held.index, rows.slots_BT
        )
        return einsum("BTHC,CHv->BTHv", o_BTHC, self.v_b_CHv)


def _dealt_over() -> str | None:
    """The mesh axis over which the slots of a cache are dealt (`pallas_kernels.mla.slots`)."""
    return next(iter(present(ACTIVATION["S"])), None)


def _rows(latent_ZBMS, index):
    """The rows of all layers, and for a kernel where those of one begin."""
    _, B, M, S = latent_ZBMS.shape
    return latent_ZBMS.reshape(-1, M, S), dict(first=index * B, axis=_dealt_over())


def _write(latent_ZBMS, index, new_BTM, slots_BT):
    rows, where = _rows(latent_ZBMS, index)
    return write_slots(rows, new_BTM, slots_BT, **where).reshape(latent_ZBMS.shape)
