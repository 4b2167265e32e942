"""Configuration: frozen dataclasses, built once from a ConfigDict or from a released `config.json`.

The alphabet. Every dimension has one letter; the same letter stands in an array's name, in an
einsum string and in `sharding/rules.py`. The middle column is the released model's size.

    B       -   batch rows                    T       -   time, query side
    S       -   time, key side                N       -   tokens in a flat pool
    D    7168   model width                   V  163840   vocabulary
    F   33792   hidden width of this FFN      H      96   heads
    k     128   key dim of a head             v     128   value dim of a head
    r      64   MLA key part shared by heads  q     192   MLA query dim of a head, k + r
    Q    1536   MLA query latent              C     512   MLA key-value latent
    M     576   MLA cache row, C + r          R     128   rank of the KDA decay projection
    W       4   convolution taps              E     896   routed experts
    A      16   experts per token             L    3584   latent width of the routed experts
    J       9   AttnRes candidates            G       -   stacked groups of layers
    X   12288   channels of all KDA heads, H k    U    1000   bins of a required router bias
    P       -   devices, each with tokens of its own
"""

import dataclasses
import difflib
import typing
from dataclasses import dataclass


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
    `packed`: the experts' weights stay MXFP4 in memory, as released; they cannot be trained.
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


def as_served(c: ModelConfig, dtype: str, is_packed: bool = False) -> ModelConfig:
    """The same model for inference: weights and products in `dtype`, and no token dropped."""
    moe = dataclasses.replace(c.moe, packed=is_packed, exchange="rounds", capacity=2.0)
    return dataclasses.replace(c, dtype=dtype, param_dtype=dtype, remat="none", moe=moe)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of documents in the mixture.

    `format` is one of "stdlib" (the running Python's own standard library source files; `glob` is
    ignored), "text" (one document a file), "jsonl" and "parquet" (one document a record, in
    `field`), "array_record" (one UTF-8 document a record) and "files" (`glob` names directories
    whose source files are read).
    """

    name: str
    format: str = "text"
    glob: str = ""
    field: str = "text"
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents -> packed rows.

    `batch` rows of `seq_len` tokens make one optimizer step, over all processes together.
    A document is held out when its hash falls into `holdout` of the hash range. Each row stream
    of the batch has `interleave` documents open and takes rows from them in turn: with 1, a small
    batch learns the same few files for many steps.
    """

    sources: tuple[SourceConfig, ...]
    tokenizer: str = "bytes"
    seq_len: int = 256
    batch: int = 8
    seed: int = 0
    holdout: float = 0.02
    interleave: int = 1
    prefetch: int = 8


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Linear warm-up and cosine decay, gradients clipped by their global norm.

    `name`: "muon_per_head" (attention's queries, keys and values head by head, other matrices
    whole), "muon" (all matrices whole) or "adamw". Both Muons leave what is no matrix of a layer
    to AdamW. `momentum` is theirs, stored in `momentum_dtype`; `ns_dtype` is what Newton-Schulz
    multiplies in; `update_rms` is the root mean square of their updates before the learning rate.
    `qk_clip`: the largest attention logit of an MLA head, whatever the optimizer; 0 is no bound.
    """

    name: str = "muon_per_head"
    learning_rate: float = 3e-4
    final_ratio: float = 0.1
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    momentum: float = 0.95
    momentum_dtype: str = "float32"
    ns_dtype: str = "bfloat16"
    update_rms: float = 0.2
    qk_clip: float = 100.0

    def __post_init__(self):
        check_optim(self)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes of `sharding.mesh`; one may be -1, the devices that are left.

    `slices`: of a pod, joined by the data-centre network; they split `data`.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    seq: int = 1
    tensor: int = 1
    slices: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: `steps` optimizer steps of `data.batch` rows in `accumulate` micro-batches.

    `loss_chunk` tokens at a time have their logits in float32. A run stops after `max_bad_steps`
    skipped steps in a row. `eval_every`, `save_every` and `log_every` are in steps; 0 is never.
    """

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    mesh: MeshConfig
    steps: int
    seed: int = 0
    accumulate: int = 1
    z_loss: float = 0.0
    loss_chunk: int = 1024
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 100
    keep: int = 3
    max_bad_steps: int = 20

    def __post_init__(self):
        check_train(self)


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
    if c.moe.packed and c.moe.exchange == "balanced":
        raise ValueError("moe.packed experts are not lent: moe.exchange='balanced'")
    if c.moe.packed and (c.moe.latent_width % 64 or c.moe.expert_width % 64):
        raise ValueError(
            f"moe.packed wants widths in multiples of 64, got moe.latent_width="
            f"{c.moe.latent_width} and moe.expert_width={c.moe.expert_width}"
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


def check_optim(c: OptimConfig) -> None:
    """Refuse, with the numbers, an optimizer that there is not."""
    check_choice("optim.name", c.name, ("muon_per_head", "muon", "adamw"))
    check_choice("optim.momentum_dtype", c.momentum_dtype, ("bfloat16", "float32"))
    check_choice("optim.ns_dtype", c.ns_dtype, ("bfloat16", "float32"))
    if not 0 <= c.momentum < 1:
        raise ValueError(f"optim.momentum={c.momentum} is not in [0, 1)")
    if not c.qk_clip >= 0:
        raise ValueError(f"optim.qk_clip={c.qk_clip} must be above 0, or 0 for no clip")
    if not c.update_rms > 0:
        raise ValueError(f"optim.update_rms={c.update_rms} must be above 0")


def check_train(c: TrainConfig) -> None:
    """Refuse, with the numbers, a run that cannot work."""
    d = c.data
    if c.model.moe.packed:
        raise ValueError("model.moe.packed=True: packed experts have no gradient")
    m = c.model.moe
    if m.exchange == "rounds":
        raise ValueError("moe.exchange='rounds' is for inference; train with plain or balanced")
    if m.balance != "none" and m.n_active == m.n_experts and c.model.n_dense < c.model.n_layers:
        raise ValueError(
            f"moe.balance={m.balance!r} needs an expert that is not chosen, but moe.n_active="
            f"{m.n_active} of moe.n_experts={m.n_experts}; set moe.balance='none'"
        )
    if c.steps < 1 or c.accumulate < 1 or d.batch < 1:
        raise ValueError(
            f"steps={c.steps}, accumulate={c.accumulate}, data.batch={d.batch} must be at least 1"
        )
    if d.batch % c.accumulate:
        raise ValueError(
            f"data.batch={d.batch} rows do not divide into accumulate={c.accumulate} micro-batches"
        )
    if d.seq_len < MIN_SEQ_LEN:
        raise ValueError(
            f"data.seq_len={d.seq_len} is shorter than one KDA chunk of {MIN_SEQ_LEN} tokens"
        )
    if c.optim.warmup_steps > c.steps:
        raise ValueError(f"optim.warmup_steps={c.optim.warmup_steps} exceeds steps={c.steps}")
    if d.interleave < 1:
        raise ValueError(f"data.interleave={d.interleave} must be at least 1")
    if not d.sources:
        raise ValueError("data.sources is empty: name at least one source")


MIN_SEQ_LEN = 64


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError when `value` is not one of `allowed`, with the nearest."""
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r} is not one of {', '.join(allowed)}{nearest(value, allowed)}"
        )


def nearest(word: str, known) -> str:
    """'; did you mean "x"?' when a known word is close, else nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def from_dict(cls, values, where: str = "config"):
    """Build the frozen dataclass `cls` from a mapping, nested sections included.

    A field that holds a tuple of sections takes a mapping of names to sections, each of which
    gets its key as `name`. Raises ValueError naming an unknown or missing key.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = dict(values)
    for key in values:
        if key not in fields:
            raise ValueError(f"unknown key {where}.{key}{nearest(key, fields)}")
    built = {}
    for name, f in fields.items():
        if name not in values:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where}.{name} is missing")
            continue
        built[name] = _convert(f.type, values[name], f"{where}.{name}")
    try:
        return cls(**built)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def _convert(kind, value, where):
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where)
    if typing.get_origin(kind) is tuple:
        (item,) = (a for a in typing.get_args(kind) if a is not ...)
        if dataclasses.is_dataclass(item):
            return tuple(
                from_dict(item, {"name": k, **dict(v)}, f"{where}.{k}") for k, v in value.items()
            )
        return tuple(_convert(item, v, where) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{where}={value!r} is a {type(value).__name__}; it must be a {kind.__name__}"
        )
    return value


def to_dict(config) -> dict:
    """The mapping that `from_dict` reads back, made of JSON types."""
    out = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            value = {v.name: {k: x for k, x in to_dict(v).items() if k != "name"} for v in value}
        elif isinstance(value, tuple):
            value = list(value)
        out[f.name] = value
    return out
