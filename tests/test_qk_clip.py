"""QK-Clip: the largest logits that leave the model, and what they do to the weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import train_config

from k3_jax.config import TrainConfig, from_dict
from k3_jax.layers.mla import Mla
from k3_jax.layers.norm import rms_norm
from k3_jax.model import plan_blocks
from k3_jax.optim.qk_clip import clip_logits, largest_of_all
from k3_jax.state import Rows
from k3_jax.train_step import init_state, train_step
from k3_jax.tree import named_leaves, with_leaves
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")
TAU = 1.0
SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 3]], [9, 11, 4], axis=1).astype(np.int32)


def logits(mla, x_BTD):
    """The content and the shared part of every logit [B, H, T, S] of a layer, from its weights."""
    m, latent = mla.config.mla, x_BTD @ mla.kv_a_DM[...]
    q_BTQ = rms_norm(x_BTD @ mla.q_a_DQ[...], mla.q_norm_Q[...], m.latent_norm_eps)
    q = jnp.einsum("BTQ,QHq->BTHq", q_BTQ, mla.q_b_QHq[...])
    c, shared = latent[..., : m.kv_latent], latent[..., m.kv_latent :]
    k = jnp.einsum(
        "BTC,CHk->BTHk", rms_norm(c, mla.kv_norm_C[...], m.latent_norm_eps), mla.k_b_CHk[...]
    )
    content = jnp.einsum("BTHk,BSHk->BHTS", q[..., : m.key_dim], k)
    return [
        mla.scale * x for x in (content, jnp.einsum("BTHr,BSr->BHTS", q[..., m.key_dim :], shared))
    ]


def visible_largest(logits_BHTS):
    T = SEGMENTS.shape[1]
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & np.tri(T, dtype=bool)
    visible &= SEGMENTS[:, :, None] != 0
    return jnp.where(visible[:, None], logits_BHTS, -jnp.inf).max((0, 2, 3))


def test_a_clipped_head_has_the_threshold_as_its_largest_logit(one_device):
    """One layer, two heads, a threshold between their largest logits: one is left to the bit, both
    parts of the other's logits shrink by the same factor, and the shared key is untouched."""
    mla = Mla(tiny.config(init_std=1.0), rngs=tiny.rngs())
    x_BTD = jax.random.normal(jax.random.key(1), (*SEGMENTS.shape, tiny.CONFIG.width))
    rows = Rows(jnp.asarray(SEGMENTS), keep_largest=True)
    _, largest = mla(x_BTD, rows, None)
    before = logits(mla, x_BTD)
    np.testing.assert_allclose(largest, visible_largest(sum(before)), rtol=1e-5)
    low, high = sorted(largest.tolist())
    most, h = (low + high) / 2, int(jnp.argmax(largest))

    stack = jax.tree.map(lambda x: x[None, None], mla)
    tree = {"blocks": [{"parts": [{"runs": [{"attn": stack}]}]}]}
    clipped = clip_logits(tree, (((largest[None, None],),),), most)
    after = jax.tree.map(lambda x: x[0, 0], clipped["blocks"][0]["parts"][0]["runs"][0]["attn"])
    for part, was in zip(logits(after, x_BTD), before, strict=True):
        np.testing.assert_allclose(part[:, h], most / high * was[:, h], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(part[:, 1 - h], was[:, 1 - h])
    _, again = after(x_BTD, rows, None)
    np.testing.assert_allclose(again, jnp.where(jnp.arange(2) == h, most, low), rtol=1e-5)
    changed = {n for n, x in named_leaves(after).items() if (x != named_leaves(mla)[n]).any()}
    assert changed == {"q_b_QHq", "k_b_CHk"}


@functools.cache
def configured(**changes):
    """A run of a model with one MLA layer of two heads."""
    values = train_config.get_config().to_dict()
    # The other thing that a step changes without a gradient.
    values["model"]["moe"]["balance"] = "none"
    values["data"]["sources"]["text"]["glob"] = "none"
    optim = {"qk_clip": changes.pop("qk_clip", TAU)}
    config = from_dict(TrainConfig, values | changes)
    model = dataclasses.replace(config.model, init_std=0.1, remat="group")
    return dataclasses.replace(
        config, model=model, optim=dataclasses.replace(config.optim, **optim)
    )


def rows(accumulate=1):
    tokens = np.random.default_rng(1).integers(0, tiny.CONFIG.vocab_size, (8, 64), np.int32)
    segments = np.ones_like(tokens)
    segments[1, 20:], segments[3, 9:], segments[6, :5] = 2, 0, 3
    batch = {"tokens": tokens, "segments": segments}
    return {k: v.reshape(accumulate, -1, v.shape[-1]) for k, v in batch.items()}


@jax.jit
def told(model):
    """The largest logits of the rows, by block, part and run."""
    batch = {k: v[0] for k, v in rows().items()}
    out = model(model.embed(batch["tokens"]), batch["segments"], keep_largest=True)
    return named_leaves(out.largest)


STILL = optax.sgd(0.0)  # so that the clip alone moves the weights


def after_a_step(**changes):
    """Weights before and after a step, its metrics."""
    config = configured(**changes)
    step = functools.partial(
        train_step, config=config, tx=STILL, learning_rate=optax.constant_schedule(0.0)
    )
    state = init_state(config, STILL)
    after, metrics = jax.jit(step)(state, rows(config.accumulate))
    found = (state.model, after.model, metrics)
    return [named_leaves(x) for x in jax.device_get(found)]


@pytest.fixture(scope="module")
def one_step():
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        return after_a_step()


def test_each_layers_logits_clip_its_own_heads(one_device):
    """The query of one head of one layer times 50: of all entries that do not come after that layer
    its own alone rises, and 50 times. All layers and heads, in the stacks where they lie."""
    model = tiny.model()
    leaves = named_leaves(model)
    before, seen = told(model), 0
    for path, was in before.items():
        block, part, run = path.split("/")
        name = f"blocks/{block}/parts/{part}/runs/{run}/attn/q_b_QHq"
        assert was.shape == (*leaves[name].shape[:2], 2)
        for lead in np.ndindex(was.shape[:2]):
            louder = leaves[name].at[*lead, :, 1].multiply(50)
            now = told(with_leaves(model, leaves | {name: louder}))[path]
            np.testing.assert_allclose(now[*lead], was[*lead] * np.array([1, 50]), rtol=1e-3)
            seen += 1
    assert seen == len(tiny.CONFIG.mla_layers)
    assert len(before) > 1 and len(plan_blocks(tiny.CONFIG)) > 1


def test_a_step_clips_by_the_batch_it_saw(one_step):
    """A loop over every head: TAU is below some heads' logits and above those of others."""
    (before, after, metrics), changed = one_step, set()
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        found = told(init_state(configured(), STILL).model)
        largest, k, clipped = jax.device_get(found), 16, []
    np.testing.assert_allclose(metrics["largest_logit"], float(largest_of_all(largest)), rtol=1e-5)
    for path, values in largest.items():
        block, part, run = path.split("/")
        where = f"blocks/{block}/parts/{part}/runs/{run}/attn"
        q_b, k_b = (before[f"{where}/{x}"].copy() for x in ("q_b_QHq", "k_b_CHk"))
        for at in np.ndindex(values.shape):
            (*lead, h), g = at, min(1, TAU / values[at])
            q_b[*lead, :, h, :k] *= g**0.5
            k_b[*lead, :, h] *= g**0.5
            q_b[*lead, :, h, k:] *= g
            clipped.append(g < 1)
        for name, want in (("q_b_QHq", q_b), ("k_b_CHk", k_b)):
            np.testing.assert_allclose(after[f"{where}/{name}"], want, rtol=1e-4)
            changed.add(f"{where}/{name}")
    assert any(clipped) and not all(clipped)
    for name in before.keys() - changed:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize(
    "sizes, accumulate",
    [({}, 2), (dict(data=2, fsdp=2, expert=2), 1), (dict(fsdp=2, seq=2, tensor=2), 2)],
    ids=["micro-batches", "rows", "time and heads"],
)
def test_the_largest_is_over_micro_batches_and_devices(one_step, sizes, accumulate):
    n_devices = int(np.prod([*sizes.values(), 1]))
    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[:n_devices])):
        _, got, metrics = after_a_step(accumulate=accumulate)
    np.testing.assert_allclose(metrics["largest_logit"], one_step[2]["largest_logit"], rtol=1e-5)
    for name, x in one_step[1].items():
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_clip_of_0_is_off_and_leaves_nothing(one_device):
    before, after, metrics = after_a_step(qk_clip=0.0)
    assert "largest_logit" not in metrics
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
