"""Quantile Balancing: equal loads for the experts through the router bias, with no step size.

Report section 2.3.3, appendices C and D. The cutoff alpha of a token is its (k+1)-th largest biased
score. With the bias r = alpha - s an expert would have been as good as the cutoff, so the k/n
quantile of its r over the tokens of a step is the bias that would have given it its fair share of
q = m k / n tokens. That bias, centred over the experts, is used from the next step on.

The quantile is pooled over all micro-batches and devices: each device counts its own tokens in a
histogram, and counts are added once a step. Integers have no order of adding, so biases do not
depend on how many devices and micro-batches there were, as far as scores do not.
"""

import dataclasses

import jax
import jax.numpy as jnp

from k3_jax.config import MoeConfig
from sharding import on_shards

I32, F32 = jnp.int32, jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tally:
    """What each of the P devices that split the tokens counted of its own; int32, to be added.

    `load_PE`: tokens that chose an expert. `counts_PEU`: tokens by the bin of the bias that they
    would have required of an expert; None unless `moe.balance` is "quantile".
    """

    load_PE: jax.Array
    counts_PEU: jax.Array | None


def tally(c: MoeConfig, scores_BTE, bias_E, chosen_BTA, counted_BT):
    """A layer's Tally; and with balance "exact" required_BTE, inf for tokens that do not count.

    `chosen_BTA` are the top n_active + 1 of a token, the last of which is not used but sets the
    cutoff; with balance "none" the top n_active.
    """

    def local(scores_BTE, bias_E, chosen_BTA, counted_BT):
        used_BTA = jnp.where(counted_BT[..., None], chosen_BTA[..., : c.n_active], c.n_experts)
        load_PE = jnp.bincount(used_BTA.reshape(-1), length=c.n_experts + 1)[None, :-1]
        if c.balance == "none":
            return load_PE
        next_BT1 = chosen_BTA[..., c.n_active :]
        alpha_BT1 = jnp.take_along_axis(scores_BTE, next_BT1, axis=-1) + bias_E[next_BT1]
        required_BTE = jnp.where(counted_BT[..., None], alpha_BT1 - scores_BTE, jnp.inf)
        if c.balance == "exact":
            return load_PE, required_BTE
        required_NE = required_BTE.reshape(-1, c.n_experts)
        return load_PE, histogram(required_NE, bias_E, c.balance_bins)[None]

    outs = {"none": "PE", "exact": "PE,BTE", "quantile": "PE,PEU"}[c.balance]
    found = on_shards(local, f"BTE,E,BTA,BT -> {outs}")(scores_BTE, bias_E, chosen_BTA, counted_BT)
    if c.balance == "none":
        return Tally(found, None), None
    if c.balance == "exact":
        return Tally(found[0], None), found[1]
    return Tally(*found), None


def bins(bias_E):
    """The lower end of the first bin and the span of all: they cover [min b - 1, max b + 1].

    Scores are in (0, 1), cutoffs in (min b, max b + 1), so no required bias is outside.
    """
    low, high = jnp.min(bias_E), jnp.max(bias_E)
    return low - 1, high - low + 2


def histogram(required_NE, bias_E, n_bins: int):
    """counts_EU: how many of each expert's required biases fall into each bin; inf into none."""
    low, span = bins(bias_E)
    bin_NE = jnp.floor((required_NE - low) * (n_bins / span))
    bin_NE = jnp.clip(bin_NE, 0, n_bins - 1).astype(I32)
    bin_NE = jnp.where(required_NE < jnp.inf, bin_NE, n_bins)
    counts_EU = jnp.zeros((required_NE.shape[1], n_bins), I32)
    return counts_EU.at[jnp.arange(required_NE.shape[1]), bin_NE].add(1, mode="drop")


