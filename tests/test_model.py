"""The model as a whole: caches, documents, recomputation, placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from k3_jax.axes import read
from k3_jax.loss import cross_entropy, next_tokens
from k3_jax.model import Alike, Blocks, abstract, cut_runs, fresh_cache, plan_blocks
from k3_jax.tree import named_leaves


@jax.jit
def logits_and_choices(model, tokens_BT, segments_BT):
    out = model(model.embed(tokens_BT), segments_BT)
    return model.logits(out.hidden_BTD), out.routing.experts_BTA


def logits_of(model, tokens_BT, segments_BT):
    return logits_and_choices(model, tokens_BT, segments_BT)[0]


@jax.jit
def extend(model, tokens_BT, segments_BT, cache, forced_ZBTA=None):
    out = model(model.embed(tokens_BT), segments_BT, cache, forced_ZBTA=forced_ZBTA)
    return model.logits(out.hidden_BTD), out.cache


def mean_loss(model, tokens_BT, segments_BT):
    hidden_BTD = model(model.embed(tokens_BT), segments_BT).hidden_BTD
    targets_BT, counts_BT = next_tokens(tokens_BT, segments_BT)
    sums = cross_entropy(hidden_BTD, read(model.head_DV), targets_BT, counts_BT, chunk=64)
    return sums.nats / sums.count


grad_of = jax.jit(jax.value_and_grad(mean_loss))


def in_pieces(model, tokens_BT, pieces, forced_ZBTA=None):
    cache, found, at = fresh_cache(model.config, tokens_BT.shape[0], 96), [], 0
    for n in pieces:
        piece = tokens_BT[:, at : at + n]
        forced = None if forced_ZBTA is None else forced_ZBTA[:, :, at : at + n]
        logits, cache = extend(model, piece, jnp.ones_like(piece), cache, forced)
        found.append(logits)
        at += n
    return jnp.concatenate(found, axis=1), cache


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_prefill_in_pieces_then_decode_equals_one_pass(one_device, dtype, bound):
    """T09. In bfloat16 with the choices of experts of the one pass, since a near tie that falls the
    other way is another path; logits of magnitude 4 then differ by a few units of 2^-6."""
    model = tiny.model(dtype=dtype)
    # At seed 1 a choice is within 4e-7 of a tie.
    tokens_BT = tiny.tokens((2, 80), seed=3)
    segments_BT = jnp.ones_like(tokens_BT)
    want, chosen_ZBTA = logits_and_choices(model, tokens_BT, segments_BT)
    forced_ZBTA = None if dtype == "float32" else chosen_ZBTA
    found, cache = in_pieces(model, tokens_BT, (64, 14, 1, 1), forced_ZBTA)
    assert np.abs(found - want).max() < bound
    assert cache.length_B.tolist() == [80, 80]


def test_rows_padded_on_the_right_go_on_where_they_stopped(one_device):
    """A piece may hold fewer tokens for one row than for another; pads leave no trace."""
    model = tiny.model()
    tokens_BT = tiny.tokens((2, 20))
    want = logits_of(model, tokens_BT, jnp.ones_like(tokens_BT))
    cache = fresh_cache(model.config, 2, 32)
    segments_BT = jnp.asarray([[1] * 12, [1] * 7 + [0] * 5])
    first, cache = extend(model, tokens_BT[:, :12], segments_BT, cache)
    rest = jnp.stack([jnp.pad(tokens_BT[0, 12:], (0, 5)), tokens_BT[1, 7:]])
    segments_BT = jnp.asarray([[1] * 8 + [0] * 5, [1] * 13])
    second, cache = extend(model, rest, segments_BT, cache)
    np.testing.assert_allclose(first[1, :7], want[1, :7], atol=1e-4)
    np.testing.assert_allclose(second[0, :8], want[0, 12:], atol=1e-4)
    np.testing.assert_allclose(second[1], want[1, 7:], atol=1e-4)
    assert cache.length_B.tolist() == [20, 20]


def test_a_row_without_tokens_keeps_its_cache_bit_for_bit(one_device):
    """T10: an inactive slot of a batch is untouched by its neighbours' step."""
    model = tiny.model()
    _, cache = in_pieces(model, tiny.tokens((2, 9)), (8, 1))
    step, segments = tiny.tokens((2, 1), seed=3), jnp.asarray([[1], [0]])
    _, after = extend(model, step, segments, cache)
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        # Two stacked axes, groups and layers, stand before the rows of all but the length.
        before, now = (
            np.asarray(x)[1] if x.ndim == 1 else np.asarray(x)[:, :, 1] for x in (before, now)
        )
        assert np.array_equal(before, now)


