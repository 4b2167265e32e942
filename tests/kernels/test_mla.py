"""MLA attention: the block path against the definition, and the cache doors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mla_inputs import SCALE, TIGHT, VALUE, Q, heads, packed

from pallas_kernels.mla import (
    absorbed_attention,
    blocks,
    cached_attention,
    expand,
    mosaic,
    reference,
    self_attention,
)


def cached_with(q, latent_BSM, *rest, **options):
    return cached_attention(q, jnp.swapaxes(latent_BSM, 1, 2), *rest, **options)


def latents(seed, B, S, H=2, C=20, shared=8):
    """A cache and what makes keys and values of Q and VALUE numbers a head of it."""
    draw = np.random.default_rng(seed).normal
    shapes = (B, S, C + shared), (C, H, Q - shared), (C, H, VALUE)
    return [
        jnp.asarray(draw(size=shape) * std, jnp.float32)
        for shape, std in zip(shapes, (1, C**-0.5, C**-0.5), strict=True)
    ]


def interpreted(monkeypatch):
    """The kernel of "pallas" runs here, in blocks of 128."""
    monkeypatch.setattr(mosaic, "BLOCK", 128)
    monkeypatch.setattr(mosaic, "TILE", 128)
    monkeypatch.setattr(mosaic, "attend", partial(mosaic.attend, heads=(2, 1), interpret=True))


def run(door, *arrays, **options):
    """One compiled call: faster than op by op, and never a stale trace of another block size."""
    return jax.jit(lambda *x: door(*x, scale=SCALE, **options))(*arrays)


def differentiate(attend):
    """attend, compiled, with the gradients of its product with fixed uneven weights."""

    def loss(q, k, v):
        o = attend(q, k, v)
        return (o.astype(jnp.float32) * uneven(v.shape)).sum(), o

    def everything(q, k, v):
        grads, o = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return [o, *grads]

    return jax.jit(everything)


def uneven(shape):
    return jnp.asarray(np.random.default_rng(99).normal(size=shape), jnp.float32)


def both(q, k, v, segments):
    """Values and gradients of the block path and of the definition."""
    return [
        differentiate(lambda *x, impl=impl: self_attention(*x, segments, scale=SCALE, impl=impl))(
            q, k, v
        )
        for impl in ("blocks", "reference")
    ]


def assert_same(got, want, **tolerance):
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **tolerance)


@pytest.mark.parametrize("T, block", [(1, 256), (2, 256), (63, 256), (65, 64), (130, 32)])
def test_blocks_equal_the_definition_at_awkward_lengths(T, block, monkeypatch):
    """One block, a second block of one query, and pieces of two blocks with part-filled ends."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", block)
    q, k, v = heads(T, 2, T)
    segments = packed(T, [1, T // 2], [T])
    got, want = both(q, k, v, segments)
    assert_same(got, want, **TIGHT)


def test_a_thousand_tokens_go_through_several_blocks_and_equal_the_definition():
    """T=1000 at the shipped block size: four pieces, none of them a multiple of the row."""
    q, k, v = heads(1, 1, 1000)
    segments = packed(1000, [400, 1, 550])
    got, want = both(q, k, v, segments)
    assert_same(got, want, **TIGHT)


@pytest.mark.parametrize("block", [256, 64, 32])
def test_the_largest_logit_of_each_head_is_that_of_the_definition(block, monkeypatch):
    """Whole, in blocks and pieces, and apart from attention; a hidden pair has the largest of all,
    and pads hold NaN. Without a visible pair it is the least float32."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", block)
    q, k, v = heads(7, 2, 200)
    segments = packed(200, [1, 99, 100], [64, 1, 70])
    q, k = q.at[0, 50].multiply(9), k.at[0, 120].multiply(9)  # another document, and later
    want = run(reference.largest, q, k, segments)
    assert want.max() < SCALE * jnp.einsum("Hq,Hq->H", q[0, 50], k[0, 120]).max()
    dirty = [x.at[1, 140:].set(jnp.nan) for x in (q, k, v)]
    o, largest = run(self_attention, *dirty, segments, impl="blocks", keep_largest=True)
    np.testing.assert_allclose(largest, want, **TIGHT)
    np.testing.assert_array_equal(o, run(self_attention, *dirty, segments, impl="blocks"))
    least = run(self_attention, q, k, v, 0 * segments, impl="blocks", keep_largest=True)[1]
    np.testing.assert_array_equal(least, jnp.finfo(jnp.float32).min)


def test_bfloat16_stays_within_its_rounding():
    """Probabilities and output are rounded to 8 bits: 2^-8 of values up to 4, twice, and grads."""
    q, k, v = heads(3, 2, 200, dtype=jnp.bfloat16)
    segments = packed(200, [200], [10, 150])
    got, want = both(q, k, v, segments)
    assert got[0].dtype == jnp.bfloat16
    assert_same(
        [x.astype(np.float32) for x in got],
        [x.astype(np.float32) for x in want],
        rtol=2**-6,
        atol=2**-5,
    )


def test_float32_output_of_bfloat16_inputs_is_not_rounded():
    """Report sec. 2.1.2 keeps the attention output in float32 during training."""
    q, k, v = heads(4, 1, 70, dtype=jnp.bfloat16)
    ones = jnp.ones((1, 70), jnp.int32)
    o = run(self_attention, q, k, v, ones, impl="blocks", out_dtype=jnp.float32)
    assert o.dtype == jnp.float32
    assert bool((o != o.astype(jnp.bfloat16)).any())
    np.testing.assert_array_equal(
        o.astype(jnp.bfloat16), run(self_attention, q, k, v, ones, impl="blocks")
    )


def test_a_segment_of_length_one_returns_its_own_value():
    """T03: documents of one token, many in a row."""
    q, k, v = heads(5, 1, 40)
    segments = jnp.arange(1, 41, dtype=jnp.int32)[None]
    o = run(self_attention, q, k, v, segments, impl="blocks")
    np.testing.assert_allclose(o, v, rtol=1e-6)


def test_packed_documents_equal_each_document_alone(monkeypatch):
    """T07: documents of 5, 1, 70 and 64 tokens in one row of 160, against one row for each."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", 64)
    lengths = [5, 1, 70, 64]
    starts = np.cumsum([0, *lengths])
    q, k, v = heads(6, 1, 160)
    segments = packed(160, lengths)
    o = run(self_attention, q, k, v, segments, impl="blocks")
    alone = [jnp.concatenate([jnp.roll(x, -s, axis=1) for s in starts[:4]]) for x in (q, k, v)]
    ids = packed(160, *[[n] for n in lengths])
    want = run(self_attention, *alone, ids, impl="reference")
    for row, (start, n) in enumerate(zip(starts[:4], lengths, strict=True)):
        np.testing.assert_allclose(o[0, start : start + n], want[row, :n], **TIGHT)
    assert not o[:, starts[4] :].any()


def test_what_a_pad_holds_reaches_nothing(monkeypatch):
    """NaN, inf and huge numbers in pads; row 1 is all pads. Real tokens do not change by a bit."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", 32)
    clean = heads(7, 2, 50)
    segments = packed(50, [20, 13], [])
    pad = (segments == 0)[..., None, None]
    garbage = jnp.asarray([jnp.nan, jnp.inf, 1e30])[jnp.arange(50) % 3][:, None, None]

    def attend(*x):
        return self_attention(*x, segments, scale=SCALE, impl="blocks")

    dirty = [jnp.where(pad, garbage, x) for x in clean]
    compiled = differentiate(attend)
    got, want = compiled(*dirty), compiled(*clean)
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
        assert not a[np.broadcast_to(pad, a.shape)].any(), f"{name} of a pad is not 0"


def test_a_poisoned_row_leaves_the_other_rows_bit_for_bit_equal():
    """T10: batch of 4, NaN in row 2."""
    q, k, v = heads(8, 4, 30)
    ones = jnp.ones((4, 30), jnp.int32)
    clean = run(self_attention, q, k, v, ones, impl="blocks")
    o = run(self_attention, q, k.at[2, 3].set(jnp.nan), v, ones, impl="blocks")
    assert jnp.isnan(o[2, 3:]).all()
    others = np.array([0, 1, 3])
    np.testing.assert_array_equal(o[others], clean[others])


@pytest.mark.parametrize("impl", ["blocks", "pallas"])
def test_pieces_over_a_cache_equal_one_pass(impl, monkeypatch):
    """130 tokens as 64 + 64 + 2; slots not yet written hold NaN, the last piece has pads.

    "pallas" in blocks of 128, interpreted: a piece that begins in one block ends in another.
    """
    monkeypatch.setattr(blocks, "MAX_BLOCK", 16)
    interpreted(monkeypatch)
    q, (latent, *keys) = heads(9, 2, 130)[0], latents(9, 2, 130)
    one = jnp.ones((2, 130), jnp.int32)
    want = run(self_attention, q, *expand(latent, *keys), one, impl="reference")
    attend = jax.jit(lambda *x: cached_with(*x, scale=SCALE, impl=impl))
    for start, n in ((0, 64), (64, 64), (128, 2)):
        slots = jnp.arange(160)[None, :, None] < start + n
        cache = jnp.where(slots, jnp.pad(latent, ((0, 0), (0, 30), (0, 0))), jnp.nan)
        index = np.full((2, 64), -1, np.int32)
        index[:, :n] = np.arange(start, start + n)
        piece = jnp.full((2, 64, 2, Q), jnp.nan).at[:, :n].set(q[:, start : start + n])
        o = attend(piece, cache, *keys, jnp.asarray(index))
        np.testing.assert_allclose(o[:, :n], want[:, start : start + n], **TIGHT)
        assert not o[:, n:].any()


@pytest.mark.parametrize("impl", ["blocks", "pallas"])
def test_cached_equals_its_definition_when_rows_differ_in_length(impl, monkeypatch):
    """Rows at slots 3.., 40.. and one that is all pads (T11: neighbours do not matter)."""
    interpreted(monkeypatch)
    q, (latent, *keys) = heads(10, 3, 7)[0], latents(11, 3, 50)
    index = jnp.asarray([[3 + t for t in range(7)], [40 + t for t in range(7)], [-1] * 7])
    got = run(cached_with, q, latent, *keys, index, impl=impl)
    want = run(reference.cached_attention, q, *expand(latent, *keys), index)
    np.testing.assert_allclose(got[:2], want[:2], **TIGHT)
    alone = run(cached_with, q[:1], latent[:1], *keys, index[:1], impl=impl)
    np.testing.assert_allclose(got[:1], alone, rtol=1e-6, atol=1e-6)
    assert not got[2].any()


@pytest.mark.parametrize("T", [1, 5])
def test_absorbed_equals_expanded_with_the_projection_folded_in(T):
    """k3-facts 3.5: q~ = W_UK^T q, o = W_UV (sum p c); the cache holds [c | k_pe] per slot."""
    B, S, H, C, k_nope, r, v_width = 2, 33, 3, 20, 12, 6, 10
    draw = np.random.default_rng(12).normal
    q_nope, q_pe = (jnp.asarray(draw(size=(B, T, H, n)), jnp.float32) for n in (k_nope, r))
    c_BSC, k_pe_BSr = (jnp.asarray(draw(size=(B, S, n)), jnp.float32) for n in (C, r))
    key_CHk, value_CHv = (jnp.asarray(draw(size=(C, H, n)), jnp.float32) for n in (k_nope, v_width))
    index = jnp.asarray([[20 + t for t in range(T)], [7 + t for t in range(T)]])
    exact = dict(precision=jax.lax.Precision.HIGHEST)

    q_BTHq = jnp.concatenate([q_nope, q_pe], -1)
    latent = jnp.concatenate([c_BSC, k_pe_BSr], -1)
    want = run(cached_with, q_BTHq, latent, key_CHk, value_CHv, index)

    latent = jnp.where(jnp.arange(S)[None, :, None] <= index.max(1)[:, None, None], latent, jnp.nan)
    folded = jnp.einsum("BTHk,CHk->BTHC", q_nope, key_CHk, **exact)
    o_BTHC = run(absorbed_attention, folded, q_pe, jnp.swapaxes(latent, 1, 2), index)
    got = jnp.einsum("BTHC,CHv->BTHv", o_BTHC, value_CHv, **exact)
    # Scores and outputs reach 20 here, and one product is associated the other way.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    clean = jnp.nan_to_num(latent)
    defined = run(reference.absorbed_attention, folded, q_pe, clean, index)
    np.testing.assert_allclose(o_BTHC, defined, rtol=1e-4, atol=1e-4)


def test_scores_are_never_held_whole():
    """T=8192, H=2: [T, S] in float32 is 512 MiB; both passes plan less than half of it."""
    T, H = 8192, 2
    shapes = [jax.ShapeDtypeStruct((1, T, H, width), jnp.float32) for width in (192, 192, 128)]
    segments = jnp.ones((1, T), jnp.int32)

    def loss(*x):
        return self_attention(*x, segments, scale=192**-0.5, impl="blocks").sum()

    plan = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*shapes).compile()
    assert plan.memory_analysis().temp_size_in_bytes < T * T * H * 4 / 2


def test_shards_of_the_batch_equal_one_device(monkeypatch):
    """check_vma=True over 4 devices, forward and gradients, one loop over three blocks."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", 8)
    monkeypatch.setattr(blocks, "PREFIXES", 1)
    q, k, v = heads(13, 4, 20)
    segments = packed(20, *[[3 + b, 9] for b in range(4)])
    want = differentiate(lambda *x: self_attention(*x, segments, scale=SCALE, impl="reference"))(
        q, k, v
    )
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )

    def local(q, k, v, segments, weights):
        def attend(*x):
            return self_attention(*x, segments, scale=SCALE, impl="blocks")

        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(weights)

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        args = (jax.device_put(x, rows) for x in (q, k, v, segments, uneven(v.shape)))
        shards = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), check_vma=True)
        got = jax.jit(shards)(*args)
    assert_same(got, want, **TIGHT)


