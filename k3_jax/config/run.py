"""A run of training: data, optimizer, mesh, and what cannot work."""

from dataclasses import dataclass, field

from k3_jax.config.lora import LoraConfig, check_lora
from k3_jax.config.mapping import check_choice
from k3_jax.config.model import ModelConfig, as_quantized
from k3_jax.config.stages import planned

MIN_SEQ_LEN = 64


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """A source's documents of `min_bytes` or more are each drawn `times` as often as its shortest.

    Of several entries the largest that a document reaches counts. Bytes are those in the file: of
    a JSON line, the whole line. The report does not say how long documents were upsampled.
    """

    name: str
    min_bytes: int
    times: float

    def __post_init__(self):
        if self.min_bytes < 1 or not self.times > 0:
            raise ValueError(
                f"min_bytes={self.min_bytes} must be at least 1, and times={self.times} above 0"
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of documents in the mixture.

    `format` is one of "stdlib" (the running Python's own standard library source files; `glob` is
    ignored), "text" (one document a file), "jsonl" and "parquet" (one document a record, in
    `field`), "chat" (one conversation a line, as `k3_jax.chat` takes it; `field` is ignored),
    "array_record" (one UTF-8 document a record) and "files" (`glob` names directories whose source
    files are read). `weight` is a share of documents, which `lengths` divides among those of
    different lengths.
    """

    name: str
    format: str = "text"
    glob: str = ""
    field: str = "text"
    weight: float = 1.0
    lengths: tuple[LengthConfig, ...] = ()


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
class ShareConfig:
    """The weight of one of `data.sources` in a stage."""

    name: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of a run with rows of its own: `tokens` in steps of `batch` rows of `seq_len`, the
    last step whole. `name` begins with its place in the run: s1_short, s2_long.

    `rates`, (from, to) in multiples of `optim.learning_rate`, opens a new curve of the learning
    rate, which goes on through later stages until one opens another. `mixture` names the sources of
    this stage, empty all of `data`; `lengths` is in place of theirs, empty as they say. A source
    goes on after the documents that were read. Of all this the report says the lengths of rows.
    """

    name: str
    tokens: int
    seq_len: int
    batch: int
    accumulate: int = 1
    rates: tuple[float, ...] = ()
    mixture: tuple[ShareConfig, ...] = ()
    lengths: tuple[LengthConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The update, its learning rate over steps, gradients clipped by their global norm.

    The rate rises linearly over `warmup_ratio` of the steps. Then `schedule`: "cosine" falls to
    `final_ratio` of it at the last step, "wsd" holds it and falls linearly in the last
    `decay_ratio` of the steps, "constant" holds it. Report section 3.2: cosine, 1 % warm-up; how
    far it falls and what its WSD was like, it does not say.

    `name`: "muon_per_head" (attention's queries, keys and values head by head, other matrices
    whole), "muon" (all matrices whole) or "adamw". Both Muons leave what is no matrix of a layer
    to AdamW. `momentum` is theirs, stored in `momentum_dtype`; `ns_dtype` is what Newton-Schulz
    multiplies in; `update_rms` is the root mean square of their updates before the learning rate.
    `qk_clip`: the largest attention logit of an MLA head, whatever the optimizer; 0 is no bound.
    """

    name: str = "muon_per_head"
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_ratio: float = 0.01
    final_ratio: float = 0.1
    decay_ratio: float = 0.1
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
    pipeline: int = 1
    slices: int = 1


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Steps that are skipped because their loss or gradient norm leaps (`k3_jax.spikes`).

    `threshold`: how many spreads above the median of the last `window` steps; 0 skips none.
    """

    threshold: float = 0.0
    window: int = 32

    def __post_init__(self):
        if not self.threshold >= 0:
            raise ValueError(f"spikes.threshold={self.threshold} must be above 0, or 0 for none")
        if self.window < 4:
            raise ValueError(f"spikes.window={self.window} steps are too few; at least 4")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: `steps` optimizer steps of `data.batch` rows in `accumulate` micro-batches.

    `start_from`: a checkpoint whose weights a new run begins with ("": random ones); a run that has
    a checkpoint of its own goes on from that.
    With `mesh.pipeline` above 1 the rows of a micro-batch go through the stages in
    `pipeline_micro_batches` parts (`k3_jax.pipeline`); without stages it means nothing.
    `loss_chunk` tokens at a time have their logits in float32. A run stops after `max_bad_steps`
    skipped steps in a row. `eval_every`, `save_every`, `log_every` and `health_every` (figures by
    layer, `k3_jax.health`) are in steps; 0 is never.
    `profile_steps` steps are traced from step `profile_at` on (0: none), and when a file asks.
    From step `qat_from_step` on (they count from 1; 0 is never) routed experts are trained as they
    will be served: weights MXFP4, what goes into their products MXFP8 (`k3_jax.quant.training`).

    With `stages` each of them says its rows and its length, `steps` is 0, and `data.batch` rows of
    `data.seq_len` are held-out rows alone: the same in all stages, so that their loss is one curve.
    Each stage ends like a run: evaluated, saved. `stage` names the only one that is trained now.
    """

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    mesh: MeshConfig
    steps: int
    seed: int = 0
    start_from: str = ""
    accumulate: int = 1
    pipeline_micro_batches: int = 1
    z_loss: float = 0.0
    loss_chunk: int = 1024
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 100
    keep: int = 3
    max_bad_steps: int = 20
    stages: tuple[StageConfig, ...] = ()
    stage: str = ""
    qat_from_step: int = 0
    lora: LoraConfig = field(default_factory=LoraConfig)
    spikes: SpikeConfig = SpikeConfig()
    profile_at: int = 0
    profile_steps: int = 3
    health_every: int = 0

    def __post_init__(self):
        check_train(self)


def is_quantized(qat_from_step: int, step: int) -> bool:
    """Whether step `step`, counted from 1, trains experts as they will be served."""
    return 0 < qat_from_step <= step


def check_optim(c: OptimConfig) -> None:
    """Refuse, with the numbers, an optimizer that there is not."""
    check_choice("optim.name", c.name, ("muon_per_head", "muon", "adamw"))
    check_choice("optim.momentum_dtype", c.momentum_dtype, ("bfloat16", "float32"))
    check_choice("optim.ns_dtype", c.ns_dtype, ("bfloat16", "float32"))
    check_choice("optim.schedule", c.schedule, ("cosine", "wsd", "constant"))
    if not 0 <= c.warmup_ratio <= 1 or not 0 <= c.decay_ratio <= 1 or not c.final_ratio >= 0:
        raise ValueError(
            f"optim.warmup_ratio={c.warmup_ratio} and optim.decay_ratio={c.decay_ratio} are shares "
            f"of the steps, 0 to 1; optim.final_ratio={c.final_ratio} must be at least 0"
        )
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
    if m.rounded or m.activations != "plain":
        raise ValueError(
            f"model.moe.rounded={m.rounded} and model.moe.activations={m.activations!r}: training "
            "sets both from qat_from_step on"
        )
    if c.qat_from_step < 0:
        raise ValueError(f"qat_from_step={c.qat_from_step} must be a step, or 0 for never")
    if c.qat_from_step and c.lora.base:
        raise ValueError(
            f"qat_from_step={c.qat_from_step} with lora.base: its experts are frozen; set it to 0"
        )
    if c.start_from and c.lora.base:
        raise ValueError(f"start_from={c.start_from!r} with lora.base: that is the start; set one")
    if c.qat_from_step:
        as_quantized(c.model)  # refuses what cannot be rounded
    if m.exchange == "rounds":
        raise ValueError("moe.exchange='rounds' is for inference; train with plain or balanced")
    if m.balance != "none" and m.n_active == m.n_experts and c.model.n_dense < c.model.n_layers:
        raise ValueError(
            f"moe.balance={m.balance!r} needs an expert that is not chosen, but moe.n_active="
            f"{m.n_active} of moe.n_experts={m.n_experts}; set moe.balance='none'"
        )
    if c.stages:
        check_stages(c)
    elif c.steps < 1 or c.accumulate < 1 or d.batch < 1:
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
    if c.profile_at < 0 or c.profile_steps < 1:
        raise ValueError(
            f"profile_at={c.profile_at} must be a step, or 0 for none, and profile_steps="
            f"{c.profile_steps} at least 1"
        )
    n_skipped = -(-c.spikes.window // 2)
    if c.spikes.threshold and n_skipped >= c.max_bad_steps:
        raise ValueError(
            f"spikes.window={c.spikes.window} skips {n_skipped} steps until it follows a loss that "
            f"moved for good, but max_bad_steps={c.max_bad_steps} in a row stop the run"
        )
    if d.interleave < 1:
        raise ValueError(f"data.interleave={d.interleave} must be at least 1")
    if not d.sources:
        raise ValueError("data.sources is empty: name at least one source")
    for section in (*d.sources, *c.stages):
        if len({entry.min_bytes for entry in section.lengths}) < len(section.lengths):
            raise ValueError(f"lengths of {section.name!r} repeat a min_bytes")


def check_stages(c: TrainConfig) -> None:
    """Refuse, by its name, a stage that cannot work."""
    if c.steps or c.accumulate != 1:
        raise ValueError(
            f"steps={c.steps} and accumulate={c.accumulate} are of a run without stages: each "
            "stage says its own; set steps=0 and accumulate=1"
        )
    check_choice("stage", c.stage, ("", *(s.name for s in c.stages)))
    for s in c.stages:
        if not 1 <= s.batch * s.seq_len <= s.tokens:
            raise ValueError(
                f"stages.{s.name}: tokens={s.tokens} are less than a step of batch={s.batch} rows "
                f"of seq_len={s.seq_len}"
            )
        if len(s.rates) not in (0, 2) or s.rates and not (s.rates[0] > 0 <= s.rates[1]):
            raise ValueError(f"stages.{s.name}.rates={s.rates} is neither () nor (from > 0, to)")
        if s.rates and c.optim.schedule == "constant" and s.rates[0] != s.rates[1]:
            raise ValueError(
                f"stages.{s.name}.rates={s.rates} differ, which optim.schedule='constant' does not"
            )
        for share in s.mixture:
            names = tuple(source.name for source in c.data.sources)
            check_choice(f"stages.{s.name}.mixture", share.name, names)
    stages = planned(c)
    warmup = c.optim.warmup_ratio * stages[-1].last
    for s in stages[1:]:
        if s.rates and warmup >= s.first:
            raise ValueError(
                f"stages.{s.name}.rates begin at step {s.first}, before the end of the warm-up of "
                f"{warmup:.0f} steps (optim.warmup_ratio={c.optim.warmup_ratio})"
            )
