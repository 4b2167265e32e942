"""Small runs of training in this process, for tests of what they leave behind."""

import functools
import random
import signal

import jax
import pytest

import train
from k3_jax.config import TrainConfig, from_dict
from sharding import make_mesh


def few_words(folder) -> str:
    """Writes forty short texts of a few words; their glob."""
    for i in range(40):
        words = random.Random(i).choices(["red", "green", "blue", "tall", "small"], k=20 + i)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


def changed(values: dict, changes: dict) -> TrainConfig:
    """A configuration with changes: {"model__width": 3} sets config.model.width."""
    for name, value in changes.items():
        *sections, key = name.split("__")
        functools.reduce(dict.__getitem__, sections, values)[key] = value
    return from_dict(TrainConfig, values)


def train_here(config: TrainConfig, workdir, n_devices=1) -> None:
    """`train.run` on some of the devices; the mesh and the signal handler are put back."""
    before, devices = signal.getsignal(signal.SIGTERM), jax.devices()[:n_devices]
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(make_mesh(devices=devices[:1])):
        patch.setattr(train, "make_mesh", functools.partial(make_mesh, devices=devices))
        try:
            train.run(config, str(workdir))
        finally:
            signal.signal(signal.SIGTERM, before)
