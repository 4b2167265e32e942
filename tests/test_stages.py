"""Runs of several stages: schedules, the plan, documents across borders, and whole runs."""

import collections
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import stages_config
from checkpoint_states import assert_same_bits

import train
from k3_jax.checkpoint.store import Store
from k3_jax.config import (
    OptimConfig,
    TrainConfig,
    current,
    from_dict,
    planned,
    to_dict,
)
from k3_jax.optim import make_optimizer, schedule
from k3_jax.train_step import init_state
from k3_jax.tree import named_leaves, nest
from sharding import make_mesh

ROOT = Path(__file__).parent.parent
RATE = dict(learning_rate=1e-3, final_ratio=0.1, warmup_ratio=0.1, decay_ratio=0.25)


def configured(**changes) -> TrainConfig:
    """tests/stages_config.py with keys changed: {"s2_long__batch": 3} is of a stage."""
    values = stages_config.get_config().to_dict()
    for name, value in changes.items():
        stage, _, key = name.rpartition("__")
        (values["stages"][stage] if stage in values["stages"] else values)[key] = value
    return from_dict(TrainConfig, values)


def rates(kind, steps=(0, 5, 10, 50, 90, 100), **kwargs):
    rate = schedule(OptimConfig(schedule=kind, **RATE), 100, **kwargs)
    return [float(rate(step)) * 1000 for step in steps]


def test_the_learning_rate_rises_linearly_and_follows_the_schedule():
    """100 steps, of which 10 rise; "wsd" falls in the last quarter of the other 90 (22)."""
    cosine = [0.55 + 0.45 * np.cos(np.pi * i / 90) for i in (40, 80, 90)]
    np.testing.assert_allclose(rates("cosine"), [0, 0.5, 1, *cosine], rtol=1e-5)
    wsd = rates("wsd", (0, 5, 10, 78, 89, 100, 200))
    np.testing.assert_allclose(wsd, [0, 0.5, 1, 1, 0.55, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(rates("constant"), [0, 0.5, 1, 1, 1, 1], rtol=1e-5)


def test_stages_with_rates_open_curves_of_their_own():
    """The second opens none and goes on along the first's; the third falls from 0.2 to 0."""
    Part = collections.namedtuple("Part", "first rates")
    parts = Part(1, ()), Part(31, ()), Part(61, (0.2, 0.0))
    got = rates("cosine", (10, 35, 60, 80, 100), stages=parts)
    np.testing.assert_allclose(got, [1, 0.55, 0.2, 0.1, 0], rtol=1e-5, atol=1e-9)
    got = rates("wsd", (59, 60, 90, 95, 100), stages=parts)
    np.testing.assert_allclose(got, [0.1 + 0.9 / 12, 0.2, 0.2, 0.1, 0], rtol=1e-5, atol=1e-9)


def test_a_stage_is_the_run_with_rows_of_its_own():
    """Tokens are rounded up to whole steps; lengths of any stage cut the documents of all."""
    c = configured(s2_long__lengths=dict(huge=dict(min_bytes=300, times=9.0)))
    first, second = planned(c)
    assert (first.first, first.last, second.first, second.last) == (1, 6, 7, 12)
    assert (first.config.steps, second.config.steps) == (12, 12)
    assert (second.config.data.seq_len, second.config.accumulate) == (128, 2)
    cut = [[(x.min_bytes, x.times) for x in s.config.data.sources[0].lengths] for s in planned(c)]
    assert cut == [[(150, 3.0), (300, 3.0)], [(150, 1.0), (300, 9.0)]]
    assert [s.name for s in current(dataclasses.replace(c, stage="s2_long"))] == ["s2_long"]
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(c)))) == c
    plain = dataclasses.replace(c, stages=(), steps=7)
    assert [(s.name, s.first, s.last, s.config) for s in planned(plain)] == [("", 1, 7, plain)]


