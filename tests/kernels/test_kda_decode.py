"""KDA decode: the TPU kernel, interpreted, against its definition and against the layer's parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from k3_jax.layers.norm import gated_rms_norm
from pallas_kernels import kda
from pallas_kernels.conv import short_conv
from pallas_kernels.kda import decode
from pallas_kernels.kda.decode import Sizes, heads_per_step, kda_decode, vmem_bytes
from pallas_kernels.kda.decode_reference import kda_decode_reference
from pallas_kernels.kda.gate import l2_norm, log_decay

BOUND, EPS = -5.0, 1e-5
NAMES = "q k v logit beta gate q_taps k_taps v_taps a_log bias out_norm state q_past k_past v_past"
NAMES = tuple(NAMES.split())
RAW, WEIGHTS, KEPT = NAMES[:6], NAMES[6:12], NAMES[12:]
# Copies every block as a TPU would, fills memory with NaN, reports races; slow. For long runs and
# other sizes interpret=True turns the kernel into XLA operations.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
QUICK = {"xla_backend_optimization_level": 0}
# A few float32 sums of 128 terms of size 1, relative to the norm of the result.
F32 = 1e-6
# Where two sums straddle the rounding of o to bfloat16, one element of y is off by 2^-8.
BF16 = 1e-3


def example(B, t, H, k=128, v=256, *, dtype=jnp.bfloat16, seed=0):
    """All arrays by name; K and V differ, so that a state taken V-first cannot pass."""
    rng, W = np.random.default_rng(seed), 4
    shapes = [(B, t, H, k), (B, t, H, k), (B, t, H, v), (B, t, H, k), (B, t, H), (B, t, H, v)]
    shapes += [(W, H, k), (W, H, k), (W, H, v), (H,), (H, k), (v,), (B, H, k, v)]
    shapes += [(B, W - 1, H, k), (B, W - 1, H, k), (B, W - 1, H, v)]
    x = {name: rng.standard_normal(shape) for name, shape in zip(NAMES, shapes, strict=True)}
    x["a_log"] *= 0.3
    single = (*WEIGHTS, "state")
    return {n: jnp.asarray(a, jnp.float32 if n in single else dtype) for n, a in x.items()}


def interpreted(x, active, accept=None, layer=None, interpret=CAREFUL):
    args = [x[n] for n in NAMES]
    return kda_decode(*args, active, accept, layer, lower_bound=BOUND, eps=EPS, interpret=interpret)


def defined(x, active, accept):
    args = [x[n] for n in NAMES]
    return kda_decode_reference(*args, active, accept, lower_bound=BOUND, eps=EPS)


def called(fn):
    """fn compiled once per shape, its rows all active and keeping everything unless said."""
    fn = jax.jit(fn, compiler_options=QUICK)

    def call(x, active=None, accept=None):
        B, t = x["q"].shape[:2]
        active = jnp.ones(B, bool) if active is None else jnp.asarray(active, bool)
        accept = jnp.full(B, t) if accept is None else jnp.asarray(accept, jnp.int32)
        return fn(x, active, accept)

    return call


careful, oracle = called(interpreted), called(defined)
quick = called(functools.partial(interpreted, interpret=True))


@functools.partial(jax.jit, static_argnames="impl", compiler_options=QUICK)
def by_layer(x, impl="reference"):
    """The layer's own parts and the door of the delta rule; impl "chunked" rounds as it does."""
    segments = jnp.ones(x["beta"].shape[:2], jnp.int32)
    dtype = x["q"].dtype if impl == "chunked" else jnp.float32
    (q, q_past), (k, k_past), (v, v_past) = (
        short_conv(x[n], x[f"{n}_taps"], x[f"{n}_past"], segments) for n in "qkv"
    )
    o, state = kda(
        (l2_norm(q) * q.shape[-1] ** -0.5).astype(dtype),
        l2_norm(k).astype(dtype),
        v.astype(dtype),
        log_decay(x["logit"], x["a_log"], x["bias"], BOUND),
        jax.nn.sigmoid(x["beta"].astype(jnp.float32)),
        x["state"],
        segments,
        impl=impl,
    )
    y = gated_rms_norm(o.astype(x["q"].dtype), x["gate"], x["out_norm"], EPS)
    return y, state, q_past, k_past, v_past


