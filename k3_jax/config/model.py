"""The sizes and the precision of a model, and what cannot be built."""

import dataclasses
from dataclasses import dataclass

from k3_jax.config.mapping import check_choice


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention. Report section 2.1.1."""

    n_heads: int
    head_dim: int
    conv_width: int = 4
    gate_lower_bound: float = -5.0


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Gated latent attention without positions. Report section 2.1.2.

    `latent_norm_eps` is that of the released code; the serving engines use 1e-5.
    """

    n_heads: int
    query_latent: int
    kv_latent: int
    key_dim: int
    shared_key_dim: int
    value_dim: int
    latent_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Stable LatentMoE. Report section 2.3.

    `exchange` is how tokens get to experts on other devices. "plain": to where the expert lives.
    "balanced" (MoonEP, report section 5.2): crowded experts are lent to devices with less to do,
    so that all have the same work and nothing is dropped. "rounds": as plain, but what is too much
    goes in another round; for inference.
    `capacity` is the most copies of tokens that a device's experts take, as a multiple of the
    copies that a device sends. "plain" drops and counts what is more, and 0 is no bound; "balanced"
    lends fewer experts with more of it, "rounds" makes fewer of them, and 1 is the least.
    `balance` is the rule that moves the router bias after each training step (`k3_jax.balancing`,
    report section 2.3.3): "quantile" from a histogram of `balance_bins` bins, "exact" by sorting
    every token of the step, for small runs, and "none", which leaves it as it is.
    `packed`: the experts' weights stay MXFP4 in memory, as released; they cannot be trained, but
    rows get gradients through them.
    `activations`: what the experts' products multiply, "plain" or rounded to "mxfp8". `rounded`:
    their weights are rounded to MXFP4 wherever they are read (`k3_jax.quant.training`).
    """

    n_experts: int
    n_active: int
    latent_width: int
    expert_width: int
    n_shared: int = 2
    routed_scale: float = 1.0
    exchange: str = "plain"
    capacity: float = 0.0
    balance: str = "quantile"
    balance_bins: int = 1000
    packed: bool = False
    activations: str = "plain"
    rounded: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The language model's sizes and precision.

    Layer i (from 0) is MLA when i is in `mla_layers`, else KDA; the first `n_dense` layers have a
    dense FFN, the others the MoE. A new AttnRes block opens at every multiple of `block_layers`.

    `dtype` is what activations and matrix products use; `param_dtype` is what weights are stored
    in, except those that the release keeps in float32, which always are. `remat` names what the
    backward pass recomputes: "none", "layer" (keeps one row per layer), "group" (keeps one row per
    group of layers) or "dots" (per layer, but keeps the results of weight products). Where experts
    are on other devices, what comes back from them is kept too.
    """

    vocab_size: int
    width: int
    n_layers: int
    mla_layers: tuple[int, ...]
    n_dense: int
    dense_width: int
    block_layers: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    norm_eps: float = 1e-5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    init_std: float = 0.02
    param_dtype: str = "float32"
    dtype: str = "bfloat16"
    remat: str = "group"

    def __post_init__(self):
        check_model(self)


def as_served(
    c: ModelConfig, dtype: str, is_packed: bool = False, activations: str | None = None
) -> ModelConfig:
    """The same model for inference: weights and products in `dtype`, and no token dropped.

    `activations`: those of `MoeConfig`, its own by default.
    """
    changed = dict(packed=is_packed, activations=activations or c.moe.activations)
    moe = dataclasses.replace(c.moe, exchange="rounds", capacity=2.0, **changed)
    return dataclasses.replace(c, dtype=dtype, param_dtype=dtype, remat="none", moe=moe)


def as_quantized(c: ModelConfig) -> ModelConfig:
    """The same model as quantisation-aware training has it: experts' weights MXFP4, their inputs
    MXFP8. Report sections 4.1.1 and 4.1.4."""
    moe = dataclasses.replace(c.moe, activations="mxfp8", rounded=True)
    return dataclasses.replace(c, moe=moe)


def check_model(c: ModelConfig) -> None:
    """Refuse, with the numbers, a model that cannot be built."""
    positive = {
        f"{section}.{f.name}": getattr(part, f.name)
        for section, part in (("model", c), ("kda", c.kda), ("mla", c.mla), ("moe", c.moe))
        for f in dataclasses.fields(part)
        if f.type is int and f.name != "n_dense"
    }
    if bad := {k: v for k, v in positive.items() if v < 1}:
        raise ValueError(f"sizes must be at least 1: {bad}")
    if sorted(set(c.mla_layers)) != list(c.mla_layers):
        raise ValueError(f"mla_layers must rise without repeats: {c.mla_layers}")
    if c.mla_layers and not 0 <= c.mla_layers[0] <= c.mla_layers[-1] < c.n_layers:
        raise ValueError(
            f"mla_layers {c.mla_layers} leave the {c.n_layers} layers 0..{c.n_layers - 1}"
        )
    if not 0 <= c.n_dense <= c.n_layers:
        raise ValueError(f"n_dense={c.n_dense} is not within 0..n_layers={c.n_layers}")
    if c.moe.packed and c.dtype != "bfloat16":
        raise ValueError(f"moe.packed experts multiply in bfloat16, not model.dtype={c.dtype}")
    if c.moe.packed and (c.moe.latent_width % 64 or c.moe.expert_width % 64):
        raise ValueError(
            f"moe.packed wants widths in multiples of 64, got moe.latent_width="
            f"{c.moe.latent_width} and moe.expert_width={c.moe.expert_width}"
        )
    check_choice("moe.activations", c.moe.activations, ("plain", "mxfp8"))
    is_quantized = c.moe.rounded or c.moe.activations == "mxfp8"
    if is_quantized and (c.moe.latent_width % 32 or c.moe.expert_width % 32):
        raise ValueError(
            f"MXFP4 and MXFP8 want groups of 32 inputs, but moe.latent_width={c.moe.latent_width} "
            f"and moe.expert_width={c.moe.expert_width} are not both multiples of 32"
        )
    check_choice("moe.exchange", c.moe.exchange, ("plain", "balanced", "rounds"))
    check_choice("moe.balance", c.moe.balance, ("quantile", "exact", "none"))
    lowest = 0 if c.moe.exchange == "plain" else 1
    if c.moe.capacity < lowest:
        raise ValueError(
            f"moe.capacity={c.moe.capacity} must be at least {lowest} with moe.exchange="
            f"{c.moe.exchange!r}"
        )
    if c.moe.n_active > c.moe.n_experts:
        raise ValueError(f"moe.n_active={c.moe.n_active} exceeds moe.n_experts={c.moe.n_experts}")
    if not -5.0 <= c.kda.gate_lower_bound < 0.0:
        raise ValueError(
            f"kda.gate_lower_bound={c.kda.gate_lower_bound} is not in [-5, 0): the chunked form's "
            "exponents would leave float32"
        )
    check_choice("model.dtype", c.dtype, ("bfloat16", "float32"))
    check_choice("model.param_dtype", c.param_dtype, ("bfloat16", "float32"))
    check_choice("model.remat", c.remat, ("none", "layer", "group", "dots"))
