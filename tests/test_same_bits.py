"""The same seed, configuration and mesh give the same bits; a spike that is skipped keeps them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import train_config
from checkpoint_states import assert_same_bits
from runs import few_words

from k3_jax.checkpoint.store import Store
from k3_jax.config import SpikeConfig, TrainConfig, from_dict
from k3_jax.data.loader import Loader
from k3_jax.optim import make_optimizer, schedule
from k3_jax.tokenizer import load_tokenizer
from k3_jax.train_step import init_state, train_step
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from sharding import make_mesh
from sharding.hosts import micro_batches

STEPS, HALF, WINDOW = 50, 25, 8


class Run:
    """tests/train_config.py for 50 steps on two devices, with spikes told by the last 8 steps."""

    def __init__(self, folder):
        values = train_config.get_config()
        values.data.sources.text.glob = few_words(folder)
        values.optim.name = "adamw"  # compiles sooner; tests/test_train.py resumes with Muon
        spikes = SpikeConfig(threshold=20.0, window=WINDOW)
        self.config = dataclasses.replace(
            from_dict(TrainConfig, values), steps=STEPS, spikes=spikes, max_bad_steps=20
        )
        self.mesh = make_mesh(2, 1, devices=jax.devices()[:2])
        self.tx = make_optimizer(self.config.optim, STEPS)
        rate = schedule(self.config.optim, STEPS)
        self.step = jax.jit(
            functools.partial(train_step, config=self.config, tx=self.tx, learning_rate=rate)
        )

    def fresh(self):
        return init_state(self.config, self.tx)

    def loader(self):
        return Loader(self.config.data, load_tokenizer("bytes"))

    def go(self, state, loader, n):
        """The state n steps later, and the losses."""
        losses = []
        for _ in range(n):
            rows = {k: micro_batches(v, 1, self.mesh) for k, v in next(loader).items()}
            state, values = self.step(state, rows)
            losses.append(float(values["loss"]))
        return state, losses


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_compiler):
    made = Run(tmp_path_factory.mktemp("documents"))
    with jax.set_mesh(made.mesh):
        yield made


@pytest.fixture(scope="module")
def straight(run):
    """The state after 50 steps, and their losses."""
    loader = run.loader()
    yield run.go(run.fresh(), loader, STEPS)
    loader.close()


def test_fifty_steps_are_the_same_bits_twice_and_across_a_resume(run, straight, tmp_path):
    """Every leaf of weights, optimizer, counters and of what spikes are told by. The second run is
    saved after 25 steps; a third goes on from there, loader included."""
    state, losses = straight
    assert losses[-1] < losses[0] - 1
    assert all(np.isfinite(losses)) and not np.isnan(state.recent.loss_w).any()

    loader = run.loader()
    half, first = run.go(run.fresh(), loader, HALF)
    with Store(tmp_path) as store:
        store.save(HALF, nest(named_leaves(half)), loader.state(), {})
    again, rest = run.go(half, loader, STEPS - HALF)
    loader.close()
    assert first + rest == losses
    assert_same_bits(again, state)

    abstract, loader = jax.eval_shape(run.fresh), run.loader()
    with Store(tmp_path) as store:
        restored = store.restore(nest(named_leaves(abstract)))
    loader.restore(restored.data_state)
    resumed = with_leaves(abstract, flatten(restored.state))
    assert_same_bits(resumed.recent, half.recent)
    resumed, rest = run.go(resumed, loader, STEPS - HALF)
    loader.close()
    assert first + rest == losses
    assert_same_bits(resumed, state)


def counts(values):
    return [int(values[k]) for k in ("spikes", "skipped", "bad_in_row")]


def test_a_planted_spike_is_skipped_and_a_level_that_moved_is_followed(run, straight):
    """Bytes that are no text come once, after 50 steps of text, and later for good."""
    state, _ = straight
    tokens = np.random.default_rng(0).integers(0, 256, (6, 4, 64), dtype=np.int32)
    noise = [{"tokens": x[None], "segments": np.ones_like(x)[None]} for x in tokens]
    noise = [{k: micro_batches(v[0], 1, run.mesh) for k, v in rows.items()} for rows in noise]
    assert int(state.skipped) == 0
    after, values = run.step(state, noise[0])
    assert counts(values) == [1, 1, 1]
    assert_same_bits((after.model, after.opt), (state.model, state.opt))
    assert int(after.step) == STEPS + 1 and values["loss"] == after.recent.loss_w[-1]

    loader = run.loader()
    text, _ = run.go(after, loader, 1)
    loader.close()
    assert [int(x) for x in (text.skipped, text.bad_in_row)] == [1, 0]
    assert not np.array_equal(text.model.head_DV[...], after.model.head_DV[...])

    # One spike of the window of 8 is there already: three more, and half of it is noise.
    state, found = text, []
    for rows in noise[1:]:
        state, values = run.step(state, rows)
        found.append(counts(values))
    assert found == [[2, 2, 1], [3, 3, 2], [4, 4, 3], [4, 4, 0], [4, 4, 0]]
    assert not np.array_equal(state.model.head_DV[...], text.model.head_DV[...])