def test_misfit_arguments_are_refused_with_their_numbers():
    """Each message names the door and the offending shapes."""
    q, k, v = heads(14, 2, 6)
    ids = jnp.ones((2, 6), jnp.int32)
    with pytest.raises(ValueError, match=r"impl='flash' is not one of"):
        self_attention(q, k, v, ids, scale=1.0, impl="flash")
    with pytest.raises(ValueError, match="6 queries but 5 keys"):
        self_attention(q, k[:, :5], v[:, :5], ids, scale=1.0)
    with pytest.raises(ValueError, match=r"q-k width must agree.*\(2, 6, 2, 23\)"):
        self_attention(q, k[..., :-1], v, ids, scale=1.0)
    with pytest.raises(ValueError, match="share one dtype.*bfloat16"):
        self_attention(q, k, v.astype(jnp.bfloat16), ids, scale=1.0)
    with pytest.raises(ValueError, match=r"q_index must be integers of shape \(2, 6\)"):
        cached_with(q, *latents(14, 2, 6), ids[:, :5], scale=1.0)
    with pytest.raises(ValueError, match=r"impl='flash' is not one of \('auto', 'blocks', 'pal"):
        cached_with(q, *latents(14, 2, 6), ids, scale=1.0, impl="flash")
    with pytest.raises(ValueError, match="must sum to the latent's M=9"):
        absorbed_attention(q[..., :5], q[..., :3], jnp.zeros((2, 9, 8)), ids, scale=1.0)
