"""The released Kimi K3: 2,779,484,478,208 text parameters.

    python train.py --config configs/k3.py --workdir DIR

asks for a pod; what does not fit the machine is refused before anything is built. As a table of
sizes it works anywhere: `tests/test_shapes.py` builds its shapes without memory.

Of training the report publishes the four lengths of rows, 8K and 64K in pre-training, 256K and 1M
in cooldown (sections 3.3, 3.4), a cosine with 1 % of warm-up, and weight decay 0.1. Learning rate,
batches, tokens of any stage, the mixture, how long documents were upsampled, and whether the
cooldown had a learning rate of its own are not published: placeholders here, to be set. Batches are
rows for `mesh.expert=64`; the longer ones want `mesh.seq` above 1, so each stage is a command of
its own, `--config.stage=NAME` with its mesh.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = dict(
        vocab_size=163840,
        width=7168,
        n_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        n_dense=1,
        dense_width=33792,
        block_layers=12,
        norm_eps=1e-5,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        init_std=0.02,
        param_dtype="float32",
        dtype="bfloat16",
        remat="group",
        kda=dict(n_heads=96, head_dim=128, conv_width=4, gate_lower_bound=-5.0),
        mla=dict(
            n_heads=96,
            query_latent=1536,
            kv_latent=512,
            key_dim=128,
            shared_key_dim=64,
            value_dim=128,
            latent_norm_eps=1e-6,
        ),
        moe=dict(
            n_experts=896,
            n_active=16,
            latent_width=3584,
            expert_width=3072,
            n_shared=2,
            routed_scale=1.0,
            exchange="balanced",
            capacity=1.05,
            balance="quantile",
            balance_bins=1000,
            packed=False,
        ),
    )
    config.data = dict(
        sources=dict(text=dict(format="text", glob="", field="text", weight=1.0, lengths=dict())),
        tokenizer="tiktoken.model",
        seq_len=8192,
        batch=1024,
        seed=0,
        holdout=0.001,
        interleave=4,
        prefetch=8,
    )
    config.optim = dict(
        name="muon_per_head",
        learning_rate=2e-4,
        schedule="cosine",
        warmup_ratio=0.01,
        final_ratio=0.1,
        decay_ratio=0.1,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
        momentum=0.95,
        momentum_dtype="float32",
        ns_dtype="bfloat16",
        update_rms=0.2,
        qk_clip=100.0,
    )
    config.mesh = dict(data=1, fsdp=-1, expert=64, seq=1, tensor=1, pipeline=1, slices=1)
    config.steps = 0
    config.seed = 0
    config.start_from = ""
    config.accumulate = 1
    config.pipeline_micro_batches = 1
    config.z_loss = 0.0
    config.loss_chunk = 2048
    config.log_every = 10
    config.eval_every = 1000
    config.eval_batches = 8
    config.save_every = 500
    config.keep = 3
    config.max_bad_steps = 20
    config.stages = dict(
        s1_8k=stage(tokens=800 * 10**9, seq_len=8 << 10, batch=1024),
        s2_64k=stage(tokens=100 * 10**9, seq_len=64 << 10, batch=128, lengths=longer(64 << 10)),
        s3_256k=stage(tokens=50 * 10**9, seq_len=256 << 10, batch=64, lengths=longer(256 << 10)),
        s4_1m=stage(tokens=50 * 10**9, seq_len=1 << 20, batch=64, lengths=longer(1 << 20)),
    )
    config.stage = ""
    # Never: the report quantises through all of post-training, and this is pre-training.
    config.qat_from_step = 0
    config.lora = dict(base="", rank=16, alpha=16.0, targets=("attn", "ffn"))
    config.spikes = dict(threshold=0.0, window=32)
    config.profile_at = 0
    config.profile_steps = 3
    config.health_every = 0
    return config


def stage(**says) -> dict:
    return dict(accumulate=1, rates=(), mixture=dict(), lengths=dict()) | says


def longer(seq_len: int) -> dict:
    """Documents that fill a quarter of a row, at four bytes a token, come four times as often."""
    return dict(long=dict(min_bytes=seq_len, times=4.0))
