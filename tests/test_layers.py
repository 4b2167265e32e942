"""The small pieces against their definitions and the anchors of k3-facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3_jax import config as config_module
from k3_jax.layers.attn_res import AttnRes, Bank
from k3_jax.layers.moe import Moe, spread
from k3_jax.layers.norm import gated_rms_norm, rms_norm
from k3_jax.loss import cross_entropy, next_tokens
from k3_jax.state import Rows
from pallas_kernels.kda.gate import l2_norm, log_decay
from pallas_kernels.situ import situ_glu
from sharding import act_spec


def placed(rows):
    """Rows where the model wants them."""
    return jax.reshard(rows, act_spec("B"))


@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [(1, 1, 0.715817828), (1, -2, -1.42935113), (-3, 50, -2.90389147), (10, 10, 37.4846061),
     (100, 100, 99.93293), (0, 7, 0.0)],
)  # fmt: skip
def test_situ_glu_at_the_published_values(gate, up, want):
    """k3-facts 3.6."""
    assert situ_glu(jnp.float32(gate), jnp.float32(up), 4.0, 25.0) == pytest.approx(want, rel=1e-6)


def test_situ_glu_is_bounded_with_finite_gradients():
    x = jnp.asarray([-1e30, -1e4, 0.0, 1e4, 1e30], jnp.float32)
    value = lambda g, u: situ_glu(g, u, 4.0, 25.0)  # noqa: E731
    assert np.abs(value(x, x[::-1])).max() <= 100
    for grad in jax.vmap(jax.grad(value, (0, 1)))(x, x):
        assert np.all(np.isfinite(grad))


@pytest.mark.parametrize(
    ("a_log", "logit", "want"),
    [(0, 0, -2.5), (0, 2, -4.40398539), (0, -2, -0.59601461), (0.5, 1, -4.19359076),
     (-1, 3, -3.75470598)],
)  # fmt: skip
def test_the_decay_gate_at_the_published_values(a_log, logit, want):
    """k3-facts 3.9."""
    g = log_decay(
        jnp.full((1, 1, 1, 1), logit, jnp.float32), jnp.full(1, a_log, jnp.float32), 0.0, -5.0
    )
    assert g.item() == pytest.approx(want, rel=1e-6)


def test_rms_norm_rounds_before_the_weight():
    """k3-facts 3.1: in bfloat16 the order shows."""
    x = jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)
    w = jnp.full(64, 1.0078125, jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    normed = (x32 / np.sqrt((x32**2).mean(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)
    assert np.array_equal(rms_norm(x, w, 1e-5), normed * np.asarray(w))


def test_the_gated_norm_has_a_mean_for_each_head():
    """Heads side by side on one axis, against a loop over them; float32 sums."""
    x, gate = (3 * jax.random.normal(jax.random.key(i), (2, 5, 24)) for i in (0, 1))
    w = jax.random.normal(jax.random.key(2), (8,))
    got = gated_rms_norm(x, gate, w, 1e-5)
    for h in range(3):
        at = slice(8 * h, 8 * h + 8)
        xh = np.asarray(x[..., at], np.float64)
        want = np.asarray(w) * xh / np.sqrt((xh**2).mean(-1, keepdims=True) + 1e-5)
        want /= 1 + np.exp(-np.asarray(gate[..., at], np.float64))
        np.testing.assert_allclose(got[..., at], want, rtol=2e-6, atol=1e-7)


def test_norms_of_zero_rows_have_finite_gradients():
    """T06: an l2 norm of a zero row exploded."""
    zero = jnp.zeros((1, 8))
    for norm in (l2_norm, lambda x: rms_norm(x, jnp.ones(8), 1e-5),
                 lambda x: gated_rms_norm(x, x, jnp.ones(8), 1e-5)):  # fmt: skip
        assert np.all(np.isfinite(jax.jacobian(norm)(zero)))


def test_the_mixture_is_its_definition(one_device):
    """k3-facts 3.3: raw rows, keys normed, no scale; what is not there yet has no part."""
    mix = AttnRes(tiny.CONFIG, rngs=tiny.rngs())
    mix.query_D[...] = jax.random.normal(jax.random.key(1), mix.query_D.shape)
    rows = [placed(jax.random.normal(jax.random.key(i), (2, 3, 32)) * 3**i) for i in range(3)]
    r = np.stack([np.asarray(x, np.float64) for x in rows])
    keys = r / np.sqrt((r**2).mean(-1, keepdims=True) + 1e-5)
    scores = keys @ np.asarray(mix.norm_D[...] * mix.query_D[...], np.float64)
    weights = np.exp(scores) / np.exp(scores).sum(0)
    want, poor = (weights[..., None] * r).sum(0), jnp.full_like(rows[0], 1e3)
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        mix(rows[0], Bank(tuple(rows[1:]), (True, True)), True), want, **close
    )
    there = Bank((*rows, poor), (True, True, True, False))
    np.testing.assert_allclose(mix(poor, there, has_sum=False), want, **close)
    np.testing.assert_array_equal(mix(poor, Bank((rows[0],), (True,)), False), rows[0])


def test_the_mixture_of_experts_is_a_loop_over_tokens(one_device):
    """k3-facts 3.7: the bias chooses and does not weigh; pads go nowhere."""
    moe = Moe(tiny.CONFIG, rngs=tiny.rngs())
    moe.router_bias_E[...] = jnp.linspace(-0.5, 0.5, 8)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    segments = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    x, segments = placed(x.at[1, 3:].set(jnp.nan)), placed(segments)
    y, routing = jax.jit(lambda m, x: m(x, Rows(segments)))(moe, x)
    w = {n: np.asarray(p[...], np.float64) for n, p in vars(moe).items() if hasattr(p, "get_value")}
    for b, t in [(0, 0), (0, 4), (1, 2)]:
        row = np.asarray(x[b, t], np.float64)
        s = 1 / (1 + np.exp(-row @ w["router_DE"]))
        top = np.argsort(-(s + w["router_bias_E"]))[:2]
        assert set(top) == set(np.asarray(routing.experts_BTA[b, t]))
        z = row @ w["down_DL"]
        mixed = 0
        for e in top:
            h = situ_glu(
                *(jnp.asarray(z @ w[n][e]) for n in ("gate_ELF", "expert_up_ELF")), 4.0, 25.0
            )
            mixed += s[e] / s[top].sum() * (np.asarray(h) @ w["expert_down_EFL"][e])
        mixed /= np.sqrt((mixed**2).mean() + 1e-5)
        want = mixed @ w["up_LD"] + np.asarray(moe.shared(x[b : b + 1, t : t + 1]))[0, 0]
        np.testing.assert_allclose(y[b, t], want, rtol=2e-4, atol=2e-5)


def test_copies_of_tokens_are_spread_and_their_gradients_summed():
    """Against autodiff of the same gather; sums of three float32 terms."""
    x = jax.random.normal(jax.random.key(0), (5, 4))
    order = jax.random.permutation(jax.random.key(1), 15)
    dy = jax.random.normal(jax.random.key(2), (15, 4))
    y, pull = jax.vjp(lambda x: spread(x, order, jnp.argsort(order).reshape(5, 3)), x)
    want, pull_want = jax.vjp(lambda x: jnp.repeat(x, 3, axis=0)[order], x)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_allclose(pull(dy)[0], pull_want(dy)[0], rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_over_targets_whatever_the_chunk(one_device):
    """Masked tokens, ends of documents and pads do not count; z is the squared log-sum-exp."""
    hidden = placed(jax.random.normal(jax.random.key(0), (2, 11, 32)))
    head = jax.random.normal(jax.random.key(1), (32, 64))
    tokens = tiny.tokens((2, 11))
    segments = jnp.asarray([[1] * 4 + [2] * 7, [1] * 8 + [0] * 3])
    mask = jnp.ones_like(tokens).at[0, 2].set(0)
    targets, counts = next_tokens(tokens, segments, mask)
    assert counts.sum() == 3 + 6 + 7 - 1 and not counts[0, 1] and not counts[0, 3]
    logits = np.asarray(hidden @ head, np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    nats = lse - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    for chunk in (1, 5, 22, 100):
        sums = jax.jit(cross_entropy, static_argnames="chunk")(
            hidden, head, targets, counts, chunk=chunk
        )
        assert sums.count == counts.sum()
        np.testing.assert_allclose(sums.nats, nats[np.asarray(counts)].sum(), rtol=1e-5)
        np.testing.assert_allclose(sums.z, (lse[np.asarray(counts)] ** 2).sum(), rtol=1e-5)


def test_the_loss_never_holds_all_logits(one_device):
    """4,096 tokens, 16,384 words: one float32 copy of the logits would be 256 MiB."""
    rows = [placed(jnp.zeros((1, 4096, *tail), kind)) for tail, kind in (((8,), float), ((), int))]
    head, counts = jnp.zeros((8, 16384)), rows[1] == 0
    grad = jax.grad(lambda h, w: cross_entropy(h, w, rows[1], counts, chunk=128).nats, (0, 1))
    plan = jax.jit(grad).lower(rows[0], head).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 64 << 20


def test_the_alphabet_names_every_letter_that_weights_use(one_device):
    """The glossary at the top of k3_jax/config is complete."""
    lines = config_module.__doc__.splitlines()
    letters = {
        word for line in lines if line.startswith("    ") for word in line.split() if len(word) == 1
    }
    used = set()
    for name in tiny.leaf_names():
        used |= set(name.rsplit("_", 1)[1])
    assert used <= letters
