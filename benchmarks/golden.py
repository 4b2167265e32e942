"""Compare this implementation with an independent one on the tiny released-format checkpoint.

    python -m benchmarks.golden

prints the worst error of each golden array beside the bound that the tests hold it to.
`tests/golden/README.md` says how the arrays were made.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.axes import read
from k3_jax.checkpoint import hf
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.loss import cross_entropy, next_tokens
from k3_jax.model import K3, abstract
from k3_jax.tree import named_leaves, with_leaves
from sharding import make_mesh

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "k3-tiny"
GRAD = "grad/language_model.model."
MEDIA = 505  # the placeholder that one medium's features replace
ROW = 41  # every case is padded on the right to the longest, so that one program serves all


class Line(NamedTuple):
    """One row of the table."""

    name: str
    error: float
    bound: float
    kind: str


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "golden.npz") as arrays:
        return dict(arrays)


def load_model(dtype: str) -> K3:
    """The golden checkpoint with float32 parameters, computing in `dtype`."""
    config = from_hf(FOLDER / "config.json", dtype=dtype, remat="none")
    empty = abstract(config)
    leaves = hf.load(FOLDER, config, named_leaves(empty))
    return with_leaves(empty, {name: jnp.asarray(x) for name, x in leaves.items()})


@jax.jit
def embed(model, tokens_BT):
    return model.embed(tokens_BT)


@jax.jit
def forward(model, x_BTD, segments_BT, forced_ZBTA=None):
    """Logits, running sums after each layer, chosen experts."""
    out = model(x_BTD, segments_BT, forced_ZBTA=forced_ZBTA, look=lambda _, at: at.after_BTD)
    return model.logits(out.hidden_BTD), out.seen, out.routing.experts_BTA


def padded(tokens, segments):
    """Two rows of ROW tokens: the case's rows, then pads."""
    out = np.zeros((2, 2, ROW), np.int32)
    for i, array in enumerate((tokens, segments)):
        out[i, : array.shape[0], : array.shape[1]] = array
    return jnp.asarray(out[0]), jnp.asarray(out[1])


def run(model, tokens, segments):
    tokens_BT, segments_BT = padded(tokens, segments)
    B, T = tokens.shape
    logits, sums, _ = forward(model, embed(model, tokens_BT), segments_BT)
    return np.asarray(logits)[:B, :T], [np.asarray(s)[:B, :T] for s in sums]


def text_lines(model):
    z = golden()
    ids = z["text/input_ids"]
    logits, sums = run(model, ids, np.ones_like(ids))
    yield Line("text logits", np.abs(logits - z["text/logits"]).max(), 2e-4, "absolute")
    for i, found in enumerate(sums):
        want = z[f"text/layer_{i:02d}_prefix_sum"]
        yield Line(f"running sum after layer {i}", np.abs(found - want).max(), 2e-4, "absolute")
    is_real = z["left_padded/attention_mask"]
    logits, _ = run(model, z["left_padded/input_ids"], is_real)
    error = np.abs(logits - z["left_padded/logits"])[is_real == 1].max()
    yield Line("left-padded logits", error, 2e-4, "absolute")
    error = np.abs(logits[:1][:, is_real[0] == 1] - z["left_padded/row0_alone_logits"]).max()
    yield Line("left-padded row against itself alone", error, 2e-4, "absolute")
    logits, _ = run(model, z["packed/input_ids"], z["packed/segment_ids"] + 1)
    yield Line("packed logits", np.abs(logits - z["packed/logits"]).max(), 2e-4, "absolute")