REFUSALS = {
    "two lengths of a run": (dict(steps=9), ["steps=9", "each stage says its own", "steps=0"]),
    "less than a step": (dict(s1_short__tokens=255), ["s1_short", "tokens=255", "batch=4", "64"]),
    "short rows": (dict(s2_long__seq_len=32), ["stages.s2_long", "seq_len=32", "64"]),
    "uneven accumulation": (dict(s2_long__accumulate=3), ["s2_long", "batch=2", "accumulate=3"]),
    "a rate too many": (dict(s1_short__rates=(1, 2, 3)), ["s1_short.rates", "(from > 0, to)"]),
    "no stage": (dict(stage="s2_lang"), ["stage=", "s2_lang", '"s2_long"']),
    "no source": (dict(s2_long__mixture=dict(txt=dict(weight=1.0))), ["s2_long.mixture", "txt"]),
    "no order": (dict(stages=dict(a=dict(tokens=256, seq_len=64, batch=4))), ["['a']", "s1_short"]),
    "a length twice": (
        dict(s2_long__lengths={x: dict(min_bytes=9, times=2.0) for x in "ab"}),
        ["s2_long", "repeat a min_bytes"],
    ),
    "never": (
        dict(s2_long__lengths=dict(x=dict(min_bytes=9, times=0.0))),
        ["times=0.0", "above 0"],
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_plan_that_cannot_work_is_refused(what):
    changes, words = REFUSALS[what]
    with pytest.raises(ValueError) as refused:
        configured(**changes)
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_curve_that_opens_in_the_warm_up_or_a_constant_that_falls_is_refused():
    values = to_dict(configured(s2_long__rates=(1.0, 0.5)))
    for key, value, match in (
        ("warmup_ratio", 0.6, "begin at step 7, before the end of the warm-up of 7 steps"),
        ("schedule", "constant", r"rates=\(1.0, 0.5\) differ"),
    ):
        optim = values["optim"] | {key: value}
        with pytest.raises(ValueError, match=match):
            from_dict(TrainConfig, values | {"optim": optim})


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The glob of forty texts of a few words."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(40):
        text = " ".join(itertools.islice(itertools.cycle(["red", "green", "blue", str(i)]), 15 + i))
        (folder / f"{i}.txt").write_text(text)
    return f"{folder}/*.txt"


def run_on(documents, workdir, *more):
    """`train.py` in a process of its own on one device, which has compiled nothing before."""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment |= {"PYTHONPATH": f"{ROOT}/tests"}
    flags = (f"--config={ROOT}/tests/stages_config.py", f"--workdir={workdir}")
    flags += (f"--config.data.sources.text.glob={documents}", *more)
    done = subprocess.run(
        [sys.executable, "train.py", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lines(workdir):
    """What `metrics.jsonl` says, but for speeds and where the time went."""
    told = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    clocked = ("tokens_per_second", "tflops_per_device", "goodput", "seconds_")
    return [{k: v for k, v in x.items() if not k.startswith(clocked)} for x in told]


def saved(workdir, step):
    c = configured()
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        tx = make_optimizer(c.optim, 12, planned(c))
        shapes = nest(named_leaves(jax.eval_shape(lambda: init_state(c, tx))))
        with Store(workdir / "checkpoints") as store:
            restored = store.restore(shapes, step=step)
    return {"state": restored.state, "rows": restored.data_state}


@pytest.fixture(scope="module")
def straight(documents, tmp_path_factory):
    """The folder of a run through both stages that nothing stopped."""
    workdir = tmp_path_factory.mktemp("straight")
    run_on(documents, workdir)
    return workdir


def test_every_line_names_its_stage(straight):
    """Six steps each; held-out loss at 4, 8, and where a stage ends, of the same rows."""
    told = [(x["step"], x["stage"]) for x in lines(straight) if "loss" in x]
    assert told == [(i, "s1_short" if i <= 6 else "s2_long") for i in range(1, 13)]
    held = [(x["step"], x["stage"]) for x in lines(straight) if "heldout_loss" in x]
    assert held == [(4, "s1_short"), (6, "s1_short"), (8, "s2_long"), (12, "s2_long")]


@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_run_killed_about_a_border_goes_on_with_the_same_bits(
    straight, documents, tmp_path, step
):
    """T27 with `step` as the newest whole checkpoint, the one after it half written: losses,
    held-out losses, the last checkpoint and the rows, bit for bit. At the border the rest is
    trained by a command for the second stage alone."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    for later in range(step + 2, 13):
        shutil.rmtree(run / "checkpoints" / str(later))
    (run / "checkpoints" / str(step + 1) / "manifest.json").unlink()
    said = run_on(documents, run, *(["--config.stage=s2_long"] if step == 6 else []))
    assert f"going on from step {step}" in said
    assert lines(run) == lines(straight)
    got, want = saved(run, 12), saved(straight, 12)
    assert_same_bits(got["state"], want["state"])
    assert got["rows"] == want["rows"]


def test_a_stage_without_the_one_before_it_is_refused(documents, tmp_path, monkeypatch):
    c = configured(stage="s2_long")
    source = dataclasses.replace(c.data.sources[0], glob=documents)
    c = dataclasses.replace(c, data=dataclasses.replace(c.data, sources=(source,)))
    one = make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(train, "make_mesh", lambda **_: one)
    with (
        jax.set_mesh(one),
        pytest.raises(ValueError, match="stage='s2_long' goes on from step 6, not from 0"),
    ):
        train.run(c, str(tmp_path))
