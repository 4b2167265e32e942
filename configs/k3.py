"""The released Kimi K3: 2,779,484,478,208 text parameters.

    python train.py --config configs/k3.py --workdir DIR

asks for a pod; what does not fit the machine is refused before anything is built. As a table of
sizes it works anywhere: `tests/test_shapes.py` builds its shapes without memory. The report does
not publish learning rate, batch or token count: those here are placeholders to be set.
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
        sources=dict(text=dict(format="text", glob="", field="text", weight=1.0)),
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
        final_ratio=0.1,
        warmup_steps=1000,
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
    config.mesh = dict(data=1, fsdp=-1, expert=64, seq=1, tensor=1, slices=1)
    config.steps = 100_000
    config.seed = 0
    config.accumulate = 1
    config.z_loss = 0.0
    config.loss_chunk = 2048
    config.log_every = 10
    config.eval_every = 1000
    config.eval_batches = 8
    config.save_every = 500
    config.keep = 3
    config.max_bad_steps = 20
    config.lora = dict(base="", rank=16, alpha=16.0, targets=("attn", "ffn"))
    return config
