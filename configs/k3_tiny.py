"""Kimi K3 at laptop size with every mechanism on.

    python train.py --config configs/k3_tiny.py --workdir runs/tiny

learns the Python standard library's source, byte by byte, on two CPU cores: the released model's
four stages scaled down to two, of which the second has longer rows and more of the long files.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = dict(
        vocab_size=384,
        width=96,
        n_layers=9,
        mla_layers=(3, 7, 8),
        n_dense=1,
        dense_width=288,
        block_layers=8,
        norm_eps=1e-5,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        init_std=0.08,
        param_dtype="float32",
        dtype="float32",
        remat="none",
        kda=dict(n_heads=3, head_dim=32, conv_width=4, gate_lower_bound=-5.0),
        mla=dict(
            n_heads=3,
            query_latent=64,
            kv_latent=48,
            key_dim=32,
            shared_key_dim=16,
            value_dim=32,
            latent_norm_eps=1e-6,
        ),
        moe=dict(
            n_experts=16,
            n_active=4,
            latent_width=64,
            expert_width=64,
            n_shared=2,
            routed_scale=1.0,
            exchange="plain",
            capacity=0.0,
            balance="quantile",
            balance_bins=1000,
            packed=False,
        ),
    )
    config.data = dict(
        sources=dict(stdlib=dict(format="stdlib", glob="", field="", weight=1.0, lengths=dict())),
        tokenizer="bytes",
        seq_len=256,
        batch=8,
        seed=0,
        holdout=0.02,
        interleave=16,
        prefetch=8,
    )
    config.optim = dict(
        name="muon_per_head",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_ratio=0.125,
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
    config.mesh = dict(data=1, fsdp=-1, expert=1, seq=1, tensor=1, pipeline=1, slices=1)
    config.steps = 0
    config.seed = 0
    config.start_from = ""
    config.accumulate = 1
    config.pipeline_micro_batches = 1
    config.z_loss = 0.0
    config.loss_chunk = 1024
    config.log_every = 10
    config.eval_every = 100
    config.eval_batches = 32
    config.save_every = 200
    config.keep = 2
    config.max_bad_steps = 20
    as_the_run = dict(accumulate=1, rates=(), mixture=dict(), lengths=dict())
    long = dict(long=dict(min_bytes=32768, times=2.0))
    config.stages = dict(
        s1_256=as_the_run | dict(tokens=614_400, seq_len=256, batch=8),
        s2_512=as_the_run | dict(tokens=204_800, seq_len=512, batch=4, lengths=long),
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