def test_packed_documents_equal_each_document_alone(one_device):
    """T07: logits, loss and gradients; documents of 5, 1, 30 and 24 tokens, pads in the tail."""
    model = tiny.model()
    lengths = (5, 1, 30, 24)
    row = tiny.tokens((1, 64))
    ids = jnp.asarray([sum(([i + 1] * n for i, n in enumerate(lengths)), []) + [0] * 4])
    packed = logits_of(model, row, ids)
    (loss, grads), nats, total, count = grad_of(model, row, ids), 0.0, None, 0
    at = 0
    for n in lengths:
        # Alone in a row of the same length, so that one program serves all.
        alone = jnp.zeros_like(row).at[:, :n].set(row[:, at : at + n])
        segments = (jnp.arange(64) < n).astype(jnp.int32)[None]
        np.testing.assert_allclose(
            logits_of(model, alone, segments)[:, :n], packed[:, at : at + n], atol=1e-4
        )
        if n > 1:
            one, grad = grad_of(model, alone, segments)
            nats, count = nats + one * (n - 1), count + n - 1
            grad = jax.tree.map(lambda g, n=n: g * (n - 1), grad)
            total = grad if total is None else jax.tree.map(jnp.add, total, grad)
        at += n
    assert abs(loss - nats / count) < 1e-5
    for name, g in named_leaves(grads).items():
        want = named_leaves(total)[name] / count
        assert np.linalg.norm(g - want) <= 1e-4 * np.linalg.norm(want) + 1e-7, name


def test_what_a_pad_holds_reaches_no_token_and_no_gradient(one_device):
    """T06: a row that is all pads has exactly zero, finite gradients."""
    model = tiny.model()

    def loss(x_BTD, segments_BT):
        hidden_BTD = model(x_BTD, segments_BT).hidden_BTD
        return jnp.sum(jnp.where(segments_BT[..., None] != 0, hidden_BTD, 0) ** 2)

    x_BTD = jax.random.normal(jax.random.key(0), (2, 24, tiny.CONFIG.width))
    segments_BT = jnp.asarray([[0] * 3 + [1] * 17 + [0] * 4, [0] * 24])
    grad = jax.jit(jax.grad(loss))(x_BTD, segments_BT)
    assert np.all(np.isfinite(grad))
    assert np.all(grad[segments_BT == 0] == 0) and np.any(grad[0, 3:20] != 0)


@pytest.mark.parametrize("remat", ["layer", "group", "dots"])
def test_recomputing_changes_no_gradient(one_device, remat):
    """T31: gradients are those without recomputation.

    Not bit for bit under jit, where the compiler fuses what it recomputes otherwise: 1e-5 of each
    gradient's norm is what float32 sums in another order differ by.
    """
    c = dict(n_layers=4, mla_layers=(1, 3), block_layers=4)
    tokens_BT = tiny.tokens((2, 32))
    segments_BT = jnp.ones_like(tokens_BT)
    loss, grads = grad_of(tiny.model(**c), tokens_BT, segments_BT)
    again, found = grad_of(tiny.model(**c, remat=remat), tokens_BT, segments_BT)
    assert abs(loss - again) < 1e-6
    for name, g in named_leaves(grads).items():
        assert np.linalg.norm(g - named_leaves(found)[name]) <= 1e-5 * np.linalg.norm(g), name


