"""Supervised fine-tuning: conversations in packed rows, a loss over what is to be learned."""

import itertools
import json

import jax
import numpy as np
import optax
import pytest
from test_train import configured, lines, train_here

import train
from configs import k3_sft_tiny
from k3_jax import chat
from k3_jax.checkpoint.start import starting_weights
from k3_jax.checkpoint.store import Store
from k3_jax.checkpoint.tree import placed
from k3_jax.config import DataConfig, SourceConfig, TrainConfig, from_dict, to_dict
from k3_jax.data import Loader, heldout_batches
from k3_jax.data.pack import RowStream
from k3_jax.data.source import open_source
from k3_jax.evaluate import HeldOut
from k3_jax.loss import next_tokens
from k3_jax.model import abstract
from k3_jax.tokenizer import load_tokenizer
from k3_jax.train_step import init_state
from k3_jax.tree import named_leaves, nest

TOK = load_tokenizer("bytes")
SEQ_LEN = 256


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    yield


def spoken(n, answer="yes"):
    """The n-th conversation: 87 tokens of structure, and its words."""
    asked = {"role": "user", "content": f"is it {n}?"}
    return {"messages": [asked, {"role": "assistant", "content": answer + "!" * (n % 40)}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{"chat": 60 conversations, "text": 60 short texts}"""
    folder = tmp_path_factory.mktemp("sft")
    return {
        "chat": write(folder / "chat.jsonl", [spoken(n) for n in range(60)]),
        "text": write(folder / "text.jsonl", [{"text": f"text {n} " * 9} for n in range(60)]),
    }


def data(files, *names, **changes):
    forms = {"chat": "chat", "text": "jsonl"}
    sources = tuple(SourceConfig(name=n, format=forms[n], glob=files[n]) for n in names)
    fields = dict(sources=sources, seq_len=SEQ_LEN, batch=4, holdout=0.0, prefetch=0, seed=3)
    return DataConfig(**fields | changes)


def encoded(n):
    """The tokens of conversation n and which of them are learned."""
    return chat.encode(chat.conversation(spoken(n)), TOK)


# Files


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3: not JSON"),
        ("[]", "line 3: a JSON list, not an object with messages"),
        ('{"text": "a"}', "line 3: messages is missing"),
        ('{"messages": [{"role": "bot"}]}', r"line 3: messages\[0\].role='bot' is not one of"),
        ('{"messages": [{"role": "user"}]}', "line 3: no assistant message"),
        ('{"messages": [{"role": "assistant"}]}', r"line 3: messages\[0\]: content is missing"),
    ],
)
def test_a_bad_line_is_named_when_the_file_is_opened(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(spoken(1))}\n\n{line}\n")
    with pytest.raises(ValueError, match=f"source 'c': .*a.jsonl {words}"):
        open_source(SourceConfig(name="c", format="chat", glob=str(path)))


def test_a_tokenizer_without_markers_is_refused_where_it_meets_conversations(files):
    class Plain:
        name, specials = "plain", {}

    with pytest.raises(ValueError, match="'plain' has no control token"):
        Loader(data(files, "chat"), Plain())


# Rows


def documents_in(rows):
    """The tokens and the mask of each document of packed rows."""
    for tokens, segments, mask in zip(rows["tokens"], rows["segments"], rows["mask"], strict=True):
        assert not (tokens[segments == 0].any() or mask[segments == 0].any())
        filled = segments != 0
        assert (np.diff(filled.astype(int)) <= 0).all(), "pads are at the row's end"
        for segment in range(1, segments.max() + 1):
            yield tokens[segments == segment].tolist(), mask[segments == segment].tolist()


def rows_of(loader, n):
    batches = list(itertools.islice(loader, n))
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def test_conversations_are_packed_whole_and_each_once(files):
    """A row ends where the next one would not have fitted; an epoch of 60 in 4 row streams."""
    stream = RowStream([chat.conversation(spoken(n)) for n in range(60)], range(60), TOK, SEQ_LEN)
    rows = [next(stream) for _ in range(60)]
    want = [tuple(x.tolist() for x in encoded(n)) for n in range(60)]
    assert list(documents_in({k: [getattr(r, k) for r in rows] for k in rows[0]._fields})) == want
    counts = [int(row.segments.max()) for row in rows if row.segments.any()]
    sizes, start = [len(tokens) for tokens, _ in want], 0
    for count in counts:
        end = start + count
        assert sum(sizes[start:end]) <= SEQ_LEN
        assert end == 60 or sum(sizes[start : end + 1]) > SEQ_LEN
        start = end
    assert start == 60 and set(counts) == {1, 2}
    again = list(documents_in(rows_of(Loader(data(files, "chat"), TOK), 30)))
    assert {tuple(t) for t, _ in again} == {tuple(t) for t, _ in want}


def test_a_conversation_longer_than_a_row_loses_its_end_and_is_told_of(caplog):
    documents = [chat.conversation(spoken(0)), chat.conversation(spoken(1, "no " * 99)), "text"]
    stream = RowStream(documents, range(3), TOK, SEQ_LEN)
    rows = [next(stream) for _ in range(3)]
    long = chat.encode(documents[1], TOK)
    assert [r.segments.max() for r in rows] == [1, 1, 1]
    np.testing.assert_array_equal(rows[1].tokens, long[0][:SEQ_LEN])
    np.testing.assert_array_equal(rows[1].mask, long[1][:SEQ_LEN])
    assert rows[2].tokens[:6].tolist() == [*b"text", TOK.eos_id, 0]
    kept, learned = long[1][:SEQ_LEN].sum(), long[1].sum()
    told = f"of {len(long[0])} tokens is cut to data.seq_len=256; {kept} of its {learned} learned"
    assert told in caplog.text


def test_the_loss_counts_the_targets_that_are_learned_and_no_other(one_device):
    """By hand: with "ab" asked and "c" answered, 87 + 3 tokens; position t predicts t + 1, so the
    one that counts first is the <|sep|> that opens the answer, and the last is the one before
    <|end_of_msg|>. Behind a text whose every token counts, and before pads."""
    asked = {"role": "user", "content": "ab"}
    answer = {"messages": [asked, {"role": "assistant", "content": "c"}]}
    row = next(RowStream(["xy", chat.conversation(answer)], range(2), TOK, 96))
    n_given = len("omessage role='user'sabcmessagese" + "omessage role='assistant'soresponses")
    learned = "c" + "cresponses" + "cmessagese"  # one letter for each marker
    mask = [1] * 3 + [0] * n_given + [1] * len(learned) + [0] * (96 - 3 - n_given - len(learned))
    assert row.mask.tolist() == mask and n_given + len(learned) == 90
    targets, counts = next_tokens(*(x[None] for x in row[:2]), row.mask[None])
    got = np.asarray(targets)[0][np.asarray(counts)[0]].tolist()
    markers = ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    end, opening, close, sep = (TOK.specials[m] for m in markers)
    assert got[:2] == [ord("y"), TOK.eos_id], "of a text all but its first token"
    assert got[2:] == [ord("c"), close, *b"response", sep, close, *b"message", sep, end]
    first = np.flatnonzero(np.asarray(counts)[0])[2]
    assert row.tokens[first] == sep and opening not in got


def test_texts_in_the_same_mixture_count_whole(files):
    """And where there are texts alone, there is no mask."""
    rows = rows_of(Loader(data(files, "chat", "text"), TOK), 60)
    n_texts = 0
    for tokens, mask in documents_in(rows):
        if TOK.specials["<|open|>"] in tokens:
            assert tokens[-1] == TOK.specials["<|end_of_msg|>"] and 0 < sum(mask) < len(mask)
        else:
            assert all(mask)
            n_texts += 1
    assert n_texts > 20
    assert next(Loader(data(files, "text"), TOK)).keys() == {"tokens", "segments"}


def test_a_run_of_four_processes_resumes_with_two_and_the_same_masks(files):
    """T26, through JSON, with pads and conversations that wait for the next row."""
    config = data(files, "chat", "text", interleave=2)
    whole = [next(loader) for loader in [Loader(config, TOK)] for _ in range(24)]
    saved = {}
    for p in range(4):
        loader = Loader(config, TOK, process=p, n_processes=4)
        rows_of(loader, 11)
        saved |= loader.state()
    saved = json.loads(json.dumps(saved))
    two = [Loader(config, TOK, process=p, n_processes=2) for p in range(2)]
    for loader in two:
        loader.restore(saved)
    for batch in whole[11:]:
        parts = [next(loader) for loader in two]
        for k in ("tokens", "segments", "mask"):
            np.testing.assert_array_equal(np.concatenate([x[k] for x in parts]), batch[k])


# Training


def test_the_held_out_loss_is_that_of_the_learned_tokens_alone(files, one_device):
    """Of each held-out conversation alone in a row, from the model's own log-probabilities."""
    config = configured("")
    source = data(files, "chat", holdout=0.2)
    state = init_state(config, optax.sgd(0.1))
    batches = list(heldout_batches(source, TOK, 0, 1, 6))
    told = HeldOut(config, batches, TOK, jax.sharding.get_mesh())(state.model)

    @jax.jit
    def logprobs(tokens_BT, segments_BT):
        out = state.model(state.model.embed(tokens_BT), segments_BT)
        return jax.nn.log_softmax(state.model.logits(out.hidden_BTD))

    found = list(itertools.chain(*(documents_in(b) for b in batches)))
    assert 5 < len(found) < 25
    nats, n, n_bytes = 0.0, 0, 0
    for tokens, mask in found:
        rows = np.zeros((2, 1, SEQ_LEN), np.int32)
        rows[:, 0, : len(tokens)] = tokens, np.ones(len(tokens))
        logp = np.asarray(logprobs(*rows))[0]
        for t in range(1, len(tokens)):
            nats -= logp[t - 1, tokens[t]] * mask[t]
        n += sum(mask)
        n_bytes += len(TOK.decode([t for t, m in zip(tokens, mask, strict=True) if m]).encode())
    np.testing.assert_allclose(told["heldout_loss"], nats / n, rtol=1e-5)
    np.testing.assert_allclose(told["heldout_bits_per_byte"], nats / np.log(2) / n_bytes, rtol=1e-5)


def test_a_run_on_conversations_counts_learned_targets_and_learns(files, tmp_path):
    sources = dict(chat=dict(format="chat", glob=files["chat"]))
    shape = dict(data__seq_len=SEQ_LEN, data__batch=2, eval_every=0, save_every=0, steps=5)
    shape |= dict(optim__name="adamw", optim__qk_clip=0.0, optim__learning_rate=1e-2)
    config = configured("", data__sources=sources, **shape)
    train_here(config, tmp_path)
    told = [x for x in lines(tmp_path) if "loss" in x]
    # Chance is ln 320; a conversation's structure is most of it.
    assert abs(told[0]["loss"] - np.log(320)) < 0.1 and told[-1]["loss"] < told[0]["loss"] - 0.2
    for line, batch in zip(told, Loader(config.data, TOK), strict=False):
        assert line["tokens"] == sum(sum(mask[1:]) for _, mask in documents_in(batch))


def test_the_tiny_configuration_is_whole():
    """Every conversation fits a row, some are held out, and every kind of part is there."""
    config = from_dict(TrainConfig, k3_sft_tiny.get_config())
    source = open_source(config.data.sources[0])
    sizes = [len(chat.encode(parts, TOK)[0]) for parts in source]
    assert len(sizes) == 66 and max(sizes) <= config.data.seq_len
    held = rows_of(heldout_batches(config.data, TOK, 0, 1, config.eval_batches), 2)
    assert 5 < len(list(documents_in(held))) < 20
    written = {part.text for parts in source for part in parts}
    assert {"think", "response", "tools", "tool-declare", "thinking-effort", "system"} <= written


# The weights of another run


def begun(config, folder, loader=None):
    tx = optax.sgd(0.1, momentum=0.9)
    with Store(folder) as store:
        return train.restore_or_init(config, tx, store, loader)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of the tests' model, and its weights by name."""
    folder, config = tmp_path_factory.mktemp("base"), configured("", seed=7)
    with jax.set_mesh(train.make_mesh(devices=jax.devices()[:1])):
        model = init_state(config, optax.sgd(0.1)).model
        with Store(folder / "checkpoints") as store:
            store.save(4, {"model": nest(named_leaves(model))}, {}, {"config": to_dict(config)})
    return str(folder), {k: np.asarray(x) for k, x in named_leaves(model).items()}


def test_a_run_begins_with_the_weights_of_another(base, tmp_path, one_device):
    """The rest of the state is fresh; the model is the run's own in all but values."""
    path, weights = base
    config = configured("", start_from=path)
    state, step = begun(config, tmp_path / "new")
    fresh = init_state(config, optax.sgd(0.1, momentum=0.9))
    assert step == 0 and jax.tree.structure(state) == jax.tree.structure(fresh)
    for name, leaf in named_leaves(fresh).items():
        got = named_leaves(state)[name]
        assert (got.dtype, got.sharding) == (leaf.dtype, leaf.sharding), name
        want = weights.get(name.removeprefix("model/"), leaf)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=name)


def test_weights_take_the_dtypes_and_places_of_the_run(base, four_devices):
    """Float32 narrows where bfloat16 is what the run stores, over four devices."""
    model = abstract(configured("", model__param_dtype="bfloat16").model)
    got = named_leaves(starting_weights(base[0], model)())
    for name, leaf in named_leaves(model).items():
        assert (got[name].dtype, got[name].sharding) == (leaf.dtype, placed(leaf).sharding), name
        want = base[1][name].astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(got[name]), want, err_msg=name)
    assert got["embed_VD"].dtype == "bfloat16" and len(got["embed_VD"].devices()) == 4