def gap(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def assert_close(got, want, y=BF16, state=F32):
    assert got[0].dtype == want[0].dtype and gap(got[0], want[0]) <= y
    assert got[1].dtype == jnp.float32 and gap(got[1], want[1]) <= state
    for a, b in zip(got[2:], want[2:], strict=True):
        assert same(a, b)


def same(a, b):
    """Bit for bit, NaN included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def rows_of(x, rows):
    return {n: a if n in WEIGHTS else a[rows] for n, a in x.items()}


def tokens_of(x, part):
    return {n: a[:, part] if n in RAW else a for n, a in x.items()}


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_definition_equals_the_layers_own_parts(n):
    """T04: convolutions, norms, gate and the recurrence of k3_jax, put together, for n tokens."""
    x = example(3, 3, 2)
    y, *kept = oracle(x, accept=[n] * 3)
    if n == 0:
        assert all(same(after, x[name]) for name, after in zip(KEPT, kept, strict=True))
    else:
        assert_close([y[:, :n], *kept], by_layer(tokens_of(x, slice(0, n))))


def test_one_token_for_active_rows_leaves_the_others_as_they_are():
    """T04: eleven rows, so that a block of eight and a part of one are at work; NaN where nothing
    may look."""
    x = example(11, 1, 2)
    active = np.array([0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0], bool)
    want = oracle(x, active)
    poisoned = {
        n: a if n in WEIGHTS else jnp.asarray(np.where(on_rows(active, a), a, np.nan), a.dtype)
        for n, a in x.items()
    }
    got = careful(poisoned, active)
    assert_close([a[active] for a in got], [a[active] for a in want])
    assert (np.asarray(got[0][~active]) == 0).all()
    for name, after in zip(KEPT, got[1:], strict=True):
        assert same(after[~active], poisoned[name][~active])


def on_rows(active, a):
    return active.reshape(-1, *(1,) * (a.ndim - 1))


@pytest.mark.parametrize(
    "t, H, call", [(1, 1, quick), (2, 2, careful), (5, 1, quick), (8, 1, quick)]
)
def test_every_accepted_prefix_leaves_the_state_of_that_many_tokens(t, H, call):
    """Row n keeps n tokens of t and scores all t."""
    x, accept = example(t + 1, t, H), range(t + 1)
    assert_close(call(x, accept=accept), oracle(x, accept=accept))


def test_scoring_then_committing_equals_committing_at_once():
    """The first call keeps nothing, the second what was accepted; rows come and go between."""
    x, accept, active = example(3, 2, 2, seed=3), [2, 1, 0], [1, 1, 0]
    scored = careful(x, active, [0, 0, 0])
    for name, after in zip(KEPT, scored[1:], strict=True):
        assert same(after, x[name])
    assert same(scored[0], careful(x, active, accept)[0])
    again = careful(x | dict(zip(KEPT, scored[1:], strict=True)), active, accept)
    assert_close(again, oracle(x, active, accept))


def test_accept_beyond_the_tokens_is_clipped():
    x = example(3, 2, 2, seed=4)
    for a, b in zip(careful(x, accept=[7, -3, 1]), careful(x, accept=[2, 0, 1]), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("B, t", [(11, 1), (3, 2)])
def test_nothing_changes_where_no_row_is_active(B, t):
    x = example(B, t, 2, seed=5)
    y, *kept = careful(x, [0] * B)
    assert (np.asarray(y) == 0).all()
    for name, after in zip(KEPT, kept, strict=True):
        assert same(after, x[name])


def test_a_poisoned_row_harms_no_other():
    """NaN in an active row's tokens stays in its row and, for one head's key, in its head."""
    x = example(3, 2, 2, seed=6)
    want = careful(x)
    x["k"] = x["k"].at[1, 0, 0, 5].set(jnp.nan)
    got = careful(x)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert same(a[jnp.array([0, 2])], b[jnp.array([0, 2])])
    assert np.isnan(np.asarray(got[1][1, 0])).any()
    assert same(got[1][1, 1], want[1][1, 1])


def rollout(x, t):
    """x's tokens through the kernel, t at a time."""
    steps = x["q"].shape[1] // t
    weights = {n: x[n] for n in WEIGHTS}
    active = jnp.ones(x["q"].shape[0], bool)

    def step(kept, raw):
        x = weights | raw | dict(zip(KEPT, kept, strict=True))
        y, *kept = interpreted(x, active, interpret=True)
        return tuple(kept), y

    raw = {n: x[n].reshape(x[n].shape[0], steps, t, *x[n].shape[2:]) for n in RAW}
    raw = {n: jnp.moveaxis(a, 1, 0) for n, a in raw.items()}
    kept, y = jax.lax.scan(step, tuple(x[n] for n in KEPT), raw)
    return y, *kept


@pytest.mark.parametrize("dtype, tol", [(jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)])
def test_a_rollout_of_single_tokens_equals_the_chunked_form(dtype, tol):
    """T09: 100 tokens. float32 within the trial's bound; in bfloat16 the chunked form rounds q, k
    and the products' operands to 2^-9 a few times in a row, and so may differ by ten of those."""
    x = example(1, 100, 1, v=128, dtype=dtype, seed=7)
    y, *kept = jax.jit(functools.partial(rollout, t=1), compiler_options=QUICK)(x)
    y_want, *want = by_layer(x, "chunked")
    assert gap(jnp.moveaxis(y, 0, 1)[:, :, 0], y_want) <= tol
    assert gap(kept[0], want[0]) <= tol
    assert all(same(a, b) for a, b in zip(kept[1:], want[1:], strict=True))


def recurrence(x, beta):
    """States after every token in float64, from the layer's convolved inputs."""
    segments = jnp.ones(x["beta"].shape[:2], jnp.int32)
    q, k, v = (
        np.asarray(short_conv(x[n], x[f"{n}_taps"], x[f"{n}_past"], segments)[0], np.float64)
        for n in "qkv"
    )
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    a_log, bias, logit = (np.asarray(x[n], np.float64) for n in ("a_log", "bias", "logit"))
    decay = np.exp(BOUND / (1 + np.exp(-np.exp(a_log)[:, None] * (logit + bias))))
    S = np.asarray(x["state"], np.float64)
    for n in range(k.shape[1]):
        S = decay[:, n, :, :, None] * S
        error = v[:, n] - np.einsum("bhk,bhkv->bhv", k[:, n], S)
        S = S + np.einsum("bh,bhk,bhv->bhkv", beta[:, n], k[:, n], error)
    return S


def test_beta_and_state_stay_float32_over_a_long_rollout():
    """T05: bfloat16 logits; the drift from float64 stays below 1e-5, and does not grow from 64 to
    256 tokens. A beta rounded to bfloat16 on its way would be seen. The other projections are
    float32: a convolution that rounds to the other neighbour in bfloat16 would hide the drift."""
    x = example(1, 256, 1, v=128, dtype=jnp.float32, seed=8)
    x["beta"] = x["beta"].astype(jnp.bfloat16).astype(jnp.float32)
    # Slow decay: what went wrong two hundred tokens ago is still in the state.
    x["bias"] = x["bias"] - 8
    beta = 1 / (1 + np.exp(-np.asarray(x["beta"], np.float64)))
    run_all = jax.jit(functools.partial(rollout, t=8), compiler_options=QUICK)
    early, late = (
        gap(run_all(tokens_of(x, slice(0, n)))[1], recurrence(tokens_of(x, slice(0, n)), beta))
        for n in (64, 256)
    )
    assert max(early, late) <= 1e-5 and late <= 4 * early
    rounded = np.asarray(jnp.asarray(beta, jnp.bfloat16), np.float64)
    assert gap(recurrence(x, rounded), recurrence(x, beta)) > 1e-4


def test_history_and_taps_keep_their_types():
    """Past inputs come back in bfloat16 bit for bit; taps with more than bfloat16's bits count."""
    x = example(3, 2, 2, seed=10)
    x["q_taps"] = 1 + 2.0**-12 * x["q_taps"]
    y, _, *pasts = careful(x)
    assert [p.dtype for p in pasts] == [jnp.bfloat16] * 3
    assert same(pasts[0][:, 1:], x["q"]) and same(pasts[0][:, 0], x["q_past"][:, 2])
    coarse = x | {"q_taps": x["q_taps"].astype(jnp.bfloat16).astype(jnp.float32)}
    assert gap(y, by_layer(x)[0]) < gap(y, by_layer(coarse)[0])


def test_two_steps_of_heads_equal_one(monkeypatch):
    """Blocks of heads find their own beta, rate and weights."""
    x = example(3, 2, 2, seed=11)
    want = oracle(x, accept=[2, 0, 1])
    monkeypatch.setattr(decode, "heads_per_step", lambda *_: 1)
    assert_close(called(interpreted)(x, accept=[2, 0, 1]), want)


def test_a_scan_over_stacked_layers_touches_each_layers_part_alone():
    """The states of three layers are carried whole; the middle one is left out."""
    x = example(2, 1, 1, v=128, seed=12)
    stacked = {n: jnp.stack([x[n], -x[n], x[n] / 2]) for n in KEPT}

    def body(kept, layer):
        y, *kept = interpreted(x | kept, jnp.array([True, False]), None, layer, True)
        return dict(zip(KEPT, kept, strict=True)), y

    layers = jnp.array([2, 0])
    kept, y = jax.jit(lambda k: jax.lax.scan(body, k, layers), compiler_options=QUICK)(stacked)
    for i, layer in enumerate(layers):
        want = oracle(x | {n: stacked[n][layer] for n in KEPT}, [1, 0])
        assert_close([y[i], *(kept[n][layer] for n in KEPT)], want)
    assert all(same(kept[n][1], stacked[n][1]) for n in KEPT)


def test_it_runs_on_shards_with_their_types_checked():
    """Rows over two devices, as the layer calls it: outputs must say over which axes they vary."""
    x = example(4, 1, 1, v=128, seed=13)
    active = np.array([1, 0, 1, 1], bool)
    specs = {n: P() if n in WEIGHTS else P("data") for n in NAMES}
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])

    def local(x, active):
        x = x | {n: jax.lax.pcast(x[n], "data", to="varying") for n in WEIGHTS}
        return interpreted(x, active)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check_vma=True
    )
    assert_close(jax.jit(sharded, compiler_options=QUICK)(x, active), oracle(x, active))


