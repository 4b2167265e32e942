"""Adapters on a frozen k3_tiny whose experts are packed: train one, pack it, adapt it.

    python train.py --config configs/k3_tiny.py --workdir runs/tiny
    python -m k3_jax.checkpoint.convert orbax-to-hf runs/tiny runs/tiny_hf \
        --quantize mxfp4 --rule ceil --narrow bf16
    python -m k3_jax.checkpoint.convert hf-to-orbax runs/tiny_hf runs/tiny_packed
    python train.py --config configs/k3_lora_tiny.py --workdir runs/tiny_lora
    python -m k3_jax.lora merge --base runs/tiny_packed --adapters runs/tiny_lora --to runs/merged
"""

from ml_collections import ConfigDict

from configs import k3_tiny


def get_config() -> ConfigDict:
    config = k3_tiny.get_config()
    config.lora.update(base="runs/tiny_packed", rank=8, alpha=16.0, targets=("attn", "ffn"))
    # What is frozen: nothing may move it, and it needs no masters.
    config.model.update(param_dtype="bfloat16", dtype="bfloat16")
    config.model.moe.update(packed=True, balance="none")
    config.optim.update(name="adamw", learning_rate=1e-3, weight_decay=0.0, qk_clip=0.0)
    config.steps = 100
    config.optim.warmup_ratio = 0.1
    config.stages = {}
    config.eval_every = 50
    config.save_every = 50
    return config
