"""Stable LatentMoE: a float32 router over full-width tokens, experts in a narrower latent."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from k3_jax.axes import einsum, normal, ones, read, weight, zeros
from k3_jax.balancing import Tally, tally
from k3_jax.config import ModelConfig, MoeConfig
from k3_jax.layers.experts import LETTERS, Matrix, Packed, glu
from k3_jax.layers.mlp import Mlp
from k3_jax.layers.norm import rms_norm
from k3_jax.quant.training import as_mxfp8
from k3_jax.state import Rows
from pallas_kernels.top_k import top_k
from sharding import ROUTED, TOKENS, act_spec, on_shards, present
from sharding.balance import plan
from sharding.exchange import exchange, gather_counts, routes, window
from sharding.rules import vary

F32 = jnp.float32
# What `model.remat` does not make again, by its checkpoint name.
CAME_BACK = "rows back from experts"
FEW_ROWS = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Routing:
    """The experts chosen for each token, and what each device has to tell of its own part.

    `n_dropped_P`: how many copies of tokens a full device turned away, by where they came from; 0
    without `moe.capacity`. `tally` and, with balance "exact", `required_BTE` (see `balancing`):
    None where nothing is counted.
    """

    experts_BTA: jax.Array
    n_dropped_P: jax.Array
    tally: Tally | None
    required_BTE: jax.Array | None


class Moe(nnx.Module):
    """y = W_up norm(sum_a w_a expert_a(W_down x)) + shared(x). Report Eq. 11 and 13.

    The experts are the top `n_active` of sigmoid(W_r x) + bias; the weights are the sigmoids
    without the bias, normalised over the chosen. No token is dropped unless `moe.capacity` says so.
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

        def experts(letters):
            return Packed(rngs, letters, dims) if m.packed else matrix(letters)

        self.gate_ELF, self.expert_up_ELF = experts("ELF"), experts("ELF")
        self.expert_down_EFL = experts("EFL")
        self.shared = Mlp(c, m.n_shared * m.expert_width, rngs=rngs)

    def __call__(self, x_BTD, rows: Rows, forced_BTA=None):
        """x_BTD -> y_BTD and its Routing; `forced_BTA` replaces the choice."""
        scores_BTE, counts = self.scores(x_BTD), (None, None)
        if forced_BTA is None:
            biased = jax.lax.stop_gradient((scores_BTE, read(self.router_bias_E)))
            forced_BTA, counts = self._choose(*biased, rows.counted_BT)
        tokens = scores_BTE, forced_BTA, rows.segments_BT
        mixed_BTL, n_dropped_P = self.through(self._experts, x_BTD, *tokens)
        if present(ROUTED["E"]):
            # Kept for the backward pass, which fetches no row of it from other devices again.
            mixed_BTL = checkpoint_name(mixed_BTL, CAME_BACK)
        mixed_BTL = jax.reshard(mixed_BTL, act_spec("BT."))
        normed_BTL = rms_norm(mixed_BTL, read(self.latent_norm_L), self.config.norm_eps)
        y_BTD = einsum("BTL,LD->BTD", normed_BTL, self.up_LD) + self.shared(x_BTD)
        return y_BTD, Routing(forced_BTA, n_dropped_P, *counts)

    def scores(self, x_BTD):
        """The router's, float32."""
        return jax.nn.sigmoid(einsum("BTD,DE->BTE", x_BTD.astype(F32), self.router_DE))

    def through(self, experts, x_BTD, *tokens):
        """`experts`, which is `_experts` or one like it, of the latents of x_BTD and of `tokens`:
        (scores_BTE, chosen_BTA, segments_BT)."""
        tokens = einsum("BTD,DL->BTL", x_BTD, self.down_DL), *tokens
        tokens = [jax.reshard(x, act_spec("BT", ROUTED)) for x in tokens]
        matrices = self.gate_ELF, self.expert_up_ELF, self.expert_down_EFL
        matrices = [Matrix.of(w, x_BTD.dtype, self.config.moe.rounded) for w in matrices]
        weights, structure = jax.tree.flatten(matrices)

        def local(*arrays):
            return experts(*arrays[: len(tokens)], structure.unflatten(arrays[len(tokens) :]))

        letters = ",".join(["BTL", "BT.", "BTA", "BT", *(LETTERS[w.ndim] for w in weights)])
        return on_shards(local, f"{letters} -> BTL,P", ROUTED)(*tokens, *weights)

    def _choose(self, scores_BTE, bias_E, counted_BT):
        """Each token's experts, and what `balancing.tally` counts of them where it is asked to."""
        m = self.config.moe
        # The cutoff for balancing is the first one not chosen.
        n = m.n_active + (counted_BT is not None and m.balance != "none")

        def local(scores_BTE, bias_E):
            B, T, E = scores_BTE.shape
            return top_k(scores_BTE.reshape(B * T, E), n, bias_E=bias_E).reshape(B, T, n)

        chosen_BTA = on_shards(local, "BTE,E -> BTA")(scores_BTE, bias_E)
        if counted_BT is None:
            return chosen_BTA, (None, None)
        counts = tally(m, scores_BTE, bias_E, chosen_BTA, counted_BT)
        return chosen_BTA[..., : m.n_active], counts

    def _experts(self, latent_BTL, scores_BTE, chosen_BTA, segments_BT, matrices):
        """The weighted sum of each token's experts, for one device's rows; and what was dropped."""
        c, E = self.config, self.config.moe.n_experts
        B, T, A = chosen_BTA.shape
        weights_BTA = jnp.take_along_axis(scores_BTE, chosen_BTA, axis=-1)
        weights_BTA *= c.moe.routed_scale / (jnp.sum(weights_BTA, -1, keepdims=True) + 1e-20)
        # Pads go to no expert: they sort behind the last group, where products are zero.
        expert_n = jnp.where(segments_BT[..., None] == 0, E, chosen_BTA).reshape(-1)
        order_n = jnp.argsort(expert_n)
        place_n = jnp.argsort(order_n)
        sizes_E = jnp.bincount(expert_n, length=E + 1)[:E]

        place_NA = place_n.reshape(B * T, A)
        # A token's copies have one rounding, wherever its experts are.
        x_nL = spread(self._rounded(latent_BTL.reshape(B * T, -1)), order_n, place_NA)
        share_n = permute(weights_BTA.reshape(-1), order_n, place_n)
        y_nL, n_dropped = self._at_home(x_nL, share_n, sizes_E, matrices)
        return collect(y_nL, order_n, place_NA).reshape(latent_BTL.shape), n_dropped[None]

    def _at_home(self, x_nL, share_n, sizes_E, matrices):
        """Rows sorted by expert, each through its expert on the device where that lives.

        They come back multiplied by their share of their token: its gradient wants them as they
        are, and there they are.
        """
        axes = present(ROUTED["E"])
        if not axes:
            return self._apply(x_nL, share_n, sizes_E, *matrices), jnp.zeros((), jnp.int32)
        n, counts_RE = len(x_nL), gather_counts(sizes_E, axes)
        if self.config.moe.exchange == "rounds":
            return self._in_rounds(x_nL, share_n, counts_RE, matrices, axes)
        bound = row_bound(n, len(counts_RE), self.config.moe)
        if self.config.moe.exchange == "balanced":
            there, sizes_P, copies, _ = plan(counts_RE, axes, bound)
            matrices = [m.with_lent(copies, axes) for m in matrices]
            n_dropped = jnp.zeros_like(sizes_P[0])
        else:
            there, n_dropped = routes(counts_RE, bound, axes)
            sizes_P = there.got_RP.sum(0)
        back_nL = self._there_and_back(x_nL, share_n, there, bound, sizes_P, matrices, axes)
        return back_nL, n_dropped

    def _there_and_back(self, x_nL, share_n, there, bound, sizes_P, matrices, axes):
        x_mL, share_m = (exchange(x, there, bound, axes) for x in (x_nL, share_n))
        y_mL = self._apply(x_mL, share_m, sizes_P, *matrices)
        return exchange(y_mL, there.back(), len(x_nL), axes)

    def _in_rounds(self, x_nL, share_n, counts_RE, matrices, axes):
        """Nothing dropped and no buffer for the worst: as many rounds as the fullest device needs.

        Few rows go in one, whatever the capacity: a round reads the experts' weights again.
        """
        (n, _), R, c = x_nL.shape, len(counts_RE), self.config.moe
        most = row_bound(n, R, dataclasses.replace(c, capacity=0.0))
        bound = min(most, max(row_bound(n, R, c), FEW_ROWS))
        there, n_dropped = routes(counts_RE, most, axes)

        def one(i, y_nL):
            now = window(there, i * bound, bound)
            sizes_P = now.got_RP.sum(0)
            given = now, bound, sizes_P, matrices, axes
            return y_nL + self._there_and_back(x_nL, share_n, *given)

        everyone = present((*TOKENS, "tensor"))
        y_nL = vary(jnp.zeros_like(x_nL), everyone)
        if bound == most:
            return one(0, y_nL), n_dropped
        fullest = counts_RE.reshape(R, R, -1).sum((0, 2)).max()
        n_rounds = jax.lax.pmax(vary(-(-fullest // bound), everyone), everyone)
        return jax.lax.fori_loop(0, n_rounds, one, y_nL), n_dropped

    def _apply(self, x_nL, share_n, sizes_E, gate: Matrix, up: Matrix, down: Matrix):
        c = self.config
        betas = dict(beta=c.situ_beta, linear_beta=c.situ_linear_beta)
        hidden_nF = self._rounded(glu(x_nL, gate, up, sizes_E, **betas))
        y_nL = down.times(hidden_nF, sizes_E)
        return (y_nL.astype(F32) * share_n[:, None]).astype(y_nL.dtype)

    def _rounded(self, x_nL):
        """Rows as the experts' products take them."""
        return as_mxfp8(x_nL) if self.config.moe.activations == "mxfp8" else x_nL


def row_bound(n_rows: int, n_ranks: int, c: MoeConfig) -> int:
    """Rows that a device's experts may get, where each of `n_ranks` sends `n_rows`.

    With no capacity, as many as there can be: all, or where a device has fewer experts than a token
    chooses, that many copies of each token. Else `capacity` times its fair share.
    """
    if c.capacity:
        return math.ceil(c.capacity * n_rows)
    copies = min(c.n_active, c.n_experts // n_ranks)
    return n_ranks * (n_rows // c.n_active) * copies


@jax.custom_vjp
def spread(x_NL, order_n, place_NA):
    """The copies of each token, sorted by expert: row order[i] // A for the i-th.

    place says where a token's copies went. The gradient is `collect`, where autodiff would scatter.
    """
    return x_NL[order_n // place_NA.shape[1]]


@jax.custom_vjp
def collect(y_nL, order_n, place_NA):
    """The sum of each token's copies in float32, rounded once. The gradient is `spread`."""
    return jnp.sum(y_nL[place_NA], axis=1, dtype=F32).astype(y_nL.dtype)


def _spread_fwd(x_NL, order_n, place_NA):
    return spread(x_NL, order_n, place_NA), (order_n, place_NA)


def _spread_bwd(kept, dx_nL):
    return collect(dx_nL, *kept), None, None


def _collect_fwd(y_nL, order_n, place_NA):
    return collect(y_nL, order_n, place_NA), (order_n, place_NA)


def _collect_bwd(kept, dy_NL):
    return spread(dy_NL, *kept), None, None


spread.defvjp(_spread_fwd, _spread_bwd)
collect.defvjp(_collect_fwd, _collect_bwd)


@jax.custom_vjp
def permute(x_n, order_n, inverse_n):
    """x[order]; the gradient is the gather by `inverse`, where autodiff would scatter."""
    return x_n[order_n]


def _permute_fwd(x_n, order_n, inverse_n):
    return x_n[order_n], inverse_n


def _permute_bwd(inverse_n, dy_n):
    return dy_n[inverse_n], None, None


permute.defvjp(_permute_fwd, _permute_bwd)