def image_line(model):
    """The reference's image features, put where their placeholders stand."""
    z = golden()
    grids, features = z["image/grid_thws"], z["image/features"]
    counts = [int(h * w) // 4 for _, h, w in grids]
    rows, places = iter(np.split(features, np.cumsum(counts)[:-1])), []
    ids = z["image/input_ids"][0]
    table = np.asarray(model.embed_VD[...])
    for token in ids:
        places.append(next(rows) if token == MEDIA else table[token][None])
    x = np.zeros((2, ROW, features.shape[1]), np.float32)
    expanded = np.concatenate(places)
    x[0, : len(expanded)] = expanded
    segments = np.zeros((2, ROW), np.int32)
    segments[0, : len(expanded)] = 1
    logits, _, _ = forward(model, jnp.asarray(x), jnp.asarray(segments))
    error = np.abs(np.asarray(logits)[:1, : len(expanded)] - z["image/logits"]).max()
    return Line("image logits, given the reference's features", error, 2e-4, "absolute")


def gradient_lines(model):
    z = golden()
    tokens_BT, segments_BT = padded(z["text/input_ids"], np.ones_like(z["text/input_ids"]))

    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(model):
        hidden_BTD = model(model.embed(tokens_BT), segments_BT).hidden_BTD
        targets_BT, counts_BT = next_tokens(tokens_BT, segments_BT)
        head_DV = read(model.head_DV)
        sums = cross_entropy(hidden_BTD, head_DV, targets_BT, counts_BT, chunk=16)
        return sums.nats / sums.count

    loss, grads = loss_and_grads(model)
    yield Line("loss", abs(float(loss) - float(z["text/loss"])), 1e-5, "absolute")
    leaves = {name: np.asarray(g) for name, g in named_leaves(grads).items()}
    table = hf.name_table(model.config)
    for key in (k for k in z if k.startswith("grad/")):
        name = key.removeprefix("grad/")
        want = z[key]
        difference = np.concatenate(
            [
                (
                    hf.to_ours(name, want, e, leaves[e.leaf][e.index].shape, model.config)
                    - leaves[e.leaf][e.index]
                ).ravel()
                for e in table[name]
            ]
        )
        error = np.linalg.norm(difference) / np.linalg.norm(want)
        yield Line("gradient of " + key.removeprefix(GRAD), error, 1e-3, "relative norm")


def bfloat16_lines(exact, model):
    """How far bfloat16 goes: expert choices, and the distribution with its own or forced choices.

    A near tie between two experts falls the other way under rounding, and then a token takes
    another path: forcing the exact run's choices tells such flips from errors (T32). The bounds on
    free choices are about twice what was found, for this random model has many near ties.
    """
    z = golden()
    tokens_BT, segments_BT = padded(z["text/input_ids"], np.ones_like(z["text/input_ids"]))
    B, T = z["text/input_ids"].shape
    want, _, chosen_ZBTA = forward(exact, embed(exact, tokens_BT), segments_BT)
    x_BTD = embed(model, tokens_BT)
    free, _, found_ZBTA = forward(model, x_BTD, segments_BT)
    forced, _, _ = forward(model, x_BTD, segments_BT, chosen_ZBTA)
    same = [_agreement(a[:, :T], b[:, :T]) for a, b in zip(chosen_ZBTA, found_ZBTA, strict=True)]
    for layer, share in enumerate(same, 1):
        yield Line(f"bfloat16: experts that differ in layer {layer}", 1 - share, 0.3, "share")
    for name, logits, bound in (("own", free, 0.3), ("forced", forced, 8e-3)):
        kl = _divergence(want[:B, :T], logits[:B, :T])
        yield Line(f"bfloat16: mean KL, {name} experts", float(kl.mean()), bound, "nats")
        yield Line(f"bfloat16: worst KL, {name} experts", float(kl.max()), 10 * bound, "nats")


def _agreement(a_BTA, b_BTA):
    return float(
        np.mean(np.any(np.asarray(a_BTA)[..., None] == np.asarray(b_BTA)[..., None, :], -1))
    )


def _divergence(p_BTV, q_BTV):
    p, q = jax.nn.log_softmax(p_BTV), jax.nn.log_softmax(q_BTV)
    return np.asarray(jnp.sum(jnp.exp(p) * (p - q), axis=-1))


def all_lines() -> list[Line]:
    """Every comparison, in float32 and then in bfloat16."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        exact, narrow = load_model("float32"), load_model("bfloat16")
        lines = [*text_lines(exact), image_line(exact), *gradient_lines(exact)]
        return lines + list(bfloat16_lines(exact, narrow))


def main():
    lines = all_lines()
    width = max(len(line.name) for line in lines)
    print(f"{'golden array':{width}}  worst error     bound")
    for line in lines:
        mark = "" if line.error <= line.bound else "  EXCEEDED"
        print(f"{line.name:{width}}  {line.error:11.2e}  {line.bound:8.0e}  {line.kind}{mark}")


if __name__ == "__main__":
    main()
