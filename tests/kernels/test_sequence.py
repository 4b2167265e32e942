"""Delta rule, convolution and attention on shards of the time axis against the unsharded row.

Every row has 64 tokens and is cut into 2, 4 and 8 shards of eight fake devices, the rest of which
split the rows. Oracles are float64; inputs are float32 where nothing else is said, and sums of
some hundred terms then leave 1e-6 of the largest.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_inputs import BOUND, cotangents, error, exact, projected, pulled

from pallas_kernels import halo
from pallas_kernels.conv import short_conv, short_conv_sharded
from pallas_kernels.kda import gated_kda, gated_kda_sharded
from pallas_kernels.kda.sequence import running_pairs
from pallas_kernels.mla import mosaic, reference, self_attention_sharded, sequence

P = jax.P
T, SHARDS = 64, (2, 4, 8)
TIGHT = 1e-5
# The gate's gradients are sums over all tokens, of both signs: 2e-5 unsharded as well.
SUMS = {"a_log": 5e-5, "bias": 5e-5}

pytestmark = pytest.mark.usefixtures("quick_compiler")


def row(*lengths):
    """Documents of these lengths, numbered on; a negative length is of pads, as are the rest."""
    signed = np.sign(lengths) * np.arange(1, len(lengths) + 1)
    filled = np.repeat(np.maximum(signed, 0), np.abs(lengths))
    return np.pad(filled, (0, T - len(filled))).astype(np.int32)


# By shards of 8. Each row is of one kind, so that a failure names it.
ROWS = {
    "one document in all shards": row(64),
    "ends, one token and starts at edges, 40 tokens over six": row(8, 1, 7, 40, 1, 6),
    "pads within a document, a shard of pads, one token before an edge": np.concatenate(
        [row(5)[:5], np.zeros(14, np.int32), row(5, 7, 1, 8)[:21], np.zeros(24, np.int32)]
    ),
    "all pads": row(-64),
    "pads first, then a document that ends at an edge and one token": row(-19, 29, 1, 15),
    "cut in the middle of everything": row(3, 21, 2, 14, 24),
    "documents of one token": np.arange(1, 65, dtype=np.int32),
    "another document behind a shard of pads": row(6, -20, 10, -1, 2),
}
SEGMENTS = jnp.asarray(np.stack(list(ROWS.values())))
B = len(ROWS)
RIGHT_PADDED = jnp.asarray(np.stack([row(n) for n in (64, 63, 57, 56, 10, 3, 1)] + [row(-64)]))


def mesh(shards):
    devices = np.array(jax.devices()).reshape(-1, shards)
    return jax.sharding.Mesh(devices, ("data", "seq"))


def on_mesh(shards, f, specs, out):
    """f inside shard_map, jitted; letters: t for tokens [B, T, ...], r for rows, w for the rest."""
    kinds = {"t": P("data", "seq"), "r": P("data"), "w": P()}
    ins = tuple(kinds[s] for s in specs)
    outs = tuple(kinds[s] for s in out)
    return jax.shard_map(f, mesh=mesh(shards), in_specs=ins, out_specs=outs, check_vma=True)


def rows_equal(got, want, tolerance, names):
    """Row by row where there are rows: a small one is not hidden behind a large one.

    Of what is zero in truth, as the gradient of a query that sees one key, rounding is left: there
    the tolerance is that of a row as large as all are on average.
    """
    for name, a, b in zip(names, got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape, name
        parts = zip(ROWS, a, b, strict=True) if len(a) == B and a.ndim > 2 else [("all", a, b)]
        for part, x, y in parts:
            size = max(np.linalg.norm(y), np.linalg.norm(b) / len(b))
            assert np.linalg.norm(x - y) <= SUMS.get(name, tolerance) * size, f"{name}: {part}"


# Delta rule


def delta_inputs(dtype=jnp.float32, decay=0.0):
    """K = 8 and V = 12, never equal (T04), two heads, and gradients to pull back."""
    x = projected(T, B=B, H=2, d=8, V=12, dtype=dtype, decay=decay)
    return x, cotangents(x, seed=2)


def delta(shards, impl="chunked"):
    local = partial(gated_kda_sharded, lower_bound=BOUND, axis="seq", impl=impl)
    f = on_mesh(shards, local, "tttttwwrt", "tr")
    return jax.jit(partial(pulled, f))


def poisoned(x, segments):
    return jnp.where((segments != 0).reshape(B, T, *(1,) * (x.ndim - 2)), x, jnp.nan)


@pytest.mark.parametrize("shards", SHARDS)
def test_delta_rule_on_shards_equals_the_recurrence_over_the_row(shards):
    """T04, T06, T07: o, the state after and every gradient; v and do hold NaN at pads."""
    x, grads = delta_inputs()
    dirty = x | {"v": poisoned(x["v"], SEGMENTS)}
    got = delta(shards)(dirty, (poisoned(grads[0], SEGMENTS), grads[1]), SEGMENTS)
    real = (SEGMENTS != 0)[..., None, None]
    want = exact(x, (jnp.where(real, grads[0], 0), grads[1]), SEGMENTS)
    rows_equal(got.values(), want.values(), TIGHT, got)


@pytest.mark.parametrize("decay", [-12.0, 40.0])
def test_delta_rule_on_shards_from_nearly_keeping_to_the_bound(decay):
    """T02: log decays of about -3e-5, where a state crosses all shards, and of exactly -5.

    At the bound the gate's gradients are e^-40 in truth and rounding here: they are left out.
    """
    x, grads = delta_inputs(decay=decay)
    got, want = delta(8)(x, grads, SEGMENTS), exact(x, grads, SEGMENTS)
    names = [n for n in want if decay < 0 or n not in ("logit", "a_log", "bias")]
    rows_equal([got[n] for n in names], [want[n] for n in names], TIGHT, names)


def test_delta_rule_on_shards_in_bfloat16_is_as_near_as_unsharded():
    """o is a sum of two rounded parts: up to twice the rounding of the unsharded run, 2^-9."""
    x, grads = delta_inputs(jnp.bfloat16)
    want = exact(x, grads, SEGMENTS)
    whole = jax.jit(partial(pulled, partial(gated_kda, lower_bound=BOUND, impl="chunked")))
    got, plain = delta(4)(x, grads, SEGMENTS), whole(x, grads, SEGMENTS)
    for name in want:
        bound = 2 * error(plain[name], want[name]) + 2**-9
        assert error(got[name], want[name]) < bound, name


def test_shards_may_be_one():
    """An axis of one device: as without it."""
    x, grads = delta_inputs()
    f = partial(gated_kda_sharded, lower_bound=BOUND, axis="seq", impl="chunked")
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("seq",))
    tokens, whole = P(None, "seq"), P()
    specs = (*(tokens,) * 5, whole, whole, whole, tokens)
    sharded = jax.shard_map(f, mesh=one, in_specs=specs, out_specs=(tokens, whole))
    got = jax.jit(partial(pulled, sharded))(x, grads, SEGMENTS)
    want = exact(x, grads, SEGMENTS)
    rows_equal(got.values(), want.values(), TIGHT, got)


def chunk_pairs(n, g, beta, spread, K=8, V=4, length=64):
    """Float32 pairs of n chunks of tokens, K = 8; keys are `spread` away from one direction."""
    r = np.random.default_rng(0)
    pairs = np.concatenate([np.zeros((n, K, V)), np.broadcast_to(np.eye(K), (n, K, K))], -1)
    for _ in range(length):
        k = np.eye(K)[0] + spread * r.standard_normal((n, K))
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        pairs = pairs * np.exp(g * r.uniform(0.5, 1, (n, K, 1)))
        value = np.concatenate([r.standard_normal((n, V)), np.zeros((n, K))], -1)
        seen = np.einsum("nk,nkw->nw", k, pairs)
        pairs = pairs + beta * k[:, :, None] * (value - seen)[:, None]
    return pairs[:, None, None].astype(np.float32)


@pytest.mark.parametrize(
    ("g", "beta", "spread"),
    [(-10.0 / 1.5, 0.9, 1), (-1e-7, 0.9, 1), (-1e-7, 1e-4, 1), (-1e-7, 0.99, 0.01)],
    ids=["strong decay", "none", "none and hardly written", "none and keys all alike"],
)
def test_a_million_tokens_of_pairs_compose_in_float32(g, beta, spread):
    """16,384 chunks of 64 tokens, forwards and (as for gradients) backwards, against a loop in
    float64 on the same pairs. 2^-24 a product, and errors fade: 1e-5 of the largest state."""
    V, pairs = 4, chunk_pairs(16384, g, beta, spread)
    for reverse in (False, True):
        got = jax.jit(running_pairs, static_argnums=(1, 2))(pairs, V, reverse)[..., :V]
        state, want = np.zeros((8, V)), []
        for pair in (
            pairs[::-1, 0, 0].astype(np.float64) if reverse else pairs[:, 0, 0].astype("f8")
        ):
            state = pair[:, V:] @ state + pair[:, :V]
            want.append(state)
        want = np.stack(want[::-1] if reverse else want)
        worst = np.max(np.abs(np.asarray(got, np.float64)[:, 0, 0] - want))
        assert worst < 1e-5 * np.max(np.abs(want))


# Convolution


def conv_inputs(dtype=jnp.float32):
    draw = np.random.default_rng(3).standard_normal
    shapes = (B, T, 3, 2), (4, 3, 2), (B, 3, 3, 2)
    args = [jnp.asarray(draw(s), dtype) for s in shapes]
    return args, (jnp.asarray(draw(shapes[0]), dtype), jnp.asarray(draw(shapes[2]), dtype))


@partial(jax.jit, static_argnums=0)
def convolved(f, args, grads, segments):
    out, pull = jax.vjp(lambda *x: f(*x, segments), *args)
    return *out, *pull(grads)


CONVOLVED = ("y", "after", "u", "taps", "history")


@pytest.mark.parametrize("shards", SHARDS)
def test_convolution_on_shards_equals_the_row(shards):
    """T06, T07: y and its gradients, documents and pads anywhere, NaN at pads.

    What comes after the row is compared for rows padded on the right: whole, ending at an edge,
    just behind one and within the first shard, shorter than the history, and of pads alone.
    """
    args, grads = conv_inputs()
    sharded = on_mesh(shards, partial(short_conv_sharded, axis="seq"), "twrt", "tr")
    whole = partial(short_conv, impl="reference")
    for segments, last in ((SEGMENTS, 0.0), (RIGHT_PADDED, 1.0)):
        pulls = grads[0], last * grads[1]
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (args, pulls))
        got = convolved(sharded, (poisoned(args[0], segments), *args[1:]), pulls, segments)
        want = convolved(whole, *wide, segments)
        skip = 0 if last else 1
        pairs = [(n, a, b) for n, a, b in zip(CONVOLVED, got, want, strict=True)]
        pairs = [x for x in pairs if not (skip and x[0] == "after")]
        names, got, want = zip(*pairs, strict=True)
        rows_equal(got, want, TIGHT, names)


def test_shards_shorter_than_the_taps_are_refused():
    args, _ = conv_inputs()
    short = [args[0][:, :16], *args[1:], SEGMENTS[:, :16]]
    f = on_mesh(8, partial(short_conv_sharded, axis="seq"), "twrt", "tr")
    with pytest.raises(ValueError, match="3 rows are wanted from a neighbour.*has 2; split T"):
        f(*short)


def test_neighbours_rows_arrive_and_nothing_comes_from_outside_the_row():
    x = jnp.arange(1, B * T + 1).reshape(B, T)

    def local(x):
        both = halo.from_previous(x, "seq", 2), halo.from_next(x, "seq")
        return *both, halo.of_shard(x[:, 0], 3, "seq")

    before, behind, third = on_mesh(8, local, "t", "ttr")(x)
    np.testing.assert_array_equal(before[:, :2], 0)
    np.testing.assert_array_equal(before[:, 2::2], x[:, 6:-8:8])
    np.testing.assert_array_equal(before[:, 3::2], x[:, 7:-8:8])
    np.testing.assert_array_equal(behind[:, :-1], x[:, 8::8])
    np.testing.assert_array_equal(behind[:, -1], 0)
    np.testing.assert_array_equal(third, x[:, 24])


# Attention

H, C, SHARED, KEY, VALUE = 4, 10, 4, 8, 6
SCALE = (KEY + SHARED) ** -0.5


def latent_inputs():
    draw = np.random.default_rng(4).standard_normal
    shapes = (B, T, H, KEY + SHARED), (B, T, C + SHARED), (C, H, KEY), (C, H, VALUE)
    return [jnp.asarray(draw(s), jnp.float32) for s in shapes], jnp.asarray(
        draw((B, T, H, VALUE)), jnp.float32
    )


@partial(jax.jit, static_argnums=0)
def attended(f, args, do, segments):
    o, pull = jax.vjp(lambda *x: f(*x, segments), *args)
    return o, *pull(do)


def definition(q, latent, k, v, segments):
    keys, values = sequence.expand(latent, k, v)
    return reference.self_attention(q, keys, values, segments, scale=SCALE)


ATTENDED = ("o", "q", "latent", "k", "v")


def sharded_attention(shards, **options):
    def local(*args):
        return (self_attention_sharded(*args, scale=SCALE, axis="seq", **options),)

    sharded = on_mesh(shards, local, "ttwwt", "t")
    return lambda *args: sharded(*args)[0]


def largest_over(shards):
    """Each head's largest logit over all shards."""

    def local(*args):
        _, largest = self_attention_sharded(*args, scale=SCALE, axis="seq", keep_largest=True)
        return (jax.lax.pmax(largest, ("data", "seq")),)

    sharded = on_mesh(shards, local, "ttwwt", "w")
    return jax.jit(lambda *args: sharded(*args)[0])


