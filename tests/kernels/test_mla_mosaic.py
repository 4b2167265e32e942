"""The attention kernels of a TPU, interpreted, against the definition: values, all gradients,
largest logits, and the list of blocks that they go through."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from mla_inputs import SCALE, TIGHT, VALUE, heads, packed

from pallas_kernels.mla import mosaic, mosaic_kernels, reference, self_attention

# Scratch and outputs hold NaN until they are written, and a copy that overtakes a read is told.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
LEAST = np.finfo(np.float32).min


@pytest.fixture
def small(monkeypatch):
    """Blocks of 256 in tiles of 128, and gradients of 256 queries at a time."""
    for name, n in (("BLOCK", 256), ("TILE", 128), ("QUERIES", 256)):
        monkeypatch.setattr(mosaic, name, n)


def everything(attend, weights):
    """o, largest_H and the gradients of o's product with the weights."""

    def loss(*qkv):
        o, largest = attend(*qkv)
        return (o.astype(jnp.float32) * weights).sum(), (o, largest)

    def run(*qkv):
        grads, found = jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return [*found, *grads]

    return jax.jit(run)


def kernels(segments, heads=(2, 1), interpret=True, first=0, keys=None, **options):
    keys = segments if keys is None else keys
    options |= dict(scale=SCALE, heads=heads, interpret=interpret)
    return lambda *qkv: mosaic.attend_real(*qkv, segments, keys, first, **options)


def definition(segments):
    def attend(q, k, v):
        o = reference.self_attention(q, k, v, segments, scale=SCALE)
        return o, reference.largest(q, k, segments, scale=SCALE)

    return attend


def assert_same(got, want, **tolerance):
    for name, a, b in zip(("o", "largest", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **(tolerance or TIGHT))


def compare(qkv, segments, **options):
    weights = jnp.asarray(np.random.default_rng(9).normal(size=qkv[2].shape), jnp.float32)
    found = [
        everything(attend, weights)(*qkv)
        for attend in (kernels(segments, **options), definition(segments))
    ]
    assert_same(*found)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 128, 130])
