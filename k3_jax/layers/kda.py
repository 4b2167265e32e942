"""Kimi Delta Attention: a gated delta rule with a decay for each key channel."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import einsum, normal, ones, read, weight, zeros
from k3_jax.config import ModelConfig
from k3_jax.layers.conv import short_conv
from k3_jax.layers.norm import gated_rms_norm
from k3_jax.state import KdaCache, Rows, fresh_kda
from pallas_kernels.kda import gated_kda
from sharding import on_shards

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
        """x_BTD -> y_BTD and the cache after the rows' last real tokens."""
        state = fresh_kda(self.config, x_BTD.shape[0]) if cache is None else cache
        logit_BTHk = einsum(
            "BTR,RHk->BTHk", einsum("BTD,DR->BTR", x_BTD, self.decay_a_DR), self.decay_b_RHk
        )
        mix = on_shards(
            self._mix,
            "BTHk,BTHk,BTHv,BTHk,BTH,BT,H,Hk,WHk,WHk,WHv,BHkv,BWHk,BWHk,BWHv"
            " -> BTHv,BHkv,BWHk,BWHk,BWHv",
        )
        o_BTHv, *after = mix(
            einsum("BTD,DHk->BTHk", x_BTD, self.q_DHk),
            einsum("BTD,DHk->BTHk", x_BTD, self.k_DHk),
            einsum("BTD,DHv->BTHv", x_BTD, self.v_DHv),
            logit_BTHk,
            einsum("BTD,DH->BTH", x_BTD, self.beta_DH),
            rows.segments_BT,
            read(self.a_log_H),
            read(self.decay_bias_Hk),
            read(self.q_conv_WHk),
            read(self.k_conv_WHk),
            read(self.v_conv_WHv),
            state.state_BHkv,
            state.q_BWHk,
            state.k_BWHk,
            state.v_BWHv,
        )
        gate_BTHv = einsum("BTD,DHv->BTHv", x_BTD, self.gate_DHv)
        y_BTHv = gated_rms_norm(o_BTHv, gate_BTHv, read(self.out_norm_v), self.config.norm_eps)
        y_BTD = einsum("BTHv,HvD->BTD", y_BTHv, self.out_HvD)
        return y_BTD, None if cache is None else KdaCache(*after)

    def _mix(self, q, k, v, logit, beta, segments, a_log, bias, q_taps, k_taps, v_taps, *cache):
        """Convolutions, norms, gate and delta rule on one device's rows."""
        state, q_past, k_past, v_past = cache
        q, q_past = short_conv(q, q_taps, q_past, segments)
        k, k_past = short_conv(k, k_taps, k_past, segments)
        v, v_past = short_conv(v, v_taps, v_past, segments)
        o, state = gated_kda(
            *(q, k, v, logit, beta, a_log, bias, state, segments),
            lower_bound=self.config.kda.gate_lower_bound,
        )
        return o, state, q_past, k_past, v_past
