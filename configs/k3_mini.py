"""Kimi K3 for one accelerator: all mechanisms, about 0.7 billion parameters.

    python train.py --config configs/k3_mini.py --workdir runs/mini

Text is the Python standard library's source in bytes; name your own in `data.sources`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = dict(
        vocab_size=384,
        width=1024,
        n_layers=13,
        mla_layers=(3, 7, 11, 12),
        n_dense=1,
        dense_width=4096,
        block_layers=12,
        norm_eps=1e-5,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        init_std=0.02,
        param_dtype="float32",
        dtype="bfloat16",
        remat="none",
        kda=dict(n_heads=8, head_dim=128, conv_width=4, gate_lower_bound=-5.0),
        mla=dict(
            n_heads=8,
            query_latent=512,
            kv_latent=256,
            key_dim=128,
            shared_key_dim=64,
            value_dim=128,
            latent_norm_eps=1e-6,
        ),
        moe=dict(
            n_experts=64,
            n_active=8,
            latent_width=512,
            expert_width=512,
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
        seq_len=2048,
        batch=4,
        seed=0,
        holdout=0.02,
        interleave=16,
        prefetch=8,
    )
    config.optim = dict(
        name="muon_per_head",
        learning_rate=1e-3,
        schedule="cosine",
        warmup_ratio=0.15,
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
    config.steps = 320
    config.seed = 0
    config.start_from = ""
    config.accumulate = 1
    config.pipeline_micro_batches = 1
    config.z_loss = 0.0
    config.loss_chunk = 8192
    config.log_every = 10
    config.eval_every = 160
    config.eval_batches = 4
    config.save_every = 160
    config.keep = 2
    config.max_bad_steps = 20
    config.stages = dict()
    config.stage = ""
    # Never: the report quantises through all of post-training, and this is pre-training.
    config.qat_from_step = 0
    config.lora = dict(base="", rank=16, alpha=16.0, targets=("attn", "ffn"))
    config.spikes = dict(threshold=0.0, window=32)
    config.profile_at = 0
    config.profile_steps = 3
    config.health_every = 0
    return config
