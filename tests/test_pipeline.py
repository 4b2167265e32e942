"""A pipeline over AttnRes blocks gives what one stage gives (T15), and little crosses."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
import tiny
from runs import few_words, train_here
from train_config import get_config

from k3_jax.checkpoint.store import Store
from k3_jax.checkpoint.tree import placed
from k3_jax.checks import check_pipeline, check_serving
from k3_jax.config import TrainConfig, from_dict
from k3_jax.hlo import collectives
from k3_jax.optim import make_optimizer
from k3_jax.train_step import init_state, objective
from k3_jax.tree import named_leaves, nest
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Eight blocks of two layers: the first has the dense FFN, the last is one layer, six are alike. KDA
# goes through stages where training does.
SIZES = dict(n_layers=15, mla_layers=tuple(range(14)), block_layers=2)
B, T = 24, 64


def configured(n_micro=1, **model) -> TrainConfig:
    run = get_config()
    run.data.sources.text.glob, run.data.batch, run.data.seq_len = "*", B, T
    config = from_dict(TrainConfig, run)
    model = tiny.config(**SIZES | model)
    return dataclasses.replace(config, model=model, pipeline_micro_batches=n_micro)


def on_mesh(**sizes):
    """The mesh of the first devices."""
    return jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]))


def batch():
    """Packed rows: documents that end early, and pads."""
    segments_BT = np.ones((B, T), np.int32)
    segments_BT[1, 40:], segments_BT[3, 9:], segments_BT[6, :5] = 2, 0, 3
    segments_BT[4, 8:], segments_BT[7, 15:17], segments_BT[7, 17:] = 2, 2, 3
    return {"tokens": np.asarray(tiny.tokens((B, T))), "segments": segments_BT}


@functools.cache
def weights():
    """The leaves as numpy arrays, built once: each new shape compiles a program."""
    with on_mesh(data=1):
        return jax.device_get(jax.tree.leaves(tiny.model(**SIZES)))


def rest():
    """The model with those leaves, where they rest on the mesh."""
    abstract, structure = jax.tree.flatten(jax.eval_shape(lambda: tiny.model(**SIZES)))
    shardings = [placed(x).sharding for x in abstract]
    return structure.unflatten(jax.device_put(weights(), shardings))


def step(config):
    return jax.jit(jax.value_and_grad(functools.partial(objective, config=config), has_aux=True))


def told(found):
    """Sums of the loss, and what layers tell: loads of all devices, largest logits; then bins."""
    (value, ((sums, (n_dropped, tally)), (_, largest))), _ = found
    load_ZE, counts_ZEU = (np.sum(x, axis=1) for x in (tally.load_PE, tally.counts_PEU))
    return (value, sums, np.sum(n_dropped), load_ZE, largest), counts_ZEU


@pytest.fixture(scope="module")
def one():
    config = configured()
    with on_mesh(data=1):
        return jax.device_get(step(config)(rest(), batch()))


@pytest.mark.parametrize(
    ("sizes", "n_micro", "remat"),
    [
        (dict(data=2, pipeline=2), 4, "group"),
        (dict(pipeline=3, expert=2), 3, "layer"),
    ],
    ids=str,
)
def test_stages_give_the_loss_and_gradients_of_one(sizes, n_micro, remat, one):
    """Forward, gradients, and what balancing and the clip of logits need; documents packed. From
    stage to stage cross P - 1 rows a tick, forward and backward."""
    config = configured(n_micro, remat=remat)
    with on_mesh(**sizes):
        model = rest()
        program = step(config).lower(model, batch()).compile()
        found = program(model, batch())
        (wanted, bins), (got, found_bins) = told(one), told(jax.device_get(found))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    # A score on the edge of a bin may be rounded into the next.
    assert np.abs(bins - found_bins).sum() <= 1e-3 * bins.sum() > 0
    wanted, leaves = named_leaves(one[1]), named_leaves(model)
    for name, g in named_leaves(found[1]).items():
        error = np.linalg.norm(np.asarray(g) - wanted[name])
        assert error <= 1e-4 * np.linalg.norm(wanted[name]) + 1e-7, name
        assert g.sharding == leaves[name].sharding, name

    n = sizes["pipeline"]
    n_ticks = n_micro * 6 // n + n - 1
    row = B // n_micro * T * config.model.width * 4 // (math.prod(sizes.values()) // n)
    moved = [x for x in collectives(program.as_text()) if x.opcode == "collective-permute"]
    assert sum(x.runs * x.sent for x in moved) == 2 * n_ticks * (n - 1) * row


def test_what_does_not_divide_is_refused_in_words():
    config = configured(n_micro=4)
    check_pipeline(config, 2, 12)
    with pytest.raises(ValueError, match=r"mesh.pipeline=4: .* alike; this model has \[6\]"):
        check_pipeline(config, 4, 12)
    with pytest.raises(
        ValueError, match="pipeline_micro_batches=4 must be a multiple of mesh.pipeline=3"
    ):
        check_pipeline(config, 3, 12)
    with pytest.raises(ValueError, match="divide the 6 rows"):
        check_pipeline(config, 2, 6)
    with pytest.raises(ValueError, match="mesh.pipeline=3: .* has none"):
        check_pipeline(dataclasses.replace(config, model=tiny.CONFIG), 3, 12)
    with pytest.raises(ValueError, match="mesh.pipeline=2: serving has no pipeline"):
        check_serving(tiny.CONFIG, make_mesh(pipeline=2, devices=jax.devices()[:2]))


def trained(folder, documents, **stages):
    """What two steps tell, and the last weights, read back on one device."""
    values = get_config()
    values.data.sources.text.glob = documents
    values.model.update(n_layers=6, mla_layers=(5,))
    values.optim.name = "adamw"
    values.update(steps=2, eval_every=0)
    values.mesh.pipeline = stages.get("pipeline", 1)
    values.pipeline_micro_batches = stages.get("n_micro", 1)
    config = from_dict(TrainConfig, values)
    train_here(config, folder, values.mesh.pipeline)
    with on_mesh(data=1):
        tx = make_optimizer(config.optim, config.steps)
        shapes = nest(named_leaves(jax.eval_shape(functools.partial(init_state, config, tx))))
        with Store(folder / "checkpoints") as store:
            state = store.restore(shapes, step=2).state
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "largest_logit", "load_max")
    told = [[x[k] for k in keys if k in x] for x in told if "loss" in x]
    return told, jax.device_get(state["model"])


@pytest.mark.slow
def test_training_with_stages_gives_the_run_without(tmp_path):
    """Two steps, and a checkpoint that any mesh reads; micro-batches go twice round two stages."""
    run = functools.partial(trained, documents=few_words(tmp_path))
    wanted, got = run(tmp_path / "one"), run(tmp_path / "two", pipeline=2, n_micro=2)
    assert len(wanted[0]) == 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
