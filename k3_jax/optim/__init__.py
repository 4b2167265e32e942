"""The optimizer: which update each parameter gets, and the learning rate over steps."""

import optax

from k3_jax.config import OptimConfig
from k3_jax.optim.muon import orthogonalize, rule
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
    """`c.name` on gradients clipped to a global norm of `clip_norm`.

    With Muon, matrices get its update and AdamW's weight decay, the other parameters AdamW; both
    at the same learning rate. The table of them: python -m k3_jax.optim CONFIG_FILE.
    """

    def mask(params):
        return with_leaves(params, {name: decays(name) for name in named_leaves(params)})

    def labels(params):
        names = named_leaves(params)
        return with_leaves(params, {name: rule(name, c.name).optimizer for name in names})

    clip, rate = optax.clip_by_global_norm(c.clip_norm), schedule(c, steps)
    adamw = optax.adamw(rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=mask)
    if c.name == "adamw":
        return optax.chain(clip, adamw)
    muon = optax.chain(
        optax.trace(c.momentum, nesterov=True, accumulator_dtype=c.momentum_dtype),
        orthogonalize(c),
        optax.add_decayed_weights(c.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.chain(clip, optax.partition({"muon": muon, "adamw": adamw}, labels))
