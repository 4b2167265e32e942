"""The TPU kernels of KDA, interpreted on a CPU, against the token recurrence in float64.

Products take bfloat16 operands in the interpreter too, so that errors here are those of a matrix
unit. A tolerance of 1 % covers them: each operand is rounded by at most 2^-9 = 0.2 %, and two or
three roundings follow each other (0.2 to 0.5 % is seen). Two gradients have less left: that of beta
is the part along k of one that has 128 directions, about a tenth of it, and that of a_log is one
sum over all tokens and channels, of both signs: where it is less than the norm of its terms, they
cancel, and its error is compared with that. They get 5 %.
"""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_inputs import BOUND, NAMES, cotangents, error, exact, projected, pulled

from pallas_kernels.kda import _documents, gated_kda, kda
from pallas_kernels.kda.mosaic import Plan, kda_mosaic, plan_for, vmem_bytes

ROUNDING = 1e-2
WEAK = {"beta": 5e-2, "a_log": 5e-2}
ONE = (Plan(1, 1, 1, 1),) * 2
# Copies every block as a TPU would; scratch and outputs begin as NaN, a race raises. Takes half a
# minute to compile, so that what is not slow shares one shape: 256 tokens in bfloat16.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 130)

pytestmark = pytest.mark.usefixtures("quick_compiler")


def through(door, *args, plans=ONE, interpret=True, **options):
    """door(impl="pallas"), interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = partial(kda_mosaic, plans=plans, interpret=interpret)
        patch.setattr(import_module("pallas_kernels.kda"), "kda_mosaic", kernels)
        return door(*args, impl="pallas", **options)


gated = partial(through, gated_kda, lower_bound=BOUND)


interpreted = jax.jit(partial(pulled, gated))
careful = jax.jit(partial(pulled, partial(gated, interpret=CAREFUL)))


def compare(x, segments, tolerance=ROUNDING, run=interpreted, **tolerances):
    """Everything that comes out, for the tokens that are real."""
    segments = jnp.asarray(segments, jnp.int32).reshape(x["q"].shape[:2])
    grads, real = cotangents(x), np.asarray(segments != 0)
    dirty = {n: poisoned(x[n], real) if n in TOKENS else x[n] for n in x}
    got = run(dirty, (poisoned(grads[0], real), grads[1]), segments)
    clean = {n: jnp.where(widened(real, x[n]), x[n], 0) if n in TOKENS else x[n] for n in x}
    want = exact(clean, (jnp.where(widened(real, grads[0]), grads[0], 0), grads[1]), segments)
    wrong = {name: error(got[name], want[name]) for name in want}
    terms = want["logit"] * (clean["logit"] + clean["bias"])
    wrong["a_log"] *= min(1, np.linalg.norm(want["a_log"]) / np.linalg.norm(terms))
    for name in want:
        assert wrong[name] < (WEAK | tolerances).get(name, tolerance), name
    for name in ("o", *TOKENS):
        assert not np.any(np.asarray(got[name], np.float32)[~real]), name
    return got


both = pytest.mark.parametrize("run", [interpreted, careful], ids=["quick", "careful"])
TOKENS = ("q", "k", "v", "logit", "beta")


def widened(real, x):
    return jnp.asarray(real).reshape(real.shape + (1,) * (x.ndim - 2))


def poisoned(x, real):
    return jnp.where(widened(real, x), x, jnp.nan)


@both
@pytest.mark.parametrize("T", [*LENGTHS, 256])
def test_any_length_with_nan_after_the_last_token(T, run):
    """T03, T06, T30: o, the state and every gradient; what stands after T reaches nothing."""
    compare(projected(256, seed=T), [1] * T + [0] * (256 - T), run=run)


@pytest.mark.slow
@pytest.mark.parametrize("T", LENGTHS)
def test_any_length_of_float32(T):
    """The same for 32-bit inputs, in the careful interpreter."""
    x = projected(256, seed=T, dtype=jnp.float32)
    compare(x, [1] * T + [0] * (256 - T), run=careful)


def test_rows_of_unlike_lengths_and_pads_have_their_own_states():
    """T03, T06: lengths 1, 1, 130, 1, 64 and 63, then pads on the left, and nothing but pads."""
    spans = [(0, 1), (0, 1), (0, 130), (0, 1), (0, 64), (0, 63), (17, 130), (0, 0)]
    segments = np.array([[a <= t < b for t in range(130)] for a, b in spans])
    x = projected(130, B=len(spans))
    got = compare(x, segments)
    np.testing.assert_array_equal(got["after"][7], x["state"][7])


FORWARD = jax.jit(gated)


def piece(x, a, b, state):
    tokens = (x[name][:, a:b] for name in TOKENS)
    return FORWARD(*tokens, x["a_log"], x["bias"], state, jnp.ones((1, b - a), jnp.int32))


def test_states_carried_over_pieces_and_more_values_than_keys():
    """T04: K = 128, V = 256, 200 tokens at once, with all gradients, and as 64 + 64 + 72."""
    x = projected(200, V=256, decay=-4.0)
    whole, parts, state = compare(x, [1] * 200), [], x["state"]
    for a, b in ((0, 64), (64, 128), (128, 200)):
        part, state = piece(x, a, b, state)
        parts.append(part)
    assert error(jnp.concatenate(parts, 1), whole["o"]) < ROUNDING
    assert error(state, whole["after"]) < ROUNDING


def test_resuming_from_a_prefix_equals_a_fresh_run():
    """T08: the states after 64, 128 and 130 tokens, and 20 other tokens after each."""
    x, other = projected(150, decay=-4.0), projected(20, seed=5, decay=-4.0)
    for n in (64, 128, 130):
        fresh = {name: x[name] for name in x}
        fresh |= {name: jnp.concatenate([x[name][:, :n], other[name]], 1) for name in TOKENS}
        want = exact(fresh, cotangents(fresh), jnp.ones((1, n + 20), jnp.int32))
        _, state = piece(x, 0, n, x["state"])
        o, state = piece(fresh, n, n + 20, state)
        assert error(o, want["o"][:, n:]) < ROUNDING
        assert error(state, want["after"]) < ROUNDING


def test_chunks_and_one_token_at_a_time_agree():
    """T09: 256 tokens; the stated bound is 2 % of any token's output, in bfloat16."""
    x = projected(256, decay=-4.0)
    o, state = piece(x, 0, 256, x["state"])
    segments = jnp.ones((1, 256), jnp.int32)
    want, last = gated_kda(*x.values(), segments, lower_bound=BOUND, impl="reference")
    for t in range(256):
        assert error(o[:, t], want[:, t]) < 2e-2, t
    assert error(state, last) < ROUNDING


