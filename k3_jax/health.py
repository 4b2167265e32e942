"""What goes on inside the layers, seen in one micro-batch by a program of its own.

The step's program knows nothing of it: a forward and backward pass more at the rate of
`health_every`. Layers hand their rows to a function that looks on (`K3.__call__`), which makes
small figures of them. Means are over real tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp

from k3_jax.axes import einsum, read
from k3_jax.config import ModelConfig, TrainConfig
from k3_jax.layers.attn_res import Bank
from k3_jax.layers.kda import Kda, heads_out
from k3_jax.layers.moe import Moe
from k3_jax.layers.passage import Passage
from k3_jax.lora.adapters import whole
from k3_jax.model import Layer, layer_places
from k3_jax.train_step import loss_sums, minimised
from k3_jax.tree import named_leaves
from pallas_kernels.kda.gate import log_decay
from sharding import act_spec, on_shards

F32 = jnp.float32
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HALVINGS = 24  # of (0, 1), by which a quantile is found
# A gate of this many situ_beta is saturated: the slope of its tanh is 7 % of what it is at 0.
SATURATED = 2.0
MOST_EXPERTS = 1024  # of which loads are listed


class Health:
    """The figures of a model for the first micro-batch of a batch, as lists by layer.

    health/attn_res, health/attn_res_ffn [layer][source]: mean weight of each candidate in the
    mixture that attention and the FFN read: the bank's rows, oldest first, then the running sum;
    NaN for sources that are not there yet. health/activation_rms [layer]: of the running sum after
    it. health/gradient_rms [layer]: of the loss by all its parameters. health/situ_saturation
    [layer]: the share of gates (of routed experts, each token's own) beyond SATURATED * situ_beta.
    health/kda_decay [KDA layer][QUANTILES]: of exp(g) of all channels. health/kda_beta [KDA layer]:
    mean. health/expert_load [MoE layer][expert]: tokens over their mean. health/kda_layers: which
    layers have KDA.
    """

    def __init__(self, config: TrainConfig):
        c = config.model
        self._program = jax.jit(partial(observe, config=config), static_argnames="quantized")
        self._kda_layers = [i for i in range(c.n_layers) if i not in c.mla_layers]

    def __call__(self, trained, batch: dict, base=None, quantized=False) -> dict[str, list]:
        """Of `trained` and `base` as `train_step` has them."""
        found = jax.device_get(self._program(trained, batch, base, quantized=quantized))
        for name in ("kda_decay", "kda_beta"):
            found[name] = found[name][self._kda_layers]
        found = {name: x.tolist() for name, x in found.items()}
        return {f"health/{k}": v for k, v in (found | {"kda_layers": self._kda_layers}).items()}


def observe(trained, batch: dict, base, config: TrainConfig, quantized) -> dict[str, jax.Array]:
    """The figures of batch [accumulate, B, T], for all layers; NaN where a layer has none."""
    rows = {k: v[0] for k, v in batch.items()}

    def loss(trained):
        model = whole(trained, base, config.lora)
        keep = dict(counted_BT=rows["segments"] != 0, look=partial(figures, config.model))
        sums, out = loss_sums(model, config, rows, quantized, **keep)
        value = minimised(sums, config)
        return value / jnp.maximum(sums.count, 1), (out.seen, out.routing)

    grads, (seen, routing) = jax.grad(loss, has_aux=True)(trained)
    found = seen | {"gradient_rms": gradient_rms(grads, config.model)}
    if routing is not None and config.model.moe.n_experts <= MOST_EXPERTS:
        load_ZE = jnp.sum(routing.tally.load_PE, axis=1).astype(F32)
        mean_Z1 = jnp.mean(load_ZE, axis=1, keepdims=True)
        found["expert_load"] = load_ZE / jnp.maximum(mean_Z1, 1e-9)
    return found


def figures(c: ModelConfig, layer: Layer, at: Passage) -> dict[str, jax.Array]:
    """Of one layer."""
    layer, at = jax.lax.stop_gradient((layer, at))
    real_BT = at.rows.segments_BT != 0
    n_sources = -(-c.n_layers // c.block_layers) + 1
    before, after = (
        sources(mixture.weights(sum_BTD, at.bank, has_sum), at.bank, real_BT, n_sources)
        for mixture, sum_BTD, has_sum in (
            (layer.attn_res, at.before_BTD, ~at.is_first),
            (layer.ffn_res, at.between_BTD, True),
        )
    )
    decay, beta = jnp.full(len(QUANTILES), jnp.nan), jnp.array(jnp.nan)
    if isinstance(layer.attn, Kda):
        decay_BTX, beta_BTH = gates(layer.attn, at.attn_in_BTD)
        decay, beta = quantiles(decay_BTX, real_BT), mean(beta_BTH, real_BT)
    return {
        "attn_res": before,
        "attn_res_ffn": after,
        "kda_decay": decay,
        "kda_beta": beta,
        "activation_rms": jnp.sqrt(mean(jnp.square(at.after_BTD.astype(F32)), real_BT)),
        "situ_saturation": saturation(c, layer.ffn, at.ffn_in_BTD, at.rows),
    }


def mean(x, real_BT):
    """Of [B, T, ...] over the real tokens and all that they have."""
    of_token_BT = jnp.mean(x.astype(F32), axis=tuple(range(2, x.ndim)))
    n_real = jnp.maximum(jnp.sum(real_BT), 1)
    return jnp.sum(jnp.where(real_BT, of_token_BT, 0)) / n_real


def sources(weights_JBT, bank: Bank, real_BT, n_sources: int):
    """Mean weights of the bank's rows that are there, then of the running sum, then NaN."""
    running, *stored = (mean(x_BT, real_BT) for x_BT in weights_JBT)
    stored = jnp.stack(stored + [running] * (n_sources - len(stored)))
    place, n_there = jnp.arange(n_sources), sum(jnp.asarray(x, jnp.int32) for x in bank.is_there)
    return jnp.where(place < n_there, stored, jnp.where(place == n_there, running, jnp.nan))


def gates(kda: Kda, x_BTD):
    """exp(g), the part of each key channel that a token keeps, and beta, of KDA. Report Eq. 5."""
    bound = kda.config.kda.gate_lower_bound

    def keep(logit_BTX, a_log_H, bias_Hk):
        logit_BTHk = logit_BTX.reshape(*logit_BTX.shape[:2], *bias_Hk.shape)
        return jnp.exp(log_decay(logit_BTHk, a_log_H, bias_Hk, bound)).reshape(logit_BTX.shape)

    logit_BTX = heads_out(einsum("BTD,DR->BTR", x_BTD, kda.decay_a_DR), kda.decay_b_RHk)
    vectors = read(kda.a_log_H), read(kda.decay_bias_Hk)
    decay_BTX = on_shards(keep, "BTX,H,Hk -> BTX")(logit_BTX, *vectors)
    return decay_BTX, jax.nn.sigmoid(einsum("BTD,DH->BTH", x_BTD, kda.beta_DH).astype(F32))


def quantiles(x_BTX, real_BT):
    """The least bounds that QUANTILES of the values, all in (0, 1), do not exceed.

    By halving an interval around each: a sort would gather the values on one device.
    """

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        share = jnp.stack([mean(x_BTX <= x, real_BT) for x in middle])
        is_enough = share >= jnp.array(QUANTILES)
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    ends = jnp.zeros(len(QUANTILES)), jnp.ones(len(QUANTILES))
    return jax.lax.fori_loop(0, HALVINGS, halve, ends)[1]


def saturation(c: ModelConfig, ffn, x_BTD, rows):
    """The share of an FFN's gates in which SiTU's tanh is saturated."""

    def share(gate_DF):
        is_far_BTF = jnp.abs(einsum("BTD,DF->BTF", x_BTD, gate_DF)) > SATURATED * c.situ_beta
        return mean(is_far_BTF, rows.segments_BT != 0)

    if not isinstance(ffn, Moe):
        return share(ffn.gate_DF)
    routed = mean(RoutedGates(ffn.config).share(ffn, x_BTD, rows), rows.segments_BT != 0)
    n, shared = c.moe.n_active, c.moe.n_shared
    return (n * routed + shared * share(ffn.shared.gate_DF)) / (n + shared)


class RoutedGates(Moe):
    """Sends tokens to their experts and has back, in place of what those make of them, the share of
    their gates that are saturated. It has no weights of its own."""

    def __init__(self, c: ModelConfig):
        self.config = c

    def share(self, moe: Moe, x_BTD, rows):
        """share_BT1: of each token's gates in all of its experts."""
        scores_BTE = moe.scores(x_BTD)
        chosen_BTA, _ = moe._choose(scores_BTE, read(moe.router_bias_E), None)
        tokens = scores_BTE, chosen_BTA, rows.segments_BT
        sums_BTL, _ = moe.through(self._experts, x_BTD, *tokens)
        return jax.reshard(sums_BTL, act_spec("BT."))[..., :1].astype(F32) / moe.config.moe.n_active

    def _apply(self, x_nL, share_n, sizes_E, gate, *_):
        gate_nF = gate.times(x_nL, sizes_E)
        is_far_nF = jnp.abs(gate_nF) > SATURATED * self.config.situ_beta
        share_n1 = jnp.mean(is_far_nF, axis=1, dtype=F32, keepdims=True)
        return jnp.broadcast_to(share_n1, x_nL.shape).astype(x_nL.dtype)


def gradient_rms(grads, c: ModelConfig):
    """[layer]: over all that is trained of a layer together; NaN where nothing is."""
    places, leaves = layer_places(c), named_leaves(grads)
    rms_GJ = {}
    for folder in {folder for folder, _ in places}:
        own = [x for name, x in leaves.items() if name.startswith(f"{folder}/")]
        if not own:
            continue
        squares_GJ = sum(jnp.sum(x.astype(F32) ** 2, axis=tuple(range(2, x.ndim))) for x in own)
        n = sum(x.size // squares_GJ.size for x in own)
        rms_GJ[folder] = jnp.sqrt(squares_GJ / n)
    found = [rms_GJ[folder][place] if folder in rms_GJ else jnp.nan for folder, place in places]
    return jnp.stack(found)
