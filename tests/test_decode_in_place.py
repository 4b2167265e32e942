"""KDA layers of inference with their decode kernel, interpreted, beside the same in parts."""

import dataclasses
import math
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from serve_models import SMALL

from k3_jax.axes import ShapesOnly, stacked
from k3_jax.checkpoint.tree import placed
from k3_jax.config import KdaConfig
from k3_jax.layers import kda as layer
from k3_jax.loops import hold, repeat, stacks, taken
from k3_jax.state import Rows, fresh_kda
from pallas_kernels import common
from pallas_kernels.kda import decodes_in_place, kda_decode
from sharding import act_spec, make_mesh

CONFIG = dataclasses.replace(SMALL, kda=KdaConfig(n_heads=2, head_dim=128))
# Tokens that each of four rows gets: row 1 is empty until the third step, row 2 pauses, row 3 never
# has one.
STEPS = ((3, 0, 2, 0), (1, 0, 1, 0), (1, 1, 0, 0), (2, 3, 1, 0))


def walk():
    """What two layers in a loop give the real tokens, and their caches, after each of the steps."""
    rng = np.random.default_rng(3)

    def drawn(shape, dtype):
        return rng.normal(size=shape).astype(dtype)

    shapes = stacked(layer.Kda, CONFIG, n=2, rngs=ShapesOnly())
    layers = jax.tree.map(
        lambda x: jax.device_put(0.2 * drawn(x.shape, x.dtype), placed(x).sharding), shapes
    )

    # Defined here, so that no program of another walk is taken for it.
    @partial(jax.jit, donate_argnums=1)
    def step(layers, cache, x_BTD, segments_BT):
        rows = Rows(jax.reshard(segments_BT, act_spec("BT")))

        def one(x_BTD, xs, cache):
            y_BTD, cache = taken(xs[0])(x_BTD, rows, cache)
            return x_BTD + y_BTD, cache, None

        given = (hold(jax.tree.map(lambda w: w[None], layers)),)
        x_BTD = jax.reshard(x_BTD, act_spec("BTD"))
        x_BTD, after, _ = repeat(one, x_BTD, given, hold(cache), 2)
        return x_BTD, jax.tree.map(lambda a, old: a.reshape(old.shape), stacks(after), cache)

    cache, seen = jax.jit(partial(fresh_kda, CONFIG, 4, (1, 2)))(), []
    for counts in STEPS:
        segments_BT = (np.arange(max(counts)) < np.array(counts)[:, None]).astype(np.int32)
        x_BTD = drawn((*segments_BT.shape, CONFIG.width), CONFIG.dtype)
        y_BTD, cache = step(layers, cache, x_BTD, segments_BT)
        seen.append((np.asarray(y_BTD)[segments_BT != 0], *map(np.asarray, jax.tree.leaves(cache))))
    return seen


@pytest.mark.parametrize("sizes", [{}, dict(fsdp=2, tensor=2)], ids=["one device", "four"])
def test_the_kernel_does_what_the_parts_do(sizes, monkeypatch, quick_compiler):
    """float32: sums of 128 terms in another order. Rows without a token stay as they are."""
    used = []
    # The quick interpreter cannot let the plan of the rows vary over fewer axes than the states.
    interpret = pltpu.InterpretParams() if sizes else True

    def decode(*args, **constants):
        used.append((args[0].shape, args[12].shape))
        return kda_decode(*args, **constants, interpret=interpret)

    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])):
        want = walk()
        monkeypatch.setattr(layer, "decodes_in_place", lambda *_: True)
        monkeypatch.setattr(layer, "kda_decode", decode)
        got = walk()
    B, H = (2, 1) if sizes else (4, 2)
    # The kernel has the whole stack of both layers, and the device's rows and heads.
    assert used and set(used) == {((B, t, H, 128), (2, B, H, 128, 128)) for t in (1, 3)}
    before = [np.zeros_like(x) for x in want[0][1:]]
    for counts, (y, *cache), (y_want, *cache_want) in zip(STEPS, got, want, strict=True):
        np.testing.assert_allclose(y, y_want, atol=1e-5)
        for a, b, old in zip(cache, cache_want, before, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
            is_idle = np.array(counts) == 0
            np.testing.assert_array_equal(a[:, :, is_idle], old[:, :, is_idle])
        before = cache


@pytest.mark.parametrize(
    "here, n_tokens, width, want",
    [("tpu", 1, 128, True), ("tpu", 8, 256, True), ("tpu", 9, 128, False), ("tpu", 1, 64, False),
     ("cpu", 1, 128, False), ("gpu", 1, 128, False)],
)  # fmt: skip
def test_only_a_tpu_takes_the_kernel_for_few_tokens_of_whole_lanes(
    here, n_tokens, width, want, monkeypatch
):
    monkeypatch.setattr(common, "platform", lambda: here)
    assert decodes_in_place(n_tokens, width, width) == want