def test_weights_of_another_shape_are_refused_before_anything_is_written(
    base, tmp_path, one_device
):
    wide = configured("", start_from=base[0], model__width=48)
    words = (
        r"(?s)\(start_from\) does not fit.*norm_D: stored float32 \[1, 1, 32\], asked for .*48\]"
    )
    with pytest.raises(ValueError, match=words):
        begun(wide, tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="/nowhere: no such directory"):
        begun(configured("", start_from="/nowhere"), tmp_path / "new")
    assert not any(tmp_path.iterdir())
    lora = dict(lora__base="y", optim__name="adamw", optim__qk_clip=0.0, model__moe__balance="none")
    with pytest.raises(ValueError, match="start_from='x' with lora.base"):
        configured("", start_from="x", **lora)


def test_a_run_with_a_checkpoint_of_its_own_goes_on_from_that(base, tmp_path, one_device):
    """Even where the one it started from is gone."""

    class Rows:
        def restore(self, step, state):
            self.state = state

    config, loader = configured("", start_from=base[0]), Rows()
    state, _ = begun(config, tmp_path)
    changed = jax.tree.map(lambda x: x + 1, nest(named_leaves(state)))
    with Store(tmp_path) as store:
        store.save(3, changed, {"0": 5}, {"config": to_dict(config)})
    again, step = begun(configured("", start_from="/nowhere"), tmp_path, loader)
    assert step == 3 and loader.state == {"0": 5}
    for name, leaf in named_leaves(again.model).items():
        np.testing.assert_array_equal(np.asarray(leaf), base[1][name] + 1)
