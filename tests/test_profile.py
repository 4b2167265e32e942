"""Traces of configured steps and of those after a request, on this machine's own backend."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import train_config

from k3_jax.config import TrainConfig, from_dict
from k3_jax.profile import Profiler

CONFIG = from_dict(TrainConfig, train_config.get_config())


def test_steps_are_traced_where_configured_and_when_asked(tmp_path):
    """Steps 2 and 3 by the configuration; a file before step 5 traces 5 and 6; the end of the run
    cuts the last one short."""
    said, traces = [], []

    def count():
        return len(list(tmp_path.glob("profile/step_*/plugins/profile/*/*.xplane.pb")))

    config = dataclasses.replace(CONFIG, profile_at=2, profile_steps=2)
    profiled, step_fn = Profiler(tmp_path, config, said.append), jax.jit(lambda x: 2 * x)
    x = jnp.ones(())
    for step in range(1, 9):
        if step in (5, 8):
            (tmp_path / "profile.request").touch()
        x = profiled(step, step_fn, x)
        traces.append(count())
    assert float(x) == 2**8
    profiled.close()
    assert traces == [0, 0, 1, 1, 1, 2, 2, 2] and count() == 3
    assert {x.name for x in tmp_path.glob("profile/*")} == {"step_2", "step_5", "step_8"}
    assert [text.split(":")[0] for text in said] == [
        "steps 2 to 3 are traced",
        "steps 5 to 6 are traced",
    ]
    assert not (tmp_path / "profile.request").exists()


def test_a_trace_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="profile_steps=0"):
        dataclasses.replace(CONFIG, profile_steps=0)
