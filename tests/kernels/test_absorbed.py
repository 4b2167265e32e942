"""Absorbed decode attention: the TPU kernel, interpreted, and the jnp form against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.mla import absorbed, absorbed_attention, all_slots, own_slots
from pallas_kernels.mla.absorbed import slots_per_step, vmem_bytes

C, R, SCALE = 128, 16, 192**-0.5
# Copies every block as a TPU would, fills memory with NaN and reports races.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
QUICK = {"xla_backend_optimization_level": 0}
# float32 sums of some hundred terms, relative to the norm of the result.
F32 = 2e-6
# Weights and result are rounded to bfloat16.
BF16 = 2.0**-7


def example(B, T, H, S, dtype=jnp.float32, seed=0):
    """Queries and cache with scores of some size: the softmax is neither flat nor one slot."""
    draw = np.random.default_rng(seed).standard_normal
    q, latent = draw((B, T, H, C + R)) * 2, draw((B, S, C + R))
    return jnp.asarray(q, dtype), jnp.asarray(latent, dtype)


def dirty(q, latent, index):
    """NaN and inf where nothing may look: dead slots and the queries of pads."""
    slot = np.arange(latent.shape[1])
    garbage = np.where(slot % 2, np.nan, np.inf)[:, None]
    dead = (slot > index.max(1, keepdims=True))[..., None]
    pads = (index < 0)[..., None, None]
    return jnp.where(pads, jnp.nan, q), jnp.where(dead, garbage, latent).astype(latent.dtype)


def defined(q, latent, index):
    q, latent = (np.asarray(x, np.float64) for x in (q, latent))
    scores = SCALE * np.einsum("bthm,bsm->bths", q, latent)
    visible = np.arange(latent.shape[1]) <= index[..., None, None]
    scores = np.where(visible, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("bths,bsc->bthc", p / p.sum(-1, keepdims=True), latent[..., :C])
    return np.where((index >= 0)[..., None, None], o, 0)


def called(form, interpret=CAREFUL, slots=128):
    options = {} if form == "plain" else dict(slots=slots, interpret=interpret)
    attend = absorbed.attend_plain if form == "plain" else absorbed.attend

    def fn(q, latent, index):
        return attend(q, latent, index, scale=SCALE, C=C, **options)

    return jax.jit(fn, compiler_options=QUICK)


def gap(a, b):
    a = np.asarray(a, np.float64)
    assert np.isfinite(a).all()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


CASES = {
    "one token: a short row, a pad, the end of a block and of the cache": (
        3, 300, [[0], [-1], [127], [128], [299]]
    ),
    "four tokens over the border of a block, and a row that ends in pads": (
        2, 256, [[125, 126, 127, 128], [3, 4, -1, -1]]
    ),
    "eight tokens and a cache shorter than a block": (1, 40, [list(range(30, 38))]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["pallas", "plain"])
@pytest.mark.parametrize("H, S, index", CASES.values(), ids=CASES.keys())
def test_it_equals_float64_and_nothing_dead_is_seen(H, S, index, form):
    """T11: rows of different lengths side by side; dead slots and pads hold NaN and inf."""
    index = np.asarray(index, np.int32)
    q, latent = example(*index.shape, H, S)
    got = called(form)(*dirty(q, latent, index), jnp.asarray(index))
    assert gap(got, defined(q, latent, index)) <= F32
    assert not np.asarray(got)[index < 0].any()


@pytest.mark.parametrize("form", ["pallas", "plain"])
def test_bfloat16_stays_within_its_rounding(form):
    index = np.asarray([[200], [64]], np.int32)
    q, latent = example(2, 1, 12, 256, jnp.bfloat16, seed=1)
    got = called(form)(*dirty(q, latent, index), jnp.asarray(index))
    assert got.dtype == jnp.bfloat16
    assert gap(got, defined(q, latent, index)) <= BF16


def test_an_index_beyond_the_cache_sees_all_of_it():
    q, latent = example(1, 1, 2, 130)
    for form in ("pallas", "plain"):
        run = called(form)
        np.testing.assert_array_equal(
            run(q, latent, jnp.full((1, 1), 500)), run(q, latent, jnp.full((1, 1), 129))
        )


def test_blocks_after_the_last_live_slot_are_not_fetched():
    """The index of the cache's block stays at the last live one."""
    last, slots = np.array([-1, 0, 127, 128, 511]), 128
    steps = [[int(jnp.minimum(j, absorbed._step(n, slots))) for j in range(4)] for n in last]
    assert steps == [[0] * 4, [0] * 4, [0] * 4, [0, 1, 1, 1], [0, 1, 2, 3]]


def test_scores_of_thousands_do_not_overflow():
    """One slot takes all the weight, after a block in which another did."""
    q, latent = example(1, 1, 1, 256, seed=2)
    latent = latent.at[0, 3].set(q[0, 0, 0] * 100).at[0, 200].set(q[0, 0, 0] * 200)
    got = called("pallas")(q, latent, jnp.full((1, 1), 255))
    np.testing.assert_allclose(got[0, 0, 0], latent[0, 200, :C], rtol=1e-6)


