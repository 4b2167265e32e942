"""Kimi Delta Attention: a gated delta rule with a decay for each key channel."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import Held, einsum, is_held, normal, ones, read, weight, zeros
from k3_jax.config import ModelConfig
from k3_jax.layers.norm import gated_rms_norm
from k3_jax.state import KdaCache, Rows, fresh_kda
from pallas_kernels.conv import short_conv, short_conv_sharded
from pallas_kernels.kda import decodes_in_place, gated_kda, gated_kda_sharded, kda_decode
from sharding import on_shards, present

F32 = jnp.float32


def decay_bias(key, shape, dtype, out_sharding=None):
    """Inverse softplus of a step log-uniform in [1e-3, 1e-1], as in Mamba-2.

    The report points to this family of initialisations; the numbers K3 used are not published.
    """
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    uniform = jax.random.uniform(key, shape, dtype, out_sharding=out_sharding)
    step = jnp.exp(low + uniform * (high - low))
    return step + jnp.log(-jnp.expm1(-step))


def conv_taps(key, shape, dtype, out_sharding=None):
    """Uniform within +-1/sqrt(taps), the usual start of a depthwise convolution."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)


class Kda(nnx.Module):
    """y = W_o (norm(delta_rule(q, k, v, g, beta)) * sigmoid(W_g x)). k3-facts 3.4."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        n = c.kda.head_dim
        dims = dict(D=c.width, H=c.kda.n_heads, k=n, v=n, R=n, W=c.kda.conv_width)

        def matrix(letters):
            return weight(rngs, letters, dims, c.param_dtype, normal(c.init_std))

        self.config = c
        self.q_DHk, self.k_DHk, self.v_DHv = matrix("DHk"), matrix("DHk"), matrix("DHv")
        self.decay_a_DR, self.decay_b_RHk = matrix("DR"), matrix("RHk")
        self.beta_DH, self.gate_DHv, self.out_HvD = matrix("DH"), matrix("DHv"), matrix("HvD")
        # float32 in the release, and here whatever param_dtype says.
        self.q_conv_WHk = weight(rngs, "WHk", dims, F32, conv_taps)
        self.k_conv_WHk = weight(rngs, "WHk", dims, F32, conv_taps)
        self.v_conv_WHv = weight(rngs, "WHv", dims, F32, conv_taps)
        self.a_log_H = weight(rngs, "H", dims, F32, zeros)
        self.decay_bias_Hk = weight(rngs, "Hk", dims, F32, decay_bias)
        self.out_norm_v = weight(rngs, "v", dims, F32, ones)

    def __call__(self, x_BTD, rows: Rows, cache: KdaCache | None):
        """x_BTD -> y_BTD and the cache after the rows' last real tokens; its arrays are Held."""
        n = self.config.kda.head_dim
        if cache is not None and decodes_in_place(x_BTD.shape[1], n, n):
            return self._in_place(x_BTD, rows, cache)
        if cache is None:
            state = fresh_kda(self.config, x_BTD.shape[0])
        else:
            state = jax.tree.map(Held.taken, cache, is_leaf=is_held)
        mix = on_shards(
            self._mix,
            "BTX,BTX,BTX,BTX,BTX,BTH,BT,H,Hk,v,WHk,WHk,WHv,BHkv,BWHk,BWHk,BWHv"
            " -> BTX,BHkv,BWHk,BWHk,BWHv",
        )
        y_BTX, *after = mix(
            *(heads_out(x_BTD, w) for w in (self.q_DHk, self.k_DHk, self.v_DHv)),
            heads_out(einsum("BTD,DR->BTR", x_BTD, self.decay_a_DR), self.decay_b_RHk),
            heads_out(x_BTD, self.gate_DHv),
            einsum("BTD,DH->BTH", x_BTD, self.beta_DH),
            rows.segments_BT,
            read(self.a_log_H),
            read(self.decay_bias_Hk),
            read(self.out_norm_v),
            read(self.q_conv_WHk),
            read(self.k_conv_WHk),
            read(self.v_conv_WHv),
            state.state_BHkv,
            state.q_BWHk,
            state.k_BWHk,
            state.v_BWHv,
        )
        y_BTD = einsum("BTX,XD->BTD", y_BTX, self.out_HvD, shape=(-1, x_BTD.shape[-1]))
        if cache is None:
            return y_BTD, None
        return y_BTD, jax.tree.map(Held.put, cache, KdaCache(*after), is_leaf=is_held)

    def _mix(
        self, q, k, v, logit, gate, beta, segments, a_log, bias, norm, q_taps, k_taps, v_taps, *past
    ):
        """Convolutions, norms, gate and delta rule on one device's rows; heads on one axis, X."""
        (B, T, H), (state, q_past, k_past, v_past) = beta.shape, past
        q, q_past = conv(q, q_taps, q_past, segments)
        k, k_past = conv(k, k_taps, k_past, segments)
        v, v_past = conv(v, v_taps, v_past, segments)
        q, k, v, logit = (x.reshape(B, T, H, -1) for x in (q, k, v, logit))
        run = partial(gated_kda_sharded, axis="seq") if present(("seq",)) else gated_kda
        o, state = run(
            *(q, k, v, logit, beta, a_log, bias, state, segments),
            lower_bound=self.config.kda.gate_lower_bound,
        )
        y = gated_rms_norm(o.reshape(gate.shape), gate, norm, self.config.norm_eps)
        return y, state, q_past, k_past, v_past

    def _in_place(self, x_BTD, rows, cache):
        """A few tokens of each row in one kernel, which changes this layer's part of the stacks
        where it lies. Heads have an axis of their own here, as the kernel takes them: of a product
        with few rows XLA writes it so by itself."""
        a_BTR = einsum("BTD,DR->BTR", x_BTD, self.decay_a_DR)
        run = on_shards(
            self._decode,
            "BTHk,BTHk,BTHv,BTHk,BTH,BTHv,WHk,WHk,WHv,H,Hk,v,ZBHkv,ZBWHk,ZBWHk,ZBWHv,,BT"
            " -> BTHv,ZBHkv,ZBWHk,ZBWHk,ZBWHv",
        )
        y_BTHv, *stacks = run(
            *(einsum("BTD,DHk->BTHk", x_BTD, w) for w in (self.q_DHk, self.k_DHk)),
            einsum("BTD,DHv->BTHv", x_BTD, self.v_DHv),
            einsum("BTR,RHk->BTHk", a_BTR, self.decay_b_RHk),
            einsum("BTD,DH->BTH", x_BTD, self.beta_DH),
            einsum("BTD,DHv->BTHv", x_BTD, self.gate_DHv),
            *(read(w) for w in (self.q_conv_WHk, self.k_conv_WHk, self.v_conv_WHv)),
            *(read(w) for w in (self.a_log_H, self.decay_bias_Hk, self.out_norm_v)),
            *(x.stack for x in (cache.state_BHkv, cache.q_BWHk, cache.k_BWHk, cache.v_BWHv)),
            cache.state_BHkv.index,
            rows.segments_BT,
        )
        cache = jax.tree.map(lambda x, old: Held(x, old.index), KdaCache(*stacks), cache)
        return einsum("BTHv,HvD->BTD", y_BTHv, self.out_HvD), cache

    def _decode(self, *operands):
        *operands, index, segments_BT = operands
        n_real_B = jnp.sum(segments_BT != 0, axis=1, dtype=jnp.int32)
        return kda_decode(
            *operands,
            n_real_B > 0,
            n_real_B,
            index,
            lower_bound=self.config.kda.gate_lower_bound,
            eps=self.config.norm_eps,
        )


def heads_out(x_BTD, w_DHk):
    """x W as [B, T, H k]: a TPU pads an axis of 12 heads to 16, and moves data to make one."""
    return einsum("BTD,DX->BTX", x_BTD, w_DHk, shape=(x_BTD.shape[-1], -1))


def conv(u_BTX, taps_WHk, history_BWHk, segments_BT):
    B, W, H, k = history_BWHk.shape
    run = partial(short_conv_sharded, axis="seq") if present(("seq",)) else short_conv
    y_BTX, after_BWX = run(
        u_BTX, taps_WHk.reshape(W + 1, -1), history_BWHk.reshape(B, W, -1), segments_BT
    )
    return y_BTX, after_BWX.reshape(history_BWHk.shape)
