"""What impl="auto" takes, for every kernel room."""

import logging

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import common
from pallas_kernels.common import automatic, platform


def test_the_platform_is_that_of_the_mesh_compiled_for():
    """Described TPUs on a machine without one: `auto` must choose as it would there."""
    assert platform() == jax.default_backend() == "cpu"
    described = AbstractMesh((), (), abstract_device=AbstractDevice("TPU7x", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(described):
        assert platform() == "tpu"


def test_a_choice_is_told_once_with_what_stood_in_the_way(caplog, monkeypatch):
    common._tell.cache_clear()
    found = []
    with caplog.at_level(logging.INFO):
        for here in ("cpu", "gpu", "tpu"):
            monkeypatch.setattr(common, "platform", lambda here=here: here)
            found += [automatic("mix", "plain") for _ in range(2)]
            found += [automatic("mix", "plain", gpu="batched", obstacle="D=40 is odd")]
    assert found == ["plain"] * 3 + ["plain", "plain", "batched"] + ["pallas", "pallas", "plain"]
    assert len(caplog.records) == 5
    assert [r.message for r in caplog.records if "D=40" in r.message] == [
        "mix on tpu: plain: D=40 is odd"
    ]
