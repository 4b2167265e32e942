"""A run of training: data, optimizer, mesh, and what cannot work."""

from dataclasses import dataclass, field

from k3_jax.config.lora import LoraConfig, check_lora
from k3_jax.config.mapping import check_choice
from k3_jax.config.model import ModelConfig

MIN_SEQ_LEN = 64


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
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self):
        check_train(self)


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
    check_lora(c.lora, c.model, c.optim.name, c.optim.qk_clip)
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
