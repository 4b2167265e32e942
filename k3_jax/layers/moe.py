"""Stable LatentMoE: a float32 router over full-width tokens, experts in a narrower latent."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import einsum, normal, ones, read, weight, zeros
from k3_jax.config import ModelConfig
from k3_jax.layers.mlp import Mlp
from k3_jax.layers.norm import rms_norm
from k3_jax.state import Rows
from pallas_kernels.experts import grouped_matmul
from pallas_kernels.situ import situ_glu
from pallas_kernels.top_k import top_k
from sharding import on_shards

F32 = jnp.float32


class Moe(nnx.Module):
    """y = W_up norm(sum_a w_a expert_a(W_down x)) + shared(x). Report Eq. 11 and 13.

    The experts are the top `n_active` of sigmoid(W_r x) + bias; the weights are the sigmoids
    without the bias, normalised over the chosen. No token is dropped.
    """

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        m = c.moe
        dims = dict(D=c.width, E=m.n_experts, L=m.latent_width, F=m.expert_width)

        def matrix(letters):
            return weight(rngs, letters, dims, c.param_dtype, normal(c.init_std))

        self.config = c
        self.router_DE = matrix("DE")
        # float32 in the release: rounded to bfloat16 it changes 2.5 % of the choices (T13).
        self.router_bias_E = weight(rngs, "E", dims, F32, zeros)
        self.down_DL, self.up_LD = matrix("DL"), matrix("LD")
        self.latent_norm_L = weight(rngs, "L", dims, c.param_dtype, ones)
        self.gate_ELF, self.expert_up_ELF = matrix("ELF"), matrix("ELF")
        self.expert_down_EFL = matrix("EFL")
        self.shared = Mlp(c, m.n_shared * m.expert_width, rngs=rngs)

    def __call__(self, x_BTD, rows: Rows, forced_BTA=None):
        """x_BTD -> y_BTD and the chosen experts [B, T, A]; `forced_BTA` replaces the choice."""
        scores_BTE = jax.nn.sigmoid(einsum("BTD,DE->BTE", x_BTD.astype(F32), self.router_DE))
        if forced_BTA is None:
            choose = on_shards(self._choose, "BTE,E -> BTA")
            forced_BTA = choose(jax.lax.stop_gradient(scores_BTE), read(self.router_bias_E))
        latent_BTL = einsum("BTD,DL->BTL", x_BTD, self.down_DL)
        mixed_BTL = on_shards(self._experts, "BTL,BTE,BTA,BT,ELF,ELF,EFL -> BTL")(
            latent_BTL,
            scores_BTE,
            forced_BTA,
            rows.segments_BT,
            read(self.gate_ELF, x_BTD.dtype),
            read(self.expert_up_ELF, x_BTD.dtype),
            read(self.expert_down_EFL, x_BTD.dtype),
        )
        normed_BTL = rms_norm(mixed_BTL, read(self.latent_norm_L), self.config.norm_eps)
        return einsum("BTL,LD->BTD", normed_BTL, self.up_LD) + self.shared(x_BTD), forced_BTA

    def _choose(self, scores_BTE, bias_E):
        B, T, E = scores_BTE.shape
        chosen_nA = top_k(scores_BTE.reshape(B * T, E), self.config.moe.n_active, bias_E=bias_E)
        return chosen_nA.reshape(B, T, -1)

    def _experts(self, latent_BTL, scores_BTE, chosen_BTA, segments_BT, gate_ELF, up_ELF, down_EFL):
        """The weighted sum of each token's experts on one device's rows."""
        c, E = self.config, self.config.moe.n_experts
        B, T, A = chosen_BTA.shape
        weights_BTA = jnp.take_along_axis(scores_BTE, chosen_BTA, axis=-1)
        weights_BTA *= c.moe.routed_scale / (jnp.sum(weights_BTA, -1, keepdims=True) + 1e-20)
        # Pads go to no expert: they sort behind the last group, where products are zero.
        expert_n = jnp.where(segments_BT[..., None] == 0, E, chosen_BTA).reshape(-1)
        order_n = jnp.argsort(expert_n)
        place_n = jnp.argsort(order_n)
        sizes_E = jnp.bincount(expert_n, length=E + 1)[:E]

        x_nL = spread(latent_BTL.reshape(B * T, -1), order_n, place_n.reshape(B * T, A))
        gate_nF, up_nF = (
            grouped_matmul(x_nL, gate_ELF, sizes_E),
            grouped_matmul(x_nL, up_ELF, sizes_E),
        )
        hidden_nF = situ_glu(gate_nF, up_nF, c.situ_beta, c.situ_linear_beta)
        y_nL = grouped_matmul(hidden_nF, down_EFL, sizes_E)
        y_BTAL = permute(y_nL, place_n, order_n).reshape(B, T, A, -1)
        mixed_BTL = jnp.einsum("BTAL,BTA->BTL", y_BTAL.astype(F32), weights_BTA)
        return mixed_BTL.astype(latent_BTL.dtype)


@jax.custom_vjp
def spread(x_NL, order_n, place_NA):
    """The copies of each token, sorted by expert: row order[i] // A for the i-th.

    place says where a token's copies went. The gradient is their sum in float32, gathered, where
    autodiff would scatter.
    """
    return x_NL[order_n // place_NA.shape[1]]


def _spread_fwd(x_NL, order_n, place_NA):
    return spread(x_NL, order_n, place_NA), place_NA


def _spread_bwd(place_NA, dy_nL):
    dx_NL = jnp.sum(dy_nL[place_NA], axis=1, dtype=F32)
    return dx_NL.astype(dy_nL.dtype), None, None


spread.defvjp(_spread_fwd, _spread_bwd)


@jax.custom_vjp
def permute(x_nL, order_n, inverse_n):
    """x[order]; the gradient is the gather by `inverse`, where autodiff would scatter."""
    return x_nL[order_n]


def _permute_fwd(x_nL, order_n, inverse_n):
    return x_nL[order_n], inverse_n


def _permute_bwd(inverse_n, dy_nL):
    return dy_nL[inverse_n], None, None


permute.defvjp(_permute_fwd, _permute_bwd)
