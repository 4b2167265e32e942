"""What is refused before anything is built, when the configuration meets the machine."""

import math

import jax

from k3_jax.config import ModelConfig, TrainConfig, current
from k3_jax.lora.adapters import chosen
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
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {data.tokenizer!r} has {vocab_size} ids, more than "
            f"model.vocab_size={model.vocab_size}"
        )


def check_serving(model: ModelConfig, mesh) -> None:
    """Raise ValueError when the mesh cannot serve the model."""
    if mesh.shape["seq"] > 1:
        raise ValueError(
            f"mesh.seq={mesh.shape['seq']}: serving does not split rows in time; "
            "data, fsdp and expert split rows, tensor splits heads"
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
