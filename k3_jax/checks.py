"""What is refused before anything is built, when the configuration meets the machine."""

from k3_jax.config import TrainConfig


def check_run(config: TrainConfig, mesh, vocab_size: int, n_processes: int) -> None:
    """Raise ValueError when rows, weights or token ids do not fit the mesh or the model."""
    data, model = config.data, config.model
    rows, n_shards = data.batch // config.accumulate, mesh.size
    if rows % n_shards:
        raise ValueError(
            f"{rows} rows of a micro-batch (data.batch={data.batch} / accumulate="
            f"{config.accumulate}) do not divide over {n_shards} devices"
        )
    if data.batch % (config.accumulate * n_processes):
        raise ValueError(
            f"data.batch={data.batch} does not divide into accumulate={config.accumulate} "
            f"micro-batches on {n_processes} processes"
        )
    fsdp = mesh.shape["fsdp"]
    stored = {
        "width": model.width,
        "moe.n_experts": model.moe.n_experts,
        "mla.query_latent": model.mla.query_latent,
        "mla.kv_latent": model.mla.kv_latent,
        "kda.head_dim": model.kda.head_dim,
    }
    if uneven := {k: v for k, v in stored.items() if v % fsdp}:
        raise ValueError(f"mesh.fsdp={fsdp} does not divide {uneven}")
    if vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {data.tokenizer!r} has {vocab_size} ids, more than "
            f"model.vocab_size={model.vocab_size}"
        )