def bias_of_counts(counts_EU, bias_E, n_active: int):
    """The next bias from the counts of all tokens, binned around `bias_E`. Report appendix D.

    The first bin whose cumulative count reaches ceil(q), and within it as far as q asks, were its
    tokens spread evenly. A step in which no token counts keeps its bias.
    """
    low, span = bins(bias_E)
    upto_EU = jnp.cumsum(counts_EU, axis=1)
    whole_E, rest_E = fair_share(upto_EU[:, -1], n_active)
    bin_E1 = jnp.argmax(upto_EU >= (whole_E + (rest_E > 0))[:, None], axis=1, keepdims=True)
    within_E = jnp.take_along_axis(counts_EU, bin_E1, axis=1)[:, 0]
    before_E = jnp.take_along_axis(upto_EU, bin_E1, axis=1)[:, 0] - within_E
    # Whole tokens are subtracted as integers: float32 holds no large q with its fraction.
    wanted_E = (whole_E - before_E).astype(F32) + rest_E
    part_E = jnp.clip(wanted_E / jnp.maximum(within_E, 1), 0, 1)
    found_E = low + (bin_E1[:, 0] + part_E) * (span / counts_EU.shape[1])
    return centred(found_E, upto_EU[:, -1], bias_E)


def bias_of_required(required_NE, bias_E, n_active: int):
    """The next bias by the exact rule, a sort. Report section 2.3.3.

    Minus the (q+1)-th largest margin s - alpha, q rounded down where it is no whole number (the
    report does not say; chosen here). The histogram lands on the q-th: any value between the two
    balances as well.
    """
    n_counted_E = jnp.sum(required_NE < jnp.inf, axis=0)
    whole_E, _ = fair_share(n_counted_E, n_active)
    sorted_NE = jnp.sort(required_NE, axis=0)
    return centred(jnp.take_along_axis(sorted_NE, whole_E[None], axis=0)[0], n_counted_E, bias_E)


def fair_share(n_counted_E, n_active: int):
    """q = m k / n as a whole number of tokens and a fraction; m k itself may leave int32."""
    E = n_counted_E.shape[0]
    rounds_E, left_E = jnp.divmod(n_counted_E, E)
    return rounds_E * n_active + left_E * n_active // E, (left_E * n_active % E).astype(F32) / E


def centred(found_E, n_counted_E, bias_E):
    """`found_E` with mean 0, which chooses the same experts; the old bias where nothing counted."""
    return jnp.where(n_counted_E > 0, found_E - jnp.mean(found_E), bias_E)


def next_biases(c: MoeConfig, bias_ZE, tallied: Tally, required_ZBTE):
    """The biases of all Z MoE layers from a step's Tally, which has a leading Z too, or, with
    balance "exact", from its required biases [micro-batches, Z, B, T, E]. None with "none"."""
    if c.balance == "none":
        return None
    if c.balance == "exact":
        required_ZNE = jnp.moveaxis(jax.reshard(required_ZBTE, jax.P()), 1, 0)
        given, rule = required_ZNE.reshape(len(bias_ZE), -1, c.n_experts), bias_of_required
    else:
        # The one exchange of a step: every device's counts of every layer, added.
        given, rule = jnp.sum(tallied.counts_PEU, axis=1), bias_of_counts
    return jax.lax.map(lambda x: rule(*x, c.n_active), (given, bias_ZE))


def figures(tallied: Tally, bias_ZE) -> dict:
    """What a step tells of balance: loads over their mean and widths of the bias, of the worst
    layer and of each of the Z MoE layers; and the mean, in tokens, which is one for all layers."""
    load_ZE = jnp.sum(tallied.load_PE, axis=1)
    mean = jnp.mean(load_ZE[0].astype(F32))
    most_Z, least_Z = (f(load_ZE, axis=1) / jnp.maximum(mean, 1e-9) for f in (jnp.max, jnp.min))
    range_Z = jnp.max(bias_ZE, axis=1) - jnp.min(bias_ZE, axis=1)
    return {
        "load_mean": mean,
        "load_max": jnp.max(most_Z),
        "load_min": jnp.min(least_Z),
        "bias_range": jnp.max(range_Z),
        "load_max_layers": most_Z,
        "load_min_layers": least_Z,
        "bias_range_layers": range_Z,
    }