def test_beta_is_not_rounded_on_its_way():
    """T05: the sigmoid of bfloat16 logits is taken in float32, so that wider ones change nothing;
    a beta rounded to bfloat16 is seen."""
    x = projected(64, decay=-12.0)
    wide = x | {"beta": x["beta"].astype(jnp.float32)}
    beta = jax.nn.sigmoid(x["beta"]).astype(jnp.float32)
    coarse = x | {"beta": jnp.log(beta) - jnp.log1p(-beta)}
    (_, got), (_, same), (_, other) = (piece(y, 0, 64, y["state"]) for y in (x, wide, coarse))
    np.testing.assert_array_equal(got, same)
    assert error(got, other) > 1e-5


def test_a_gradient_keeps_one_state_per_128_tokens_beside_its_inputs():
    """T30: 4,096 tokens; a state is bfloat16, and masks take 8 numbers a token."""
    T, H, d = 4096, 2, 128
    x = jax.eval_shape(lambda: projected(T, H=H))

    def kept(*args):
        return jax.vjp(lambda *a: gated(*a, jnp.ones((1, T), jnp.int32)), *args)[1]

    def size(tree):
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    beside = size(jax.eval_shape(kept, *[x[name] for name in NAMES])) - size(
        [x[name] for name in TOKENS]
    )
    states = T // 128 * H * d * d * 2
    assert states <= beside <= states + 16 * T * 4 + 4 * H * d * 4


@both
@pytest.mark.parametrize("decay", [-12.0, 0.0, 5.0])
def test_gates_from_nearly_keeping_to_the_bound(decay, run):
    """T02: log decays of about -3e-5, -2.5 and -4.97."""
    compare(projected(256, decay=decay), [1] * 256, run=run)


@both
def test_a_gate_at_the_bound_has_no_gradient_left(run):
    """T02: log decays of exactly -5; the gate's gradients, e^-40 in truth, are rounding (1e-7)."""
    gates = dict.fromkeys(("logit", "a_log", "bias"), np.inf)
    got = compare(projected(256, decay=40.0), [1] * 256, run=run, **gates)
    for name in gates:
        assert np.max(np.abs(np.asarray(got[name], np.float32))) < 1e-4, name


@both
def test_documents_begin_and_end_anywhere(run):
    """T07: documents of length 1, of a chunk and across one, with pads between; no leak."""
    lengths = [1, 1, 30, 1, 95, 64, 3, 20, 41]
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segments[140:150] = 0
    compare(projected(256), segments, run=run)


