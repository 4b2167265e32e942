"""Absorbed decode attention: the TPU kernel, interpreted, and the jnp form against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.mla import absorbed, absorbed_attention, all_slots, slots, write_slots
from pallas_kernels.mla.absorbed import slots_per_step, vmem_bytes

C, R, SCALE = 128, 16, 192**-0.5
# Copies every block as a TPU would, fills memory with NaN and reports races.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
QUICK = {"xla_backend_optimization_level": 0}
# float32 sums of some hundred terms, relative to the norm of the result.
F32 = 2e-6
# Weights and result are rounded to bfloat16.
BF16 = 2.0**-7


def slots_last(attend, at=1):
    """The form as it is called with a cache [B, S, M], its argument number `at`."""

    def fn(*args, **options):
        return attend(*args[:at], jnp.swapaxes(args[at], 1, 2), *args[at + 1 :], **options)

    return fn


plain, kernel = slots_last(absorbed.attend_plain), slots_last(absorbed.attend)
door = slots_last(absorbed_attention, at=2)


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
    attend = plain if form == "plain" else kernel

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
        lambda *x: kernel(*x, scale=SCALE, C=C, slots=128, interpret=CAREFUL),
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
            return door(q[..., :C], q[..., C:], latent, index, **args).sum()

        return jax.grad(fn)

    step = 1e-2 * jnp.sign(total("plain")(q))
    sums = [defined(q + sign * step, latent, np.asarray(index)).sum() for sign in (1, -1)]
    slope = float((total("plain")(q) * step).sum())
    np.testing.assert_allclose(slope, (sums[0] - sums[1]) / 2, rtol=1e-2)
    with pytest.raises(ValueError, match="has no gradient; impl='plain' has one"):
        jax.grad(lambda q: kernel(q, latent, index, scale=1.0, C=C, slots=128).sum())(q)


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
        door(*halves, latent, index, scale=1.0, impl="pallas")
    with pytest.raises(ValueError, match="C=64 is no multiple of 128"):
        kernel(q[:, :1], latent, index[:, :1], scale=1.0, C=64)
    with pytest.raises(ValueError, match="impl='fast' is not one of"):
        door(*halves, latent, index, scale=1.0, impl="fast")
    with pytest.raises(ValueError, match="q is float32 and the latent bfloat16"):
        kernel(q[:, :1], latent.astype(jnp.bfloat16), index[:, :1], scale=1.0, C=C)
    with pytest.raises(ValueError, match="100000 queries and 128 slots of M=576 need"):
        slots_per_step(8192, 100_000, 576, 512, 2, 64 << 20)


@pytest.mark.parametrize("form", ["pallas", "plain"])
def test_rows_are_read_out_of_a_cache_of_all_layers(form):
    """The second of three layers, its index traced; the others hold NaN."""
    index = np.asarray([[200], [64]], np.int32)
    q, latent = example(2, 1, 3, 256, seed=4)
    stack = jnp.concatenate([jnp.full_like(latent, jnp.nan), latent, jnp.full_like(latent, np.nan)])
    options = {} if form == "plain" else dict(slots=128, interpret=CAREFUL)
    attend = plain if form == "plain" else kernel
    run = jax.jit(
        lambda first: attend(q, stack, jnp.asarray(index), scale=SCALE, C=C, first=first, **options)
    )
    assert gap(run(jnp.int32(2)), defined(q, latent, index)) <= F32


@pytest.mark.parametrize("form", ["pallas", "plain"])
def test_the_log_of_the_sum_is_returned_too(form):
    index = np.asarray([[200], [-1], [64]], np.int32)
    q, latent = example(3, 1, 4, 256, seed=2)
    options = {} if form == "plain" else dict(slots=128, interpret=CAREFUL)
    attend = plain if form == "plain" else kernel
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

    def fn(q, latent, new, index, at):
        cache = write_slots(jnp.swapaxes(latent, 1, 2), new, at, axis="tensor", impl="plain")
        o = absorbed_attention(
            q[..., :C], q[..., C:], cache, index, scale=SCALE, axis="tensor", impl="plain"
        )
        return o, all_slots(cache, "tensor")[None]

    heads, empty = P(None, None, "tensor"), jnp.zeros((5, 80, C + R))
    run = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(heads, P(None, "tensor"), P(), P(), P()),
        out_specs=(heads, P("tensor")),
    )
    at = jnp.where(np.arange(80) % 7 == 3, -1, jnp.arange(80))[None].repeat(5, 0)
    written = jnp.where(at[..., None] >= 0, latent, 0)
    o, whole = jax.jit(run)(q, empty, latent, jnp.asarray(index), at)
    for each in whole:
        np.testing.assert_array_equal(jnp.swapaxes(each, 1, 2), written)
    assert gap(o, defined(jnp.nan_to_num(q), np.nan_to_num(written, posinf=0), index)) <= F32
    assert not np.asarray(o)[2].any()


PIECES = {
    "a token in the first block, in the last, a pad, and one past the end": [
        (0, 1), (383, 1), (0, 0), (384, 1)
    ],
    "pieces within a block, over a border, over two, and up to the end": [
        (3, 100), (100, 100), (100, 200), (284, 100)
    ],
}  # fmt: skip


@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_the_kernel_writes_what_a_scatter_writes(pieces, n_devices):
    """Of the second of three layers; the other layers, and slots before and behind, stay."""
    T, B = max(n for _, n in pieces), len(pieces)
    draw = np.random.default_rng(5).standard_normal
    cache = jnp.asarray(draw((3 * B, 24, 384 * n_devices)), jnp.bfloat16)
    new = jnp.asarray(draw((B, T, 24)), jnp.bfloat16)
    at = np.full((B, T), -1, np.int32)
    for row, (start, n) in zip(at, pieces, strict=True):
        row[:n] = np.arange(start, start + n)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n_devices]), ("tensor",))
    found = []
    for write in (slots.write_plain, partial(slots.write, interpret=CAREFUL)):
        fn = partial(write, first=B, axis="tensor" if n_devices > 1 else None)
        split = P(None, None, "tensor")
        run = jax.shard_map(fn, mesh=mesh, in_specs=(split, P(), P()), out_specs=split)
        found.append(jax.jit(run)(cache, new, jnp.asarray(at)))
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0][:B], cache[:B])
    assert np.any(found[0][B : 2 * B] != cache[B : 2 * B])
