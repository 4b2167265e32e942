"""The optimizer: which update each parameter gets, and the learning rate over steps."""

import optax

from k3_jax.config import OptimConfig
from k3_jax.tree import named_leaves, with_leaves


def schedule(c: OptimConfig, steps: int):
    """Linear from 0 over `warmup_steps`, then cosine down to `final_ratio` at step `steps`."""
    return optax.warmup_cosine_decay_schedule(
        0.0,
        c.learning_rate,
        c.warmup_steps,
        max(steps, c.warmup_steps + 1),
        c.final_ratio * c.learning_rate,
    )


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, decays or conv taps."""
    letters = name.rsplit("_", 1)[-1]
    return len(letters) > 1 and letters != "Hk" and "W" not in letters


def make_optimizer(c: OptimConfig, steps: int) -> optax.GradientTransformation:
    """AdamW on gradients clipped to a global norm of `clip_norm`."""

    def mask(params):
        return with_leaves(params, {name: decays(name) for name in named_leaves(params)})

    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(schedule(c, steps), c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=mask),
    )