@both
@pytest.mark.parametrize("alike", ["repeated", "similar"])
def test_keys_that_are_alike(alike, run):
    """T01: one key again and again (or nearly), beta near 1 and no decay: the inverse stays small.

    Outputs come from differences of nearly equal values, so a rounding of 2^-9 weighs more: up to
    4.9 % is seen in v's gradient, and 15 % in beta's, the part along keys that all point one way.
    """
    x = projected(256, decay=-14.0)
    noise = 0 if alike == "repeated" else 0.05
    x["k"] = (x["k"][:, :1] + noise * x["k"]).astype(x["k"].dtype)
    x["beta"] = x["beta"] + 6
    compare(x, [1] * 256, tolerance=0.08, run=run, beta=0.25)


def test_float32_inputs_and_a_ragged_length():
    """T = 1000 ends inside the eighth step; float32 operands are rounded in the products."""
    compare(projected(1000, dtype=jnp.float32), [1] * 1000)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_ragged_length_in_the_careful_interpreter(dtype):
    compare(projected(1000, dtype=dtype), [1] * 1000, run=careful)


def test_heads_and_chunks_side_by_side_are_each_alone():
    """Two rows, four heads in two groups, two chunks a step, T = 300: as one head at a time.

    Unfolded masks and inverses are seen here too, as a v5p has them.
    """
    plans = (Plan(4, 2, 2, 2, "shared"), Plan(2, 2, 2, 1, "late", fold=1))
    x, segments = projected(300, B=2, H=4), np.repeat([[1, 2], [3, 3]], 150, axis=1)
    run = jax.jit(partial(pulled, partial(gated, plans=plans)))
    compare(x, segments, run=run)


def test_log_decays_and_normalised_keys_as_input():
    """`kda`'s own arguments, K = V = 128: the kernel without norms and gate, against `kda`."""
    x = projected(130)
    q, k = (x[n].astype(jnp.float32) for n in ("q", "k"))
    q, k = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (q / 128**0.5, k))
    g, beta = -5 * jax.nn.sigmoid(x["logit"].astype(jnp.float32)), jax.nn.sigmoid(x["beta"])
    segments = jnp.asarray([1] * 70 + [0] * 10 + [2] * 50, jnp.int32)[None]
    args = (q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), x["v"], g, beta.astype(jnp.float32))

    def kernel(*args):
        return through(kda, *args, segments)

    def oracle(*args):
        return kda(*args, segments, impl="reference")

    grads = cotangents(x)
    got, want = [], []
    for out, f, dtype in ((got, kernel, None), (want, oracle, jnp.float64)):
        cast = [a.astype(dtype or a.dtype) for a in (*args, x["state"], *grads)]
        made, pull = jax.vjp(jax.jit(f), *cast[:6])
        out += [*made, *pull((cast[6], cast[7]))]
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < ROUNDING


@pytest.mark.parametrize("T", [1, 2, 130, 5000])
def test_documents_are_numbered_whatever_they_are_called(T):
    """Against a loop: names of 32 bits, used twice, pads before, between and within documents."""
    r = np.random.default_rng(T)
    names = r.choice(np.array([-(2**31), -1, 1, 2**30 + 5, 2**31 - 1], np.int32), (3, T))
    segments = np.where(r.random((3, T)) < 0.5, 0, np.repeat(names, 3, axis=1)[:, :T])
    segments[0, : T // 2] = 0
    want = np.zeros_like(segments)
    for row, numbers in zip(segments, want, strict=True):
        number, last = 0, 0
        for t, name in enumerate(row):
            number += bool(name and last and name != last)
            numbers[t], last = number, name or last
    np.testing.assert_array_equal(jax.jit(_documents)(segments), want)


def test_widths_that_no_kernel_takes_are_refused():
    """K = 64: the message says what is allowed and what takes it."""
    x = projected(8, d=64)
    segments = jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="multiples of 128, got K=64 and V=64; impl='chunked'"):
        gated_kda(*x.values(), segments, lower_bound=BOUND, impl="pallas")
    with pytest.raises(ValueError, match="lower_bound=-6"):
        gated_kda(*x.values(), segments, lower_bound=-6.0)


class Chip:
    """What a plan asks of `pltpu.get_tpu_info()`."""

    def __init__(self, generation, num_cores, mib):
        self.generation, self.num_cores = generation, num_cores
        self.vmem_capacity_bytes = mib << 20


@pytest.mark.parametrize("chip", [Chip(6, 1, 128), Chip(7, 1, 64), Chip(5, 2, 64)])
@pytest.mark.parametrize("heads", [1, 4, 12, 24, 7])
def test_plans_divide_the_heads_and_fit_the_chip(chip, heads):
    for backward in (False, True):
        plan = plan_for(8192, heads, 128, 128, 2, backward, chip)
        assert heads % plan.heads == 0 and plan.heads % plan.group == 0
        assert vmem_bytes(plan, 128, 128, 2, backward) <= chip.vmem_capacity_bytes
    with pytest.raises(ValueError, match="bytes of VMEM"):
        plan_for(8192, heads, 128, 128, 2, True, Chip(6, 1, 1))
