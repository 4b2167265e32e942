"""The smallest run that has every part: one KDA layer with a dense FFN and one MLA layer with
experts, each an AttnRes block of its own; held-out loss; saves.

The documents are given on the command line: --config.data.sources.text.glob=...
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = dict(
        vocab_size=320,
        width=32,
        n_layers=2,
        mla_layers=(1,),
        n_dense=1,
        dense_width=48,
        block_layers=1,
        init_std=0.02,
        param_dtype="float32",
        dtype="float32",
        remat="none",
        kda=dict(n_heads=2, head_dim=16, gate_lower_bound=-5.0),
        mla=dict(
            n_heads=2, query_latent=24, kv_latent=16, key_dim=16, shared_key_dim=8, value_dim=16
        ),
        moe=dict(n_experts=8, n_active=2, latent_width=16, expert_width=24),
    )
    config.data = dict(
        sources=dict(text=dict(format="text", glob="")),
        tokenizer="bytes",
        seq_len=64,
        batch=4,
        holdout=0.2,
        prefetch=2,
    )
    config.optim = dict(
        name="muon_per_head", learning_rate=4e-3, final_ratio=0.1, warmup_ratio=1 / 6, qk_clip=100.0
    )
    config.mesh = dict(data=1, fsdp=1, expert=1, pipeline=1)
    config.steps = 12
    config.start_from = ""
    config.accumulate = 1
    config.pipeline_micro_batches = 1
    config.loss_chunk = 128
    config.log_every = 1
    config.eval_every = 6
    config.eval_batches = 2
    config.save_every = 4
    config.keep = 3
    config.max_bad_steps = 3
    config.stages = dict()
    config.stage = ""
    config.qat_from_step = 0
    config.lora = dict(base="", rank=4, alpha=8.0, targets=("attn", "ffn"))
    config.spikes = dict(threshold=0.0, window=4)
    config.profile_at = 0
    config.profile_steps = 3
    config.health_every = 0
    return config