def saved_rows(model, n_tokens):
    """How many [tokens, D] activations the backward pass keeps, by what its closure holds."""
    x_BTD = jnp.zeros((1, n_tokens, model.config.width))
    segments_BT = jnp.ones((1, n_tokens), jnp.int32)
    _, pull = jax.eval_shape(
        lambda m, x: jax.vjp(lambda m, x: m(x, segments_BT).hidden_BTD, m, x), model, x_BTD
    )
    weights = {x.shape for x in jax.tree.leaves(model)}
    kept = [x for x in jax.tree.leaves(pull) if x.shape not in weights]
    return sum(x.size * x.dtype.itemsize for x in kept) / (n_tokens * model.config.width * 4)


def test_the_bank_is_saved_once_and_a_group_costs_one_row(one_device):
    """T31: with `remat=group`, memory grows by one row per group, as in a plain residual net.

    Ten more groups in one block may cost ten rows and no more; a bank carried through the scan
    would cost a row of the bank each as well.
    """

    def kept(n_groups):
        layers = tuple(range(1, 2 * n_groups, 2))
        c = dict(n_layers=2 * n_groups, mla_layers=layers, block_layers=2 * n_groups, remat="group")
        return saved_rows(abstract(tiny.config(**c)), 4096)

    few, many = kept(4), kept(14)
    assert 9.5 < many - few < 10.5


def test_a_call_reads_and_changes_nothing(one_device):
    """Rule 3: the same call twice gives the same bits, and the module is as it was."""
    model = tiny.model()
    before = {name: np.asarray(x) for name, x in named_leaves(model).items()}
    tokens_BT = tiny.tokens((2, 32))
    first = logits_of(model, tokens_BT, jnp.ones_like(tokens_BT))
    assert np.array_equal(first, logits_of(model, tokens_BT, jnp.ones_like(tokens_BT)))
    for name, x in named_leaves(model).items():
        assert np.array_equal(x, before[name])


def test_forcing_the_choices_that_were_made_changes_nothing(one_device):
    """T32: recorded choices replay to the same logits; others give other logits."""
    model = tiny.model()
    tokens_BT = tiny.tokens((2, 32))
    segments_BT = jnp.ones_like(tokens_BT)

    @jax.jit
    def forced(model, choices_ZBTA):
        out = model(model.embed(tokens_BT), segments_BT, forced_ZBTA=choices_ZBTA)
        return out.hidden_BTD, out.routing.experts_BTA

    free = jax.jit(lambda m: m(m.embed(tokens_BT), segments_BT))(model)
    assert free.routing.experts_BTA.shape == (5, 2, 32, 2)
    same, kept = forced(model, free.routing.experts_BTA)
    np.testing.assert_allclose(same, free.hidden_BTD, atol=1e-5)
    assert np.array_equal(kept, free.routing.experts_BTA)
    other, _ = forced(model, (free.routing.experts_BTA + 1) % tiny.CONFIG.moe.n_experts)
    assert np.abs(other - free.hidden_BTD).max() > 1e-2


def test_parameters_that_are_float32_in_the_release_stay_so(one_device):
    """T13: conv taps, a_log, decay bias, output norm and router bias, whatever `param_dtype`."""
    leaves = named_leaves(abstract(tiny.config(param_dtype="bfloat16")))
    exact = {n.rsplit("/", 1)[1] for n, x in leaves.items() if x.dtype == jnp.float32}
    assert exact == {
        *("q_conv_WHk", "k_conv_WHk", "v_conv_WHv", "a_log_H", "decay_bias_Hk", "out_norm_v"),
        "router_bias_E",
    }