@pytest.mark.parametrize("at_a_time", [1, 4])
@pytest.mark.parametrize("shards", SHARDS)
def test_attention_on_shards_equals_the_definition_over_the_row(shards, at_a_time, monkeypatch):
    """T03, T06, T07: o and all gradients, NaN at pads, all heads at once and one at a time."""
    a_head = B * shards // 8 * T * (KEY + SHARED + VALUE) * 4
    monkeypatch.setattr(sequence, "EXPANDED_BYTES", at_a_time * a_head)
    args, do = latent_inputs()
    dirty = [poisoned(x, SEGMENTS) for x in args[:2]] + args[2:]
    largest = largest_over(shards)(*dirty, SEGMENTS)
    keys, _ = sequence.expand(*args[1:])
    want = reference.largest(args[0], keys, SEGMENTS, scale=SCALE)
    np.testing.assert_allclose(largest, want, rtol=1e-5)
    got = attended(sharded_attention(shards, impl="blocks"), dirty, do, SEGMENTS)
    want = attended(definition, args, do, SEGMENTS)
    rows_equal(got, want, TIGHT, ATTENDED)


@pytest.mark.parametrize("heads", [1, 4])
def test_kernels_on_shards_equal_the_definition(heads, monkeypatch):
    """The TPU kernels, interpreted: 300 tokens a shard in tiles of 128, so that edges of shards
    and tiles differ, and the diagonal's tiles are those that the shard's index says."""
    monkeypatch.setattr(sequence, "EXPANDED_BYTES", heads * 600 * (KEY + SHARED + VALUE) * 4)
    monkeypatch.setattr(mosaic, "BLOCK", 128)
    monkeypatch.setattr(mosaic, "TILE", 128)
    draw = np.random.default_rng(5).standard_normal
    shapes = (1, 600, H, KEY + SHARED), (1, 600, C + SHARED), (C, H, KEY), (C, H, VALUE)
    args = [jnp.asarray(draw(s), jnp.float32) for s in shapes]
    do = jnp.asarray(draw((1, 600, H, VALUE)), jnp.float32)
    segments = jnp.asarray(np.repeat([[1, 0, 2, 3]], [100, 50, 300, 150], axis=1), jnp.int32)
    two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("seq",))

    def local(*x):
        kernels = partial(mosaic.attend_real, heads=(1, 1), interpret=True)
        o, largest = sequence.attend_heads(kernels, *x, SCALE, "seq")
        return o, jax.lax.pmax(largest, "seq")

    tokens = P(None, "seq")
    specs = dict(in_specs=(tokens, tokens, P(), P(), tokens), out_specs=(tokens, P()))
    # The interpreter cuts blocks with indices of another type; a TPU's program is checked.
    both = jax.shard_map(local, mesh=two, check_vma=False, **specs)
    keys, _ = sequence.expand(*args[1:])
    want = reference.largest(args[0], keys, segments, scale=SCALE)
    np.testing.assert_allclose(jax.jit(both)(*args, segments)[1], want, rtol=1e-5)

    def f(*x):
        return both(*x)[0]

    got, want = attended(f, args, do, segments), attended(definition, args, do, segments)
    for name, a, b in zip(ATTENDED, got, want, strict=True):
        assert error(a, b) < TIGHT, name


def test_attention_refuses_what_does_not_fit():
    args, _ = latent_inputs()
    with pytest.raises(ValueError, match="latent has shape .8, 64, 13."):
        self_attention_sharded(
            args[0], args[1][..., :-1], *args[2:], SEGMENTS, scale=1.0, axis="seq"
        )
    with pytest.raises(ValueError, match="impl='flash' is not one of"):
        self_attention_sharded(*args, SEGMENTS, scale=1.0, axis="seq", impl="flash")
