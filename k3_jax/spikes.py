"""Steps whose loss or gradient norm leaps above those before it, told from a level that moved.

The report does not say how spikes were met; chosen here. A value is a spike when it is above
median + threshold * spread of the last `window` finite ones, spread = 1.4826 median |x - median|
(the standard deviation, were they normal). Medians, because one spike that was taken would raise a
mean and a standard deviation so far that they let the next ones pass.

Values of skipped steps enter the window too: after window / 2 steps at a new level the median is
of that level, and steps are taken again. Until the window is full nothing is a spike.
"""

import dataclasses

import jax
import jax.numpy as jnp

from k3_jax.config import SpikeConfig

F32 = jnp.float32
OF_NORMAL = 1.4826  # standard deviations in the median distance from the median
LEAST = 1e-3  # of the median: the least spread, for values that are nearly equal


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Recent:
    """The last w finite losses (nats) and gradient norms, newest last, NaN where there are none
    yet; and how many steps were skipped as spikes."""

    loss_w: jax.Array
    grad_norm_w: jax.Array
    n_spikes: jax.Array


def none_yet(c: SpikeConfig) -> Recent:
    """Before the first step."""
    empty_w = jnp.full((c.window,), jnp.nan, F32)
    return Recent(empty_w, jnp.copy(empty_w), jnp.zeros((), jnp.int32))


def judge(recent: Recent, loss, grad_norm, c: SpikeConfig):
    """Whether a finite step is a spike, and `Recent` with it."""
    pairs = (recent.loss_w, loss), (recent.grad_norm_w, grad_norm)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    is_spike = jnp.zeros((), bool)
    if c.threshold:
        is_high = [x > bound(before_w, c.threshold) for before_w, x in pairs]
        is_spike = is_finite & (is_high[0] | is_high[1])
    after = (
        jnp.where(is_finite, jnp.append(before_w[1:], x.astype(F32)), before_w)
        for before_w, x in pairs
    )
    return is_spike, Recent(*after, recent.n_spikes + is_spike)


def bound(before_w, threshold: float):
    """The largest value that is no spike; NaN, which nothing is above, until the window is full."""
    centre = jnp.median(before_w)
    spread = OF_NORMAL * jnp.median(jnp.abs(before_w - centre))
    return centre + threshold * jnp.maximum(spread, LEAST * jnp.abs(centre))