def test_the_released_layers_fall_into_three_kinds_of_blocks():
    """The first with the dense layer, six alike, the last with a lone MLA layer."""
    c = tiny.config(n_layers=93, mla_layers=(*range(3, 92, 4), 92), block_layers=12)
    first, alike, last = plans = plan_blocks(c)
    assert [plan.n_blocks for plan in plans] == [1, 6, 1]
    assert [[len(part) for part in plan.parts] for plan in plans] == [[1, 2], [18], [2, 1]]
    groups = [group for plan in plans for part in plan.parts for group in part]
    assert [i for group in groups for i in group] == list(range(93))
    assert cut_runs(c, first.parts[0][0]) == [[0], [1, 2], [3]]
    assert cut_runs(c, alike.parts[0][0]) == [[12, 13, 14], [15]]
    assert last.parts[1] == ((92,),)


ALIKE = dict(n_layers=13, mla_layers=(1, 3, 5, 7, 9, 11, 12), block_layers=4)


def one_by_one(model):
    """The same model with every block by itself, none under a scan over blocks."""
    c, apart = model.config, []
    for blocks, plan in zip(model.blocks, plan_blocks(c), strict=True):
        n = plan.n_blocks
        for i in range(n):
            parts = tuple(part[i * len(part) // n :][: len(part) // n] for part in plan.parts)
            made = Blocks(c, Alike(1, parts), rngs=tiny.rngs())
            own = [x[i * len(x) // n :][: len(x) // n] for x in jax.tree.leaves(blocks)]
            apart.append(jax.tree.unflatten(jax.tree.structure(made), own))
    out = jax.tree.map(lambda x: x, model)
    out.blocks = nnx.List(apart)
    return out


def test_blocks_that_are_alike_are_each_its_own(one_device):
    """A scan over blocks with room for the rows to come: outputs, experts, sums and gradients."""
    c = tiny.config(**ALIKE, remat="group")
    assert [plan.n_blocks for plan in plan_blocks(c)] == [1, 2, 1]
    model, x_BTD = (
        tiny.model(**ALIKE, remat="group"),
        jax.random.normal(jax.random.key(3), (2, 24, 32)),
    )
    segments_BT = jnp.ones((2, 24), jnp.int32).at[0, 9:].set(2).at[1, 20:].set(0)

    @jax.jit
    def run(model, x_BTD):
        def loss(model, x_BTD):
            out = model(x_BTD, segments_BT, look=lambda _, at: at.after_BTD)
            return jnp.sum(jnp.sin(out.hidden_BTD) * (segments_BT != 0)[..., None]), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(model, x_BTD)

    (_, got), (of_model, of_x) = run(model, x_BTD)
    (_, want), (of_each, of_same_x) = run(one_by_one(model), x_BTD)
    np.testing.assert_allclose(got.hidden_BTD, want.hidden_BTD, atol=2e-5)
    np.testing.assert_allclose(got.seen, want.seen, atol=2e-5)
    assert np.array_equal(got.routing.experts_BTA, want.routing.experts_BTA)
    np.testing.assert_allclose(of_x, of_same_x, atol=1e-4)
    pairs = zip(jax.tree.leaves(one_by_one(of_model)), jax.tree.leaves(of_each), strict=True)
    for a, b in pairs:
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6


def test_alike_blocks_keep_their_caches_apart(one_device):
    """A prompt in two pieces and then a token, as without a cache."""
    model = tiny.model(**ALIKE)
    tokens_BT = tiny.tokens((2, 24))

    @jax.jit
    def run(model, cache, tokens_BT):
        segments_BT = jnp.ones(tokens_BT.shape, jnp.int32)
        out = model(model.embed(tokens_BT), segments_BT, cache)
        return out.hidden_BTD, out.cache

    whole, _ = run(model, None, tokens_BT)
    cache, found = fresh_cache(model.config, 2, 24), []
    for piece in (slice(0, 16), slice(16, 23), slice(23, 24)):
        hidden_BTD, cache = run(model, cache, tokens_BT[:, piece])
        found.append(hidden_BTD)
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-4)
