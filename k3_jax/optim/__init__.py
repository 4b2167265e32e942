"""The optimizer: which update each parameter gets, and the learning rate over steps."""

import optax

from k3_jax.config import OptimConfig, Stage
from k3_jax.optim.muon import orthogonalize, rule
from k3_jax.tree import named_leaves, with_leaves


def schedule(c: OptimConfig, steps: int, stages: tuple[Stage, ...] = ()) -> optax.Schedule:
    """The learning rate at a number of steps done: a linear rise from 0, then `c.schedule`.

    One curve from 1 to `final_ratio` of `learning_rate`, unless stages have `rates`: each of those
    opens a curve of its own. The warm-up takes the first steps of the first.
    """
    opened = {0: (1.0, c.final_ratio)} | {s.first - 1: s.rates for s in stages if s.rates}
    warmup = round(c.warmup_ratio * steps)
    begins, ends = [warmup, *list(opened)[1:]], [*list(opened)[1:], steps]
    curves = [
        _curve(c, max(end - begin, 1), *rates)
        for begin, end, rates in zip(begins, ends, opened.values(), strict=True)
    ]
    rise = optax.linear_schedule(0.0, c.learning_rate * opened[0][0], warmup)
    return optax.join_schedules([rise, *curves], begins)


def _curve(c: OptimConfig, steps: int, start: float, stop: float) -> optax.Schedule:
    """From `start` to `stop` times the learning rate in `steps` steps."""
    if c.schedule == "cosine":
        return optax.cosine_decay_schedule(start * c.learning_rate, steps, stop / start)
    hold = optax.constant_schedule(start * c.learning_rate)
    if c.schedule == "constant":
        return hold
    decay = round(c.decay_ratio * steps)
    fall = optax.linear_schedule(start * c.learning_rate, stop * c.learning_rate, decay)
    return optax.join_schedules([hold, fall], [steps - decay])


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, decays or conv taps."""
    letters = name.rsplit("_", 1)[-1]
    return len(letters) > 1 and letters != "Hk" and "W" not in letters


def make_optimizer(
    c: OptimConfig, steps: int, stages: tuple[Stage, ...] = ()
) -> optax.GradientTransformation:
    """`c.name` on gradients clipped to a global norm of `clip_norm`.

    With Muon, matrices get its update and AdamW's weight decay, the other parameters AdamW; both
    at the same learning rate. The table of them: python -m k3_jax.optim CONFIG_FILE.
    """

    def mask(params):
        return with_leaves(params, {name: decays(name) for name in named_leaves(params)})

    def labels(params):
        names = named_leaves(params)
        return with_leaves(params, {name: rule(name, c.name).optimizer for name in names})

    clip, rate = optax.clip_by_global_norm(c.clip_norm), schedule(c, steps, stages)
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
