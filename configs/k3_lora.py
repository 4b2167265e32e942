"""Adapters on the released Kimi K3, frozen, its experts packed.

    python -m k3_jax.checkpoint.convert hf-to-orbax RELEASED CONVERTED
    python train.py --config configs/k3_lora.py --workdir DIR --config.lora.base=CONVERTED

Routed experts have none unless `lora.targets` names "experts" beside "attn" and "ffn". The report
does not tell of adapters: rank, alpha, learning rate and batch are placeholders to be set. The mesh
is that of 64 chips with two devices each.
"""

from ml_collections import ConfigDict

from configs import k3


def get_config() -> ConfigDict:
    config = k3.get_config()
    config.lora.update(base="CONVERTED", rank=16, alpha=32.0, targets=("attn", "ffn"))
    # What is frozen: nothing may move it, and it needs no masters.
    config.model.update(param_dtype="bfloat16", dtype="bfloat16")
    config.model.moe.update(packed=True, balance="none")
    config.optim.update(name="adamw", learning_rate=1e-4, weight_decay=0.0, qk_clip=0.0)
    config.optim.warmup_ratio = 0.05
    config.stages = {}
    config.data.batch = 128
    config.mesh.update(fsdp=-1, expert=64)
    config.steps = 1000
    config.eval_every = 100
    config.save_every = 100
    return config
