"""What leaps out of what came before is a spike; a level that moved is followed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_config

from k3_jax.config import SpikeConfig, TrainConfig, from_dict
from k3_jax.spikes import judge, none_yet

CONFIG = from_dict(TrainConfig, train_config.get_config())


def told_slowly(values, c: SpikeConfig) -> list[bool]:
    """The definition, in NumPy, of a series of (loss, gradient norm)."""
    taken, found = [], []
    for pair in values:
        is_spike = False
        if np.isfinite(pair).all():
            if len(taken) >= c.window:
                last = np.array(taken[-c.window :])
                centre = np.median(last, axis=0)
                spread = 1.4826 * np.median(abs(last - centre), axis=0)
                limit = centre + c.threshold * np.maximum(spread, 1e-3 * abs(centre))
                is_spike = bool((pair > limit).any())
            taken.append(pair)
        found.append(is_spike)
    return found


@pytest.mark.parametrize("window", [4, 7])
def test_spikes_are_those_of_the_definition(one_device, window):
    """Noise, a constant stretch, leaps of either value, what is not finite, a level that moves."""
    c = SpikeConfig(threshold=5.0, window=window)
    values = np.random.default_rng(window).normal([3, 1], [0.1, 0.2], (90, 2)).astype(np.float32)
    values[10, 0] = values[20, 1] = values[2, 0] = 9
    values[30:50], values[40] = [3, 1], [3.02, 1.004]
    values[60, 0], values[61, 1] = np.nan, np.inf
    values[75:] = [7, 1]
    step, recent, found = jax.jit(functools.partial(judge, c=c)), none_yet(c), []
    for pair in values:
        is_spike, recent = step(recent, *pair)
        found.append(bool(is_spike))
    assert found == told_slowly(values, c)
    assert found[10] and found[20] and found[40] and not found[2]
    # The first half window of the new level is skipped; then it is the level.
    n_skipped = -(-window // 2)
    assert all(found[75 : 75 + n_skipped]) and not any(found[75 + n_skipped :])
    assert int(recent.n_spikes) == sum(found)


def test_with_a_threshold_of_0_nothing_is_a_spike(one_device):
    c = SpikeConfig(threshold=0.0, window=4)
    recent = none_yet(c)
    for x in (1.0, 1.0, 1.0, 1.0, 1e9):
        is_spike, recent = judge(recent, jnp.float32(x), jnp.float32(x), c)
        assert not is_spike
    assert recent.loss_w.tolist() == [1, 1, 1, 1e9] and int(recent.n_spikes) == 0


@pytest.mark.parametrize(
    ("spikes", "words"),
    [
        (dict(threshold=-1.0), "threshold=-1.0"),
        (dict(window=3), "window=3"),
        (dict(threshold=6.0, window=40), "skips 20 steps.*max_bad_steps=20"),
    ],
)
def test_what_cannot_work_is_refused(spikes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, spikes=SpikeConfig(**spikes), max_bad_steps=20)
