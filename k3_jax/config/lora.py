"""Adapters on a frozen model: which, and what cannot be trained beside them."""

from dataclasses import dataclass

from k3_jax.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """y = x W + (alpha / rank) (x A) B with W frozen (LoRA, arXiv 2106.09685).

    `base` is the checkpoint that the weights come from, as `serve.py` opens it; empty for ordinary
    training, in which all weights are trained. `targets` are projections, such as "attn/q_DHk" or
    "ffn/up_LD", or folders of them, such as "attn" and "ffn/shared" (`k3_jax.lora.adapters`).
    Routed experts are in no folder but "experts", which is "ffn/gate_ELF", "ffn/expert_up_ELF" and
    "ffn/expert_down_EFL": each expert gets pairs of its own.
    """

    base: str = ""
    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attn", "ffn")


def check_lora(c: LoraConfig, model: ModelConfig, optimizer: str, qk_clip: float) -> None:
    """Refuse, with the numbers, what would have to change a frozen weight, or cannot."""
    if not c.base:
        if model.moe.packed:
            raise ValueError(
                "model.moe.packed=True: packed experts have no gradient; lora.base trains adapters "
                "beside them"
            )
        return
    if c.rank < 1:
        raise ValueError(f"lora.rank={c.rank} must be at least 1")
    if not c.alpha > 0:
        raise ValueError(f"lora.alpha={c.alpha} must be above 0")
    if not c.targets:
        raise ValueError("lora.targets is empty: name at least one projection, such as attn/q_DHk")
    if optimizer != "adamw":
        raise ValueError(
            f"optim.name={optimizer!r} with lora.base: A and B are trained by adamw; what "
            "orthogonal updates of low-rank factors do is not published"
        )
    if qk_clip:
        raise ValueError(
            f"optim.qk_clip={qk_clip} with lora.base would shrink frozen weights; set it to 0"
        )
    if model.moe.balance != "none" and model.n_dense < model.n_layers:
        raise ValueError(
            f"model.moe.balance={model.moe.balance!r} with lora.base would move the bias of the "
            "frozen router, which the base came with; set it to 'none'"
        )
    if model.param_dtype != model.dtype:
        raise ValueError(
            f"model.param_dtype={model.param_dtype!r} with lora.base: frozen weights need no "
            f"masters wider than model.dtype={model.dtype!r}; set both to the same"
        )
