"""What is refused before anything is built, when the configuration meets the machine."""

import math

import jax

from k3_jax.config import ModelConfig, TrainConfig, current
from k3_jax.lora.adapters import chosen
from k3_jax.model import plan_blocks
from k3_jax.state import SLOTS
from sharding.rules import ROWS


def check_stages(config: TrainConfig, mesh, vocab_size: int, n_processes: int) -> None:
    """`check_run` of all stages that are to be trained, and of held-out rows; the message says
    which of them it is about."""
    runs = {f"stages.{s.name}: " if s.name else "": s.config for s in current(config)}
    if config.stages and config.eval_every:
        runs["held-out rows: "] = config
    for which, run in runs.items():
        try:
            check_run(run, mesh, vocab_size, n_processes)
        except ValueError as e:
            raise ValueError(f"{which}{e}") from None


def check_run(config: TrainConfig, mesh, vocab_size: int, n_processes: int) -> None:
    """Raise ValueError when rows, weights, token ids or adapters do not fit the mesh or the
    model."""
    data, model = config.data, config.model
    rows, n_shards = data.batch // config.accumulate, math.prod(mesh.shape[a] for a in ROWS)
    if rows % n_shards:
        raise ValueError(
            f"{rows} rows of a micro-batch (data.batch={data.batch} / accumulate="
            f"{config.accumulate}) do not divide over {n_shards} devices "
            f"({' * '.join(f'mesh.{a}' for a in ROWS)})"
        )
    if data.batch % (config.accumulate * n_processes):
        raise ValueError(
            f"data.batch={data.batch} does not divide into accumulate={config.accumulate} "
            f"micro-batches on {n_processes} processes"
        )
    check_split(model, mesh, data.seq_len)
    if config.lora.base:
        with jax.set_mesh(mesh):
            chosen(config)
    if mesh.shape["pipeline"] > 1:
        check_pipeline(config, mesh.shape["pipeline"], rows // n_shards)
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {data.tokenizer!r} has {vocab_size} ids, more than "
            f"model.vocab_size={model.vocab_size}"
        )


def check_pipeline(config: TrainConfig, n_stages: int, rows: int) -> None:
    """Raise ValueError when blocks or the rows of a device do not divide over the stages."""
    alike = [plan.n_blocks for plan in plan_blocks(config.model) if plan.n_blocks > 1]
    if not alike or any(n % n_stages for n in alike):
        raise ValueError(
            f"mesh.pipeline={n_stages}: stages are cut between AttnRes blocks, so it must divide "
            f"the number of blocks in a row that are alike; this model has {alike or 'none'}"
        )
    if config.lora.base or config.health_every:
        raise ValueError(
            f"mesh.pipeline={n_stages} goes neither with lora.base={config.lora.base!r} nor with "
            f"health_every={config.health_every}"
        )
    parts = config.pipeline_micro_batches
    if parts < 1 or parts % n_stages or rows % parts:
        raise ValueError(
            f"pipeline_micro_batches={parts} must be a multiple of mesh.pipeline={n_stages} and "
            f"divide the {rows} rows that a device of each stage has in a micro-batch"
        )


def check_serving(model: ModelConfig, mesh) -> None:
    """Raise ValueError when the mesh cannot serve the model."""
    if mesh.shape["seq"] > 1:
        raise ValueError(
            f"mesh.seq={mesh.shape['seq']}: serving does not split rows in time; "
            "data, fsdp and expert split rows, tensor splits heads"
        )
    if mesh.shape["pipeline"] > 1:
        raise ValueError(
            f"mesh.pipeline={mesh.shape['pipeline']}: serving has no pipeline; data, fsdp and "
            "expert split rows, tensor splits heads"
        )
    check_split(model, mesh, seq_len=0)
    if SLOTS % mesh.shape["tensor"]:
        raise ValueError(
            f"mesh.tensor={mesh.shape['tensor']} does not divide a cache of {SLOTS} slots: "
            "serving wants a power of two"
        )


def check_split(model: ModelConfig, mesh, seq_len: int) -> None:
    """Raise ValueError when the mesh does not divide what it splits, naming all of it."""
    tensor, seq = mesh.shape["tensor"], mesh.shape["seq"]
    sizes = {
        "expert * mesh.tensor": (
            mesh.shape["expert"] * tensor,
            {"moe.n_experts": model.moe.n_experts},
        ),
        "seq": (seq, {"data.seq_len": seq_len}),
        "tensor": (
            tensor,
            {
                "kda.n_heads": model.kda.n_heads,
                "mla.n_heads": model.mla.n_heads,
                "vocab_size": model.vocab_size,
                "dense_width": model.dense_width,
                "moe.latent_width": model.moe.latent_width,
                "moe.expert_width": model.moe.expert_width,
            },
        ),
    }
    for name, (n, split) in sizes.items():
        if uneven := {k: v for k, v in split.items() if v % n}:
            raise ValueError(f"mesh.{name}={n} does not divide {uneven}")
