"""Kimi Delta Attention: the chunk form and its gradient against the recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import kda

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
# Float32 sums of a few hundred terms; the worst input here (repeated keys) reaches 4e-6.
F32 = 1e-5
# Bfloat16 operands round at 2^-9 = 2e-3, a few times in a row.
BF16 = 1e-2
# Sizes here are small: compiling takes longer than running.
QUICK = {"xla_backend_optimization_level": 0}


def normal_keys(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def example(b, t, h, k, v, *, seed=0, weak=1e-4, strong=5.0, segments=None):
    """q, k, v, g, beta, state, segments as float64 NumPy; -g is log-uniform in weak .. strong."""
    rng = np.random.default_rng(seed)
    q, key = normal_keys(rng, b, t, h, k) * k**-0.5, normal_keys(rng, b, t, h, k)
    g = -np.exp(rng.uniform(np.log(weak), np.log(strong), (b, t, h, k)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((b, t, h))))
    value, state = rng.standard_normal((b, t, h, v)), rng.standard_normal((b, h, k, v))
    segments = np.ones((b, t), np.int32) if segments is None else segments
    return [q, key, value, g, beta, state, segments]


def single(x, dtype=np.float32):
    """The arrays that a caller would pass: q, k, v in dtype, the rest float32."""
    dtypes = [dtype] * 3 + [np.float32] * 3 + [np.int32]
    return [jnp.asarray(a, d) for a, d in zip(x, dtypes, strict=True)]


def double(x):
    """Exactly the numbers of x, as float64."""
    return [np.asarray(a, np.float64) for a in x[:6]] + [np.asarray(x[6])]


@functools.cache
def compiled(impl):
    """Outputs and all gradients."""

    def run(x, do, dstate):
        out, pull = jax.vjp(lambda *a: kda(*a, x[6], impl=impl), *x[:6])
        return (*out, *pull((do.astype(out[0].dtype), dstate.astype(out[1].dtype))))

    return jax.jit(run, compiler_options=QUICK)


def cotangents(x):
    rng = np.random.default_rng(99)
    return rng.standard_normal(x[2].shape), rng.standard_normal(x[5].shape)


def results(impl, x, cot=None):
    cot = cotangents(x) if cot is None else cot
    return [np.asarray(r, np.float64) for r in compiled(impl)(x, *(jnp.asarray(c) for c in cot))]


def oracle(x, cot=None):
    """The recurrence and its autodiff in float64."""
    with jax.enable_x64(True):
        return results("reference", [jnp.asarray(a) for a in double(x)], cot)


def gap(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    # The floor lets an exact zero come out as one rounding of the terms of size 1 behind it.
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-2)


def assert_close(got, want, tol, names=NAMES, loose=None):
    for name, a, b in zip(names, got, want, strict=True):
        limit = (loose or {}).get(name, tol)
        assert gap(a, b) <= limit, f"{name}: {gap(a, b):.2e} > {limit}"


def loop(x):
    """The definition once more, in NumPy with plain loops: o and the last state."""
    q, k, v, g, beta, state, segments = double(x)
    o, last = np.zeros_like(v), state.copy()
    for b in range(q.shape[0]):
        document = None
        for t in range(q.shape[1]):
            if segments[b, t] == 0:
                continue
            if document not in (None, segments[b, t]):
                last[b] = 0
            document = segments[b, t]
            for h in range(q.shape[2]):
                s = np.exp(g[b, t, h])[:, None] * last[b, h]
                s = s + beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - s.T @ k[b, t, h])
                last[b, h], o[b, t, h] = s, s.T @ q[b, t, h]
    return o, last


def random_segments(b, t):
    """Documents of 1 to 40 tokens with pads before, between, inside and after them."""
    rng = np.random.default_rng(5)
    ids = np.repeat(rng.integers(1, 9, (b, t)), rng.integers(1, 40, t), axis=1)[:, :t]
    return np.where(rng.random((b, t)) < 0.2, 0, ids).astype(np.int32)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_every_form_equals_plain_loops_with_documents_and_pads_anywhere(impl):
    """T07, T06: the oracle itself is checked against a second way of writing it."""
    x = single(example(2, 150, 2, 8, 12, segments=random_segments(2, 150)))
    assert_close(results(impl, x)[:2], loop(x), F32, NAMES[:2])


@pytest.mark.parametrize("t", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 130, 1000])
def test_any_length_gives_the_recurrence_and_its_gradient(t):
    x = single(example(1, t, 1, 16, 24, seed=t))
    assert_close(results("chunked", x), oracle(x), F32)


def test_documents_and_pads_anywhere_keep_every_gradient():
    """T07: three slabs, so that documents also end on chunk and slab edges by chance."""
    x = single(example(2, 1100, 1, 16, 24, segments=random_segments(2, 1100)))
    assert_close(results("chunked", x), oracle(x), F32)


@pytest.mark.parametrize("keys", ["one repeated key", "similar keys"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_correlated_keys_do_not_break_the_inverse(keys, dtype):
    """T01: keys that share 97 % of their energy, or all of it, hardly any decay, beta 0.98."""
    x = example(1, 128, 2, 128, 32, weak=1e-6, strong=1e-3)
    share = 1.0 if keys == "one repeated key" else 0.97
    x[1] = np.sqrt(share) * x[1][:, :1] + np.sqrt(1 - share) * x[1]
    x[1] /= np.linalg.norm(x[1], axis=-1, keepdims=True)
    x[4][:] = 0.98
    x = single(x, dtype)
    # Here dbeta and dv are small differences of sums whose terms bfloat16 has rounded.
    loose = {"dbeta": 4e-2, "dv": 2e-2} if dtype == jnp.bfloat16 else None
    tol = F32 if dtype == np.float32 else BF16
    assert_close(results("chunked", x), oracle(x), tol, loose=loose)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("bound", [-1, -2.5, -3, -5, "exactly -5", "-5 or 0"])
def test_strong_decay_is_finite_and_equal(bound, dtype):
    """T02: g = bound * u with u in 0.6 .. 1, the bound itself, and each channel at either end."""
    x = example(1, 128, 2, 128, 32)
    u = np.random.default_rng(3).uniform(0.6, 1, x[3].shape)
    ends = {"exactly -5": -5 + 0 * u, "-5 or 0": -5.0 * (u > 0.8)}
    x[3] = ends[bound] if bound in ends else u * bound
    x = single(x, dtype)
    # At e^-5 a step the gate's gradient is what is left of terms 10^3 times its size.
    loose = {"dg": 1e-4} if dtype == np.float32 else None
    tol = F32 if dtype == np.float32 else BF16
    assert_close(results("chunked", x), oracle(x), tol, loose=loose)


@pytest.mark.parametrize("strong", [5.0, 0.01])
def test_bfloat16_stays_within_its_rounding(strong):
    x = single(example(1, 128, 2, 128, 32, strong=strong), jnp.bfloat16)
    out = compiled("chunked")(x, *(jnp.asarray(c) for c in cotangents(x)))
    assert "".join(a.dtype.name[0] for a in out) == "bfbbbfff"
    assert_close(out, oracle(x), BF16)


LENGTHS = (1, 1, 130, 1, 64, 63)


def test_rows_of_unlike_lengths_equal_separate_runs():
    """T03: lengths 1, 1, 130, 1, 64, 63 as batch rows, each with its own state."""
    segments = (np.arange(130) < np.array(LENGTHS)[:, None]).astype(np.int32)
    x = single(example(6, 130, 2, 16, 24, segments=segments))
    cot = cotangents(x)
    got = results("chunked", x, cot)
    for row, n in enumerate(LENGTHS):
        state, segments = x[5][row : row + 1], x[6][row : row + 1, :n]
        alone = [a[row : row + 1, :n] for a in x[:5]] + [state, segments]
        want = oracle(alone, (cot[0][row : row + 1, :n], cot[1][row : row + 1]))
        part = [a[row : row + 1] if a.shape[1] == 2 else a[row : row + 1, :n] for a in got]
        assert_close(part, want, F32)
        pads = [a[row, n:] for a in got if a.shape[1] == 130]
        assert all((a == 0).all() for a in pads)


@pytest.mark.parametrize(
    "lengths, total",
    [(LENGTHS, 260), ((5, 1, 70, 64), 160), ((64, 64, 1, 1, 63, 65), 260), ((1024, 63, 1), 1088)],
    ids=["mixed", "four", "chunk edges", "last token"],
)
def test_packed_documents_equal_each_document_alone(lengths, total):
    """T03, T07: pads in the tail, length-1 documents, documents that end on a chunk's edge,
    and one that begins with the row's last token, before a chunk of nothing but filling.
    """
    segments, edges = np.zeros((1, total), np.int32), np.cumsum((0, *lengths))
    for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        segments[:, a:b] = 7 - i
    x = single(example(1, total, 2, 16, 24, segments=segments))
    cot = cotangents(x)
    got = results("chunked", x, cot)
    wants = []
    for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        state = x[5] if i == 0 else 0 * x[5]
        alone = [y[:, a:b] for y in x[:5]] + [state, x[6][:, a:b]]
        wants.append(oracle(alone, (cot[0][:, a:b], cot[1] * (b == edges[-1]))))
    pads = [np.zeros((1, total - edges[-1], *y.shape[2:])) for y in got]
    for i in (0, 2, 3, 4, 5, 6):
        row = np.concatenate([want[i] for want in wants] + [pads[i]], 1)
        assert_close([got[i]], [row], F32, [NAMES[i]])
    assert_close([got[1], got[7]], [wants[-1][1], wants[0][7]], F32, ["state", "dstate"])


FORWARD = jax.jit(functools.partial(kda, impl="chunked"), compiler_options=QUICK)


def cut(x, a, b, state):
    return [y[:, a:b] for y in x[:5]] + [state, x[6][:, a:b]]


def test_state_carried_over_splits_equals_one_pass():
    """T04: K = 16, V = 32, 200 tokens at once and as 64 + 64 + 72."""
    x = single(example(2, 200, 2, 16, 32))
    o, state = FORWARD(*x)
    parts, carried = [], x[5]
    for a, b in ((0, 64), (64, 128), (128, 200)):
        part, carried = FORWARD(*cut(x, a, b, carried))
        parts.append(part)
    assert_close([jnp.concatenate(parts, 1), carried], [o, state], F32, NAMES[:2])


def test_resuming_from_the_last_full_chunk_equals_a_fresh_run():
    """T08: states at 64, 128 and 130; 20 other tokens after 128."""
    x = single(example(2, 148, 2, 16, 32))
    states = {n: FORWARD(*cut(x, 0, n, x[5]))[1] for n in (64, 128, 130)}
    for n, state in states.items():
        assert_close([state], [loop(cut(x, 0, n, x[5]))[1]], F32, ["state"])
    o, state = FORWARD(*cut(x, 128, 148, states[128]))
    fresh = loop(x)
    assert_close([o, state], [fresh[0][:, 128:], fresh[1]], F32, NAMES[:2])


def decode(x):
    """One token a call; all outputs and all states."""

    def step(state, token):
        o, state = kda(*(y[:, None] for y in token[:5]), state, token[5][:, None])
        return state, (o[:, 0], state)

    time_first = tuple(jnp.moveaxis(y, 1, 0) for y in (*x[:5], x[6]))
    _, (o, states) = jax.jit(lambda s, t: jax.lax.scan(step, s, t))(x[5], time_first)
    return jnp.moveaxis(o, 0, 1), states


def test_chunks_and_one_token_decode_agree():
    """T09: 256 tokens; the stated bound is 1e-4, absolute, on outputs of size 0.1 to 1."""
    x = single(example(1, 256, 2, 16, 32))
    o, state = FORWARD(*x)
    o_decode, states = decode(x)
    assert np.abs(o - o_decode).max() <= 1e-4
    assert np.abs(state - states[-1]).max() <= 1e-4


def test_decode_state_does_not_drift_when_beta_stays_float32():
    """T05: bf16 logits, 4,096 steps; a beta rounded to bf16 must be seen to fail."""
    x = example(1, 4096, 1, 16, 16, weak=1e-4, strong=0.1)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal(x[4].shape), jnp.bfloat16)
    x = single(x, jnp.bfloat16)
    x[4] = jax.nn.sigmoid(logits.astype(jnp.float32))
    exact = double(x)
    exact[4] = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    rounded = [*x[:4], jax.nn.sigmoid(logits).astype(jnp.float32), *x[5:]]
    states, poor = decode(x)[1], decode(rounded)[1]
    want, drift, worse = exact[5], [], []
    for n in range(0, 4096, 512):
        want = loop(cut(exact, n, n + 512, want))[1]
        drift.append(gap(states[n + 511], want))
        worse.append(gap(poor[n + 511], want))
    assert max(drift) <= 1e-5
    assert drift[-1] <= 3 * drift[0] + 1e-6
    assert min(worse) > 1e-4


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_pads_are_never_read_and_get_zero_gradients(impl):
    """T06: NaN and infinity in the pads; one row is nothing but pads."""
    segments = np.ones((3, 130), np.int32)
    segments[0, :9], segments[0, 60:70], segments[0, 120:] = 0, 0, 0
    segments[1] = 0
    clean = example(3, 130, 1, 16, 24, segments=segments)
    pads = segments == 0
    for y in clean[:5]:
        y[pads] = 0
    dirty = [y.copy() for y in clean]
    for y, bad in zip(dirty[:5], (np.nan, np.inf, np.nan, np.inf, np.nan), strict=True):
        y[pads] = bad
    cot = cotangents(clean)
    cot[0][pads] = np.nan
    clean, dirty = single(clean), single(dirty)
    got = results(impl, dirty, cot)
    cot[0][pads] = 0
    want = results(impl, clean, cot)
    for name, a, b in zip(NAMES, got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert all((a[pads] == 0).all() for a in (got[0], *got[2:7]))
    np.testing.assert_array_equal(got[1][1], dirty[5][1])
    np.testing.assert_array_equal(got[7][1], np.float32(cot[1][1]))


def test_long_gradient_equals_autodiff_of_the_recurrence():
    """T30: 4,096 tokens, eight slabs."""
    x = single(example(1, 4096, 1, 16, 16))
    assert_close(results("chunked", x), oracle(x), F32)


def test_gradient_keeps_far_less_than_a_state_per_chunk():
    """T30: beyond its inputs the backward pass may keep a fifth of a state per 64 tokens."""
    b, t, h, k, v = 1, 4096, 4, 128, 128
    shapes = [(b, t, h, k)] * 2 + [(b, t, h, v), (b, t, h, k), (b, t, h), (b, h, k, v)]
    x = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    segments = jax.ShapeDtypeStruct((b, t), jnp.int32)

    def pull(segments, *a):
        return jax.vjp(lambda *a: kda(*a, segments, impl="chunked"), *a)[1]

    def size(tree):
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    kept = size(jax.eval_shape(pull, segments, *x)) - size(x[:5])
    assert 0 < kept <= 0.2 * (t / 64) * b * h * k * v * 4


def test_sharded_rows_equal_unsharded_inside_checkpointed_scan():
    """Four devices, explicit mesh, checked types; two layers under scan and checkpoint."""
    x = single(example(4, 70, 2, 16, 16, segments=random_segments(4, 70)))

    def layers(q, k, v, g, beta, states, segments):
        layer = jax.checkpoint(lambda v, state: kda(q, k, v, g, beta, state, segments))
        return jax.lax.scan(layer, v, states)

    def loss(run, *a):
        o, states = run(*a)
        return jnp.sum(o * jnp.cos(o)) + jnp.sum(states**2)

    states = jnp.stack([x[5], 0 * x[5]])
    a = (*x[:5], states, x[6])
    grads = jax.value_and_grad(loss, argnums=tuple(range(1, 7)))
    want = jax.jit(functools.partial(grads, layers), compiler_options=QUICK)(*a)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])):
        specs = (P("data"),) * 5 + (P(None, "data"), P("data"))
        placed = [jax.device_put(y, s) for y, s in zip(a, specs, strict=True)]
        outs = (P("data"), P(None, "data"))
        sharded = jax.shard_map(layers, in_specs=specs, out_specs=outs, check_vma=True)
        got = jax.jit(functools.partial(grads, sharded), compiler_options=QUICK)(*placed)
    assert_close([got[0], *got[1]], [want[0], *want[1]], F32, ["loss", *NAMES[2:]])


@pytest.mark.parametrize("t, impl", [(1, "reference"), (3, "chunked")])
def test_auto_takes_the_recurrence_for_one_token_and_chunks_otherwise(t, impl):
    x = single(example(1, t, 1, 8, 8))

    def kept(impl):
        out = jax.eval_shape(lambda *a: jax.vjp(functools.partial(kda, impl=impl), *a)[1], *x)
        return [(y.shape, y.dtype) for y in jax.tree.leaves(out)]

    assert kept("auto") == kept(impl) != kept({"reference": "chunked"}.get(impl, "reference"))


@pytest.mark.parametrize(
    "place, change, said",
    [
        (0, lambda a: a[0], "q must be"),
        (0, lambda a: a[:, :0], "empty"),
        (1, lambda a: a[..., :7], r"k has shape \(1, 3, 2, 7\).*\(1, 3, 2, 8\)"),
        (3, lambda a: a[:, :2], "g has shape"),
        (4, lambda a: a[..., None], "beta has shape"),
        (5, lambda a: a.swapaxes(2, 3), r"state has shape \(1, 2, 12, 8\).*\(1, 2, 8, 12\)"),
        (6, lambda a: a[:, 1:], "segments has shape"),
        (2, lambda a: a.astype(jnp.bfloat16), "share a dtype.*bfloat16"),
        (3, lambda a: a.astype(jnp.bfloat16), "g is bfloat16"),
        (4, lambda a: a.astype(jnp.bfloat16), "beta is bfloat16"),
        (5, lambda a: a.astype(jnp.bfloat16), "state is bfloat16"),
        (6, lambda a: a.astype(jnp.float32), "segments is float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_numbers(place, change, said):
    x = single(example(1, 3, 2, 8, 12))
    x[place] = change(x[place])
    with pytest.raises(ValueError, match=said):
        kda(*x)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'fast'.*chunked.*reference"):
        kda(*single(example(1, 3, 2, 8, 12)), impl="fast")