def test_it_runs_on_shards_with_their_types_checked():
    index = np.asarray([[5], [130]], np.int32)
    q, latent = example(2, 1, 2, 160, seed=3)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    sharded = jax.shard_map(
        lambda *x: absorbed.attend(*x, scale=SCALE, C=C, slots=128, interpret=CAREFUL),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=True,
    )
    got = jax.jit(sharded, compiler_options=QUICK)(*dirty(q, latent, index), jnp.asarray(index))
    assert gap(got, defined(q, latent, index)) <= F32


def test_the_jnp_form_has_a_gradient_and_the_kernel_says_that_it_has_none():
    q, latent = example(1, 1, 2, 64, seed=4)
    index = jnp.full((1, 1), 50)

    def total(form):
        def fn(q):
            args = dict(scale=SCALE, impl=form)
            return absorbed_attention(q[..., :C], q[..., C:], latent, index, **args).sum()

        return jax.grad(fn)

    step = 1e-2 * jnp.sign(total("plain")(q))
    sums = [defined(q + sign * step, latent, np.asarray(index)).sum() for sign in (1, -1)]
    slope = float((total("plain")(q) * step).sum())
    np.testing.assert_allclose(slope, (sums[0] - sums[1]) / 2, rtol=1e-2)
    with pytest.raises(ValueError, match="has no gradient; impl='plain' has one"):
        jax.grad(lambda q: absorbed.attend(q, latent, index, scale=1.0, C=C, slots=128).sum())(q)


@pytest.mark.parametrize("vmem", [128 << 20, 64 << 20])
@pytest.mark.parametrize("rows", [12, 96, 768])
def test_steps_of_the_released_sizes_fit(rows, vmem):
    """12 heads a device and one token, up to 96 heads and eight tokens."""
    slots = slots_per_step(8192, rows, 576, 512, 2, vmem)
    assert slots >= 512 and vmem_bytes(slots, rows, 576, 512, 2) <= vmem // 2


def test_what_does_not_fit_is_refused_with_its_numbers():
    q, latent = example(1, 9, 2, 16)
    index = jnp.zeros((1, 9), jnp.int32)
    halves = q[..., :C], q[..., C:]
    with pytest.raises(ValueError, match="T=9 is more than 8"):
        absorbed_attention(*halves, latent, index, scale=1.0, impl="pallas")
    with pytest.raises(ValueError, match="C=64 is no multiple of 128"):
        absorbed.attend(q[:, :1], latent, index[:, :1], scale=1.0, C=64)
    with pytest.raises(ValueError, match="impl='fast' is not one of"):
        absorbed_attention(*halves, latent, index, scale=1.0, impl="fast")
    with pytest.raises(ValueError, match="q is float32 and the latent bfloat16"):
        absorbed.attend(q[:, :1], latent.astype(jnp.bfloat16), index[:, :1], scale=1.0, C=C)
    with pytest.raises(ValueError, match="100000 queries and 128 slots of M=576 need"):
        slots_per_step(8192, 100_000, 576, 512, 2, 64 << 20)


@pytest.mark.parametrize("form", ["pallas", "plain"])
def test_the_log_of_the_sum_is_returned_too(form):
    index = np.asarray([[200], [-1], [64]], np.int32)
    q, latent = example(3, 1, 4, 256, seed=2)
    options = {} if form == "plain" else dict(slots=128, interpret=CAREFUL)
    attend = absorbed.attend_plain if form == "plain" else absorbed.attend
    run = jax.jit(lambda *x: attend(*x, scale=SCALE, C=C, with_lse=True, **options))
    o, lse = run(*dirty(q, latent, index), jnp.asarray(index))
    assert gap(o, defined(q, latent, index)) <= F32
    scores = SCALE * np.einsum("bthm,bsm->bths", *(np.asarray(x, np.float64) for x in (q, latent)))
    scores = np.where(np.arange(256) <= index[..., None, None], scores, -np.inf)
    want = np.log(np.exp(scores[::2]).sum(-1))
    np.testing.assert_allclose(lse[::2], want, rtol=1e-6)
    assert np.all(lse[1] == absorbed.HIDDEN)


def test_slots_that_are_dealt_over_devices_give_what_a_whole_cache_gives():
    """Rows that end on the first device, on the last, and before every device has a slot."""
    index = np.asarray([[0], [2], [-1], [63], [64]], np.int32)
    q, latent = example(5, 1, 8, 80, seed=3)
    q, latent = dirty(q, latent, index)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))

    def fn(q, latent, new, index, slots):
        at = own_slots(slots, "tensor")
        own = latent.at[jnp.arange(5)[:, None], jnp.where(at < 0, 20, at)].set(new, mode="drop")
        args = q[..., :C], q[..., C:], own, index
        o = absorbed_attention(*args, scale=SCALE, axis="tensor", impl="plain")
        return o, all_slots(own, "tensor")[None]

    heads, empty = P(None, None, "tensor"), jnp.zeros((5, 80, C + R))
    run = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(heads, P(None, "tensor"), P(), P(), P()),
        out_specs=(heads, P("tensor")),
    )
    slots = jnp.where(np.arange(80) % 7 == 3, -1, jnp.arange(80))[None].repeat(5, 0)
    written = jnp.where(slots[..., None] >= 0, latent, 0)
    o, whole = jax.jit(run)(q, empty, latent, jnp.asarray(index), slots)
    for each in whole:
        np.testing.assert_array_equal(each, written)
    assert gap(o, defined(jnp.nan_to_num(q), np.nan_to_num(written, posinf=0), index)) <= F32
    assert not np.asarray(o)[2].any()
