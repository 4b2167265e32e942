"""benchmarks/optimizers.py: what is made once, what is refused, what the table says."""

import jax
import pytest
import train_config

from benchmarks import optimizers
from k3_jax.config import TrainConfig, from_dict
from sharding import make_mesh


@pytest.fixture
def config():
    values = train_config.get_config().to_dict()
    values["data"]["sources"]["text"]["glob"] = "none"
    return optimizers.planned(from_dict(TrainConfig, values), tokens=20 * 4 * 64 + 7)


@pytest.fixture
def made(monkeypatch):
    """The runs that were trained; training itself is replaced by losses that say whose they are."""
    made = []

    class Runs:
        def __init__(self, config, *_):
            self.optim = config.optim

        def __call__(self, seed):
            made.append((self.optim.name, seed, self.optim.learning_rate))
            worse = seed + (1 if self.optim.name == "adamw" else 0)
            found = dict(optimizer=self.optim.name, learning_rate=self.optim.learning_rate)
            found |= dict(seed=seed, losses=[9.0] * 18 + [2.0 + worse] * 2, skipped=0)
            return found | dict(targets_per_second=10.0, heldout_loss=2.5 + worse)

    monkeypatch.setattr(optimizers, "Runs", Runs)
    monkeypatch.setattr(optimizers, "HeldOut", lambda *_: None)
    monkeypatch.setattr(optimizers, "heldout_batches", lambda *_: [])
    one = make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(optimizers, "make_mesh", lambda **_: one)
    with jax.set_mesh(one):
        yield made


def test_runs_are_made_once_and_told_by_optimizer_and_rate(config, made, tmp_path):
    """20 steps of 4 rows of 64; the last tenth of the steps is the training loss."""
    out = tmp_path / "results.json"
    assert config.steps == 20 and config.optim.warmup_ratio == 0.1
    optimizers.compare(config, out, ["adamw"], [0], {})
    results = optimizers.compare(config, out, ["muon", "adamw"], [0, 1], {"muon": 1e-3})
    rate = config.optim.learning_rate
    assert made == [("adamw", 0, rate), ("muon", 0, 1e-3), ("muon", 1, 1e-3), ("adamw", 1, rate)]
    assert optimizers.summary(results)[-2:] == [
        "| adamw | 0.004 | 4.0000 (3.5000, 4.5000) | 3.5000 (3.0000, 4.0000) | 10 |",
        "| muon | 0.001 | 3.0000 (2.5000, 3.5000) | 2.5000 (2.0000, 3.0000) | 10 |",
    ]
    assert out.with_suffix(".md").read_text() == "\n".join(optimizers.summary(results)) + "\n"


def test_runs_of_another_setting_are_not_mixed_in(config, made, tmp_path):
    out = tmp_path / "results.json"
    optimizers.compare(config, out, ["adamw"], [0], {})
    longer = optimizers.planned(config, tokens=10_000)
    with pytest.raises(ValueError, match="another configuration"):
        optimizers.compare(longer, out, ["adamw"], [0], {})
    with pytest.raises(ValueError, match="--tokens=100 are 0 steps"):
        optimizers.planned(config, tokens=100)