def test_lengths_around_a_tile(T):
    """One block, filled up to whole lanes; a document to the end, two documents, and pads alone."""
    compare(heads(T, 3, T), packed(T, [T], [(T + 1) // 2, T // 2], []))


@pytest.mark.parametrize(
    "T, documents",
    [(256, [256]), (700, [700]), (700, [1, 255, 256, 100]), (1000, [300, 1, 1, 500, 198])],
)
def test_rows_of_several_blocks(T, documents, small):
    """Blocks that are skipped, open and masked; documents of one token, edges at blocks' edges;
    gradients of 256 queries at a time."""
    compare(heads(T, 1, T), packed(T, documents))


def test_no_scratch_is_read_before_it_is_written(small):
    """Two tiles a block, two pieces of queries, and two rows, of which one has fewer pairs of
    blocks and stands still at the end of the list."""
    compare(heads(3, 2, 500), packed(500, [500], [200, 250]), interpret=CAREFUL)


@pytest.mark.parametrize("H, at_a_time", [(3, (1, 1)), (4, (2, 2)), (4, (1, 2))])
def test_heads_at_a_time_change_nothing(H, at_a_time):
    compare(heads(4, 1, 130, H), packed(130, [50, 70]), heads=at_a_time)


def test_documents_in_pieces_see_themselves(small):
    """Equal segments need not lie together: 1 2 1 2, and a pad between."""
    ids = np.repeat([1, 2, 0, 1, 2], [200, 56, 44, 150, 150])[None]
    compare(heads(5, 1, 600), jnp.asarray(ids, jnp.int32))


def test_a_query_begins_where_its_row_says(small):
    """Queries 0, 130 and 300 of rows of 500, each with its own documents; pads among them."""
    q, k, v = heads(6, 3, 500)
    segments = packed(500, [500], [100, 250, 100], [310, 190])
    first, T = np.asarray([0, 130, 300]), 200
    weights = np.random.default_rng(9).normal(size=(3, T, 2, VALUE)).astype(np.float32)

    def cut(x):
        return jnp.stack([row[at : at + T] for row, at in zip(x, first, strict=True)])

    def define(q, k, v):
        o = cut(reference.self_attention(q, k, v, segments, scale=SCALE))
        return o, jnp.zeros(2)

    def attend(q, k, v):
        at = kernels(cut(segments), first=jnp.asarray(first), keys=segments)
        return at(cut(q), k, v)[0], jnp.zeros(2)

    assert_same(*(everything(f, weights)(q, k, v) for f in (attend, define)))


def test_queries_that_see_nothing_add_nothing(small):
    """Queries whose document has no key: o is finite, no key gets a gradient, largest is the least
    float32. Blocks of keys that no query sees get zeros and not what was in memory."""
    q, k, v = heads(7, 1, 300)
    nobody, keys = jnp.full((1, 300), 7, jnp.int32), jnp.ones((1, 300), jnp.int32)
    weights = jnp.ones(v.shape)
    attend = kernels(nobody, keys=keys, interpret=CAREFUL)

    o, largest, *grads = everything(attend, weights)(q, k, v)
    np.testing.assert_array_equal(largest, LEAST)
    for grad in grads:
        np.testing.assert_array_equal(grad, 0)
    assert bool(jnp.isfinite(o).all())


def test_bfloat16_is_rounded_where_products_are():
    """Against the definition in float32: p and o are rounded to 8 bits, 2^-8 of values up to 4, and
    so are do, p and ds in gradients. A float32 result of bfloat16 inputs is not rounded."""
    qkv, segments = heads(8, 2, 200, dtype=jnp.bfloat16), packed(200, [200], [10, 150])
    weights = jnp.asarray(np.random.default_rng(9).normal(size=qkv[2].shape), jnp.bfloat16)
    got = everything(kernels(segments), weights)(*qkv)
    want = everything(definition(segments), weights)(*qkv)
    assert got[0].dtype == got[2].dtype == jnp.bfloat16
    as32 = [[x.astype(np.float32) for x in xs] for xs in (got, want)]
    assert_same(*as32, rtol=2**-6, atol=2**-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)  # logits are exact sums
    o = kernels(segments, out_dtype=jnp.float32)(*qkv)[0]
    assert o.dtype == jnp.float32
    assert bool((o != o.astype(jnp.bfloat16)).any())


def test_large_logits_do_not_overflow():
    """Logits of thousands, with either sign: exp of a difference to the largest, nothing else."""
    q, k, v = heads(10, 1, 130)
    found = [f(packed(130, [130]))(100 * q, 30 * k, v) for f in (kernels, definition)]
    (o, largest), want = found
    np.testing.assert_allclose(largest, want[1], rtol=1e-6)
    # A logit of 10,000 is known to 2^-10 of 1, which is what its exponential is wrong by.
    np.testing.assert_allclose(o, want[0], atol=2e-2)


def test_the_list_holds_every_pair_that_sees(small):
    """Drawn rows, documents in any order, pads and first positions, against all pairs of tokens:
    a pair of blocks is listed if a token sees another, OPEN only if all do, once, in order, with
    its first and last marked; and no block of the outer kind is left out."""
    rng = np.random.default_rng(11)
    for rows in (256, 128) * 10:
        plan = mosaic.Plan(1.0, jnp.float32, rows, 128, 128, rows, (1, 1), True)
        T, S = 512, 640
        ids = rng.integers(0, 3, size=(2, 5))
        keys = np.repeat(ids, S // 5, axis=1)
        queries = np.repeat(rng.integers(0, 3, size=(2, 4)), T // 4, axis=1)
        first = rng.integers(0, 200, size=2) // 64 * 64
        queries[queries == 0] = -1  # a pad's
        sees = (queries[:, :, None] == keys[:, None]) & (
            np.arange(S) <= (first[:, None] + np.arange(T))[..., None]
        )
        sees = sees.reshape(2, T // rows, rows, 5, 128).transpose(0, 1, 3, 2, 4)
        some, all_ = sees.any((3, 4)), sees.all((3, 4))
        for by_keys in (False, True):
            args = (jnp.asarray(x, jnp.int32) for x in (queries[:, None], keys[:, None], first))
            codes, steps = mosaic.pairs(plan, *args, by_keys=by_keys)
            longest = 0
            for b, row in enumerate(np.asarray(codes)):
                listed = [tuple(map(int, mosaic_kernels.unpacked(code))) for code in row]
                idle = [x for x in listed if not x[2]]
                listed = [x for x in listed if x[2]]
                assert all(x[:2] == listed[-1][:2] for x in idle)
                longest = max(longest, len(listed))
                check_list(listed, some[b], all_[b], by_keys, plan.rows, first[b])
            assert longest == steps


def check_list(listed, some, all_, by_keys, rows, first):
    places = [(j, i) if by_keys else (i, j) for i, j, _ in listed]
    assert places == sorted(set(places))
    outers = [outer for outer, _ in places]
    assert set(outers) == set(range(some.shape[by_keys]))
    for n, (i, j, kind) in enumerate(listed):
        is_first = n == 0 or outers[n - 1] != outers[n]
        is_last = n == len(listed) - 1 or outers[n + 1] != outers[n]
        assert bool(kind & mosaic.FIRST) == is_first
        assert bool(kind & mosaic.LAST) == is_last
        pair = kind & (mosaic.OPEN | mosaic.DIAGONAL | mosaic.MASKED)
        assert pair in (mosaic.OPEN, mosaic.DIAGONAL, mosaic.MASKED)
        assert pair != mosaic.DIAGONAL or (rows == 128 and first + rows * i == 128 * j)
        assert all_[i, j] or not kind & mosaic.OPEN
    missed = set(zip(*np.nonzero(some), strict=True)) - {(i, j) for i, j, _ in listed}
    assert not missed


def test_blocks_are_whole_and_fit():
    """k3's heads: one device's share of each chip. What never fits is refused with numbers."""
    assert [mosaic.block_and_tile(T) for T in (1, 128, 130, 512, 513, 1100, 8192)] == [
        (128, 128), (128, 128), (256, 256), (512, 512), (1024, 512), (512, 512), (1024, 512),
    ]  # fmt: skip
    assert mosaic.queries_per_call(8192, 1024) == 8192
    assert mosaic.queries_per_call(65536, 1024) == 8192
    assert mosaic.queries_per_call(9 * 1024, 1024) == 5 * 1024
    sizes, mib = (1024, 512, 1024, 192, 128), 2**20
    for vmem in (64 * mib, 128 * mib):
        assert mosaic.heads_per_step(12, *sizes, 2, 0, vmem) == 2
        assert mosaic.heads_per_step(3, *sizes, 2, 0, vmem) == 1
    assert mosaic.heads_per_step(12, *sizes, 2, 8192, 64 * mib) == 1
    assert mosaic.heads_per_step(12, *sizes, 2, 8192, 128 * mib) == 2
    mosaic.check_list(1, 64, 1024, mib)
    with pytest.raises(
        ValueError, match="4 rows of 256 blocks of queries and 256 of keys need a l"
    ):
        mosaic.check_list(4, 256, 256, mib)
    with pytest.raises(ValueError, match=r"1024 keys, 192 and 128 wide, need \d+ bytes of VMEM"):
        mosaic.heads_per_step(12, *sizes, 4, 8192, 16 * mib)


def test_pads_cost_no_blocks(small):
    """A row's last pads, of its own or filled up, are of no document: their block meets that of its
    documents alone, and rows of pads have one pair for each block."""
    plan = mosaic.Plan(1.0, jnp.float32, 128, 128, 128, 128, (1, 1), True)

    def steps(ids, by_keys):
        queries = jnp.where(ids == 0, -1, ids)
        args = queries[:, None], ids[:, None], jnp.zeros(1, jnp.int32)
        return int(mosaic.pairs(plan, *args, by_keys=by_keys)[1])

    for by_keys in (False, True):
        assert steps(packed(1024, [256] * 4), by_keys) == 12
        assert steps(packed(1024, [256, 256, 256, 250]), by_keys) == 12
        assert steps(packed(1024, []), by_keys) == 8


def test_pieces_of_queries_of_rows_that_begin_elsewhere(small):
    """Three backward passes, each with queries of its own position in two rows."""
    q, k, v = heads(13, 2, 600, S=900)
    keys, first = packed(900, [900], [400, 450]), jnp.asarray([300, 37])
    segments = jnp.stack([keys[0, 300:], keys[1, 37:637]])
    weights = jnp.asarray(np.random.default_rng(9).normal(size=(2, 600, 2, VALUE)), jnp.float32)

    def define(q, k, v):
        first_B1 = np.asarray([[300], [37]])
        sees = np.arange(900) <= (first_B1 + np.arange(600))[..., None]
        sees = sees & (segments[:, :, None] == keys[:, None]) & (segments != 0)[..., None]
        x = SCALE * jnp.einsum("BTHq,BSHq->BHTS", q, k, precision="highest")
        p = jax.nn.softmax(jnp.where(sees[:, None], x, LEAST), axis=-1)
        o = jnp.einsum("BHTS,BSHv->BTHv", p, v, precision="highest")
        o = jnp.where((segments != 0)[..., None, None], o, 0)
        return o, jnp.where(sees[:, None], x, LEAST).max((0, 2, 3))

    attend = kernels(segments, first=first, keys=keys)
    assert_same(*(everything(f, weights)(q, k, v) for f in (attend, define)))


def test_what_values_share_does_not_reach_the_gradients():
    """Values around 16, a float32 result of bfloat16 inputs: p (dp - inner) cancels the 16 only if
    both are made of the same rounded gradient. 2^-8 of each of p, ds and do, and sums of some."""
    q, k, v = heads(14, 1, 128, dtype=jnp.bfloat16)
    v, segments = v + 16, packed(128, [128])
    weights = jnp.asarray(np.random.default_rng(9).normal(size=v.shape), jnp.float32)
    got = everything(kernels(segments, out_dtype=jnp.float32), weights)(q, k, v)
    want = everything(definition(segments), weights)(*(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(got[2:4], want[2:4], strict=True):
        error = np.linalg.norm(a.astype(np.float32) - b) / np.linalg.norm(b)
        assert error < 0.02  # 0.05 with a gradient that is rounded once


def test_attention_is_kept_where_a_policy_says_so():
    """Under remat that keeps what is `ATTENDED`, the gradient runs the forward kernel once."""
    qkv, segments = heads(15, 1, 128), packed(128, [128])
    policy = jax.checkpoint_policies.save_only_these_names(mosaic.ATTENDED)

    def forwards(policy):
        attend = jax.checkpoint(lambda *x: kernels(segments)(*x)[0].sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(attend))(*qkv)).count("name=mla_forward")

    assert forwards(policy) == 1
    assert forwards(None) == 2


def test_the_door_takes_the_kernel(monkeypatch):
    """`self_attention` with NaN in pads, by the kernel, interpreted; o in float32 if asked for."""
    monkeypatch.setattr(mosaic, "attend", partial(mosaic.attend, heads=(2, 1), interpret=True))
    qkv, segments = heads(12, 2, 100), packed(100, [60, 20], [])
    dirty = [jnp.where((segments == 0)[..., None, None], jnp.nan, x) for x in qkv]
    options = dict(scale=SCALE, impl="pallas", keep_largest=True)
    o, largest = self_attention(*dirty, segments, **options)
    want = definition(segments)(*qkv)
    np.testing.assert_allclose(o, want[0], **TIGHT)
    np.testing.assert_allclose(largest, want[1], **TIGHT)