@pytest.mark.parametrize(
    "cores, vmem, H, t, heads",
    [
        (1, 128, 12, 1, 12),
        (1, 64, 12, 8, 12),
        (2, 64, 12, 1, 6),
        (1, 64, 96, 1, 16),
        (2, 64, 3, 1, 3),
        (1, 16, 12, 8, 6),
    ],
)
def test_heads_per_step_fit_and_are_shared_by_the_cores(cores, vmem, H, t, heads):
    """VMEM in MiB: v6e 128, tpu7x 64, v5p 64 with two cores, v4 16."""
    sizes = Sizes(256, t, H, 128, 128, 4, 2)
    assert heads_per_step(sizes, vmem << 20, cores) == heads
    assert vmem_bytes(sizes, heads) <= vmem << 19


def test_a_chip_too_small_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"K=1024, V=1024 takes \d+ bytes.*16777216"):
        heads_per_step(Sizes(8, 8, 1, 1024, 1024, 4, 4), 16 << 20, 1)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda x: example(2, 1, 2, k=64), r"K=64 and V=256 must be multiples of 128"),
        (lambda x: example(2, 1, 2, v=192), r"K=128 and V=192"),
        (lambda x: example(2, 9, 2), r"\(2, 9, 2, 128\).*t must be 1 to 8"),
        (lambda x: x | {"q": x["q"][0]}, r"q must be \[B, t, H, K\]"),
        (
            lambda x: x | {"state": x["state"].swapaxes(2, 3)},
            r"state is .*\[2, 2, 256, 128\].*want",
        ),
        (lambda x: x | {"state": x["state"].astype(jnp.bfloat16)}, r"state is bfloat16"),
        (lambda x: x | {"beta": x["beta"].astype(jnp.float32)}, r"beta is float32.*bfloat16\[2, 1"),
        (lambda x: x | {"k_past": x["k_past"][:, 1:]}, r"k_past is .*\[2, 2, 2, 128\]"),
        (lambda x: x | {"v_taps": x["v_taps"].astype(jnp.bfloat16)}, r"v_taps is bfloat16"),
        (
            lambda x: {
                n: a.astype(jnp.float16) if a.dtype == jnp.bfloat16 else a for n, a in x.items()
            },
            r"q is float16; it must be",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_numbers(change, said):
    x = change(example(2, 1, 2))
    with pytest.raises(ValueError, match=said):
        kda_decode(*(x[n] for n in NAMES), jnp.ones(2, bool), lower_bound=BOUND, eps=EPS)


def test_active_must_be_boolean():
    x = example(2, 1, 2)
    with pytest.raises(ValueError, match=r"active is int32\[2\].*want bool\[2\]"):
        kda_decode(*(x[n] for n in NAMES), jnp.ones(2, jnp.int32), lower_bound=BOUND, eps=EPS)
