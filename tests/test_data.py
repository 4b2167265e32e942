"""Documents in, packed rows out; the position of every row survives a restart."""

import collections
import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from k3_jax.config import DataConfig, SourceConfig
from k3_jax.data import Loader, heldout_batches
from k3_jax.data.mixture import WINDOW
from k3_jax.tokenizer import BytesTokenizer, load_tokenizer

TOK = load_tokenizer("bytes")
EOS = TOK.eos_id


def write_jsonl(path, texts, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)))
    return str(path)


def words(name, n):
    """n distinct documents of 3 to 60 bytes."""
    return [f"{name}{i}." + "x" * (i * 37 % 55) for i in range(n)]


def config(*sources, **kwargs):
    fields = dict(seq_len=24, batch=8, holdout=0.0, prefetch=2, seed=3)
    return DataConfig(sources=tuple(sources), **{**fields, **kwargs})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two sources mixed 3 to 1, both much smaller than a mixing window."""
    root = tmp_path_factory.mktemp("two")
    a = SourceConfig(
        name="a", format="jsonl", glob=write_jsonl(root / "a.jsonl", words("a", 70)), weight=3.0
    )
    b = SourceConfig(
        name="b", format="jsonl", glob=write_jsonl(root / "b.jsonl", words("b", 40)), weight=1.0
    )
    return config(a, b)


@pytest.fixture(scope="module")
def one(two):
    return config(two.sources[0])


def take(loader, n):
    batches = list(itertools.islice(loader, n))
    return {k: np.stack([b[k] for b in batches]) for k in ("tokens", "segments")}


def through_json(*loaders):
    """What a checkpoint does: the merged states of all processes as text and back."""
    merged = {}
    for loader in loaders:
        merged.update(loader.state())
    return json.loads(json.dumps(merged))


def documents_of(tokens):
    """The whole documents in a stream of tokens, as text."""
    ends = np.flatnonzero(np.asarray(tokens).ravel() == EOS)
    return [TOK.decode(part) for part in np.split(np.asarray(tokens).ravel(), ends + 1)[:-1]]


def global_order(tokens_NBT):
    """Documents in the order of the endless list, up to the first one not yet read."""
    rows = [documents_of(tokens_NBT[:, b]) for b in range(tokens_NBT.shape[1])]
    n = min(map(len, rows))
    return [rows[b][i] for i in range(n) for b in range(len(rows))]


def test_segments_start_at_one_in_each_row_and_change_after_eos(one):
    got = take(Loader(one, TOK), 40)
    assert got["tokens"].shape == (40, 8, 24)
    assert got["tokens"].dtype == got["segments"].dtype == np.int32
    assert (got["segments"][..., 0] == 1).all()
    step = np.diff(got["segments"], axis=-1)
    np.testing.assert_array_equal(step == 1, got["tokens"][..., :-1] == EOS)
    assert set(np.unique(step)) == {0, 1}


@pytest.mark.parametrize("batch", [1, 4])
def test_every_document_comes_once_in_each_epoch_in_another_order(one, batch):
    c = config(*one.sources, batch=batch)
    order = global_order(take(Loader(c, TOK), 500 // batch)["tokens"])
    epochs = [order[i : i + 70] for i in range(0, len(order) - 69, 70)]
    assert len(epochs) >= 3
    for epoch in epochs:
        assert sorted(epoch) == sorted(words("a", 70))
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_interleaved_documents_come_once_each_and_resume_exactly(one):
    """T26, T27: four documents open in each row; saved by two processes, taken up by four."""
    c = config(*one.sources, interleave=4)
    whole = Loader(c, TOK)
    rows = take(whole, 160)["tokens"]
    streams = [documents_of(rows[turn::4, b]) for b in range(8) for turn in range(4)]
    apart = [documents_of(take(Loader(one, TOK), 400)["tokens"][:, b]) for b in range(8)]
    for b in range(8):
        for turn in range(4):
            found = streams[4 * b + turn]
            assert found and found == apart[b][turn::4][: len(found)]
    two = [Loader(c, TOK, process=p, n_processes=2) for p in range(2)]
    for loader in two:
        take(loader, 7)
    four = [Loader(c, TOK, process=p, n_processes=4) for p in range(4)]
    for loader in four:
        loader.restore(through_json(*two))
    again = np.concatenate([take(loader, 9)["tokens"] for loader in four], axis=1)
    np.testing.assert_array_equal(again, rows[7:16])


def test_seeds_change_the_order_and_nothing_else_does(one):
    first = take(Loader(one, TOK), 5)["tokens"]
    np.testing.assert_array_equal(first, take(Loader(one, TOK, seed=one.seed), 5)["tokens"])
    np.testing.assert_array_equal(
        first, take(Loader(config(*one.sources, prefetch=0), TOK), 5)["tokens"]
    )
    assert (first != take(Loader(one, TOK, seed=4), 5)["tokens"]).any()


def test_mixture_weights_hold_in_the_whole_and_in_each_row(tmp_path):
    """Over a whole window the shares are exact; one row's are a random draw (4 sigma)."""
    a, b = words("a", 1500), words("b", 2000)
    c = config(
        SourceConfig(name="a", format="jsonl", glob=write_jsonl(tmp_path / "a", a), weight=3.0),
        SourceConfig(name="b", format="jsonl", glob=write_jsonl(tmp_path / "b", b), weight=1.0),
        batch=2,
    )
    tokens = take(Loader(c, TOK), 3200)["tokens"]
    np.testing.assert_array_equal(tokens[:100], take(Loader(c, TOK), 100)["tokens"])
    order = global_order(tokens)[:WINDOW]
    assert len(order) == WINDOW
    counts = collections.Counter(order)
    assert sum(counts[d] for d in a) == WINDOW * 3 // 4
    assert {counts[d] for d in a} == {2, 3}  # 3072 reads of 1500 documents
    assert {counts[d] for d in b} == {0, 1}  # 1024 reads of 2000 documents
    for row in range(2):
        docs = documents_of(tokens[:, row])[: WINDOW // 2]
        share = np.mean([d.startswith("a") for d in docs])
        assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / len(docs))


def test_a_run_of_four_processes_resumes_with_two_and_with_eight(two):
    """T26: row by row equal to one uninterrupted run."""
    whole = take(Loader(two, TOK), 17)
    parts, states = [], None
    for n_processes, n_steps in ((4, 7), (2, 5), (8, 5)):
        loaders = [Loader(two, TOK, process=p, n_processes=n_processes) for p in range(n_processes)]
        if states:
            for loader in loaders:
                loader.restore(states)
        got = [take(loader, n_steps) for loader in loaders]
        parts.append({k: np.concatenate([g[k] for g in got], axis=1) for k in got[0]})
        states = through_json(*loaders)
        assert sorted(map(int, states)) == list(range(8))
    for key, want in whole.items():
        np.testing.assert_array_equal(np.concatenate([p[key] for p in parts]), want)


CHILD = """
import hashlib, itertools, json, os, signal, sys
from k3_jax.config import DataConfig, SourceConfig
from k3_jax.data import Loader
from k3_jax.tokenizer import load_tokenizer
kwargs = json.loads(sys.argv[1])
sources = tuple(SourceConfig(**s) for s in kwargs.pop("sources"))
loader = Loader(DataConfig(sources=sources, **kwargs), load_tokenizer("bytes"))
for step, batch in enumerate(itertools.islice(loader, 33), 1):
    print(hashlib.sha256(batch["tokens"].tobytes()).hexdigest(), flush=True)
    if step == 30:
        with open(sys.argv[2], "w") as f:
            json.dump(loader.state(), f)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sixty_steps_equal_thirty_a_kill_and_thirty(two, tmp_path):
    """T27: the same token hash at each step, after kill -9 of a process that had read ahead."""
    loader = Loader(two, TOK)
    whole = [hashlib.sha256(next(loader)["tokens"].tobytes()).hexdigest() for _ in range(60)]
    sources = [vars(s) for s in two.sources]
    kwargs = {**vars(two), "sources": sources}
    saved = tmp_path / "state.json"
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(kwargs), str(saved)],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout.split() == whole[:33]
    again = Loader(two, TOK)
    again.restore(json.loads(saved.read_text()))
    rest = [hashlib.sha256(next(again)["tokens"].tobytes()).hexdigest() for _ in range(30)]
    assert rest == whole[30:]


@pytest.mark.parametrize("source", ["one", "two"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_every_step_can_be_resumed(request, source, prefetch):
    """T29: at 0, inside a mixing window, at and across the end of an epoch (70 documents)."""
    c = config(*request.getfixturevalue(source).sources, prefetch=prefetch, batch=2)
    loader, resumed = Loader(c, TOK), Loader(c, TOK)
    states, batches = [through_json(loader)], []
    for batch in itertools.islice(loader, 70):
        batches.append(batch["tokens"])
        states.append(through_json(loader))
    assert states[-1]["0"]["streams"][0][0] > 35  # the epoch of 70 documents over 2 rows is passed
    for step in (0, 1, 7, 30, 31, 32, 33, 34, 35, 50, 69, 5):
        resumed.restore(states[step])
        assert through_json(resumed) == states[step]
        np.testing.assert_array_equal(next(resumed)["tokens"], batches[step])


def test_a_loader_leaves_no_thread_behind(one):
    before = set(threading.enumerate())
    loader = Loader(one, TOK)
    next(loader)
    started = set(threading.enumerate()) - before
    assert started
    loader.close()
    del loader
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_a_state_of_other_data_is_refused_and_the_difference_named(one, two, tmp_path):
    state = through_json(Loader(one, TOK))

    def refused(match, c, **kwargs):
        with pytest.raises(ValueError, match=match):
            Loader(c, kwargs.pop("tok", TOK), **kwargs).restore(state)

    refused("seq_len was 24, is 32", config(*one.sources, seq_len=32))
    refused("batch was 8, is 4", config(*one.sources, batch=4))
    refused("seed was 3, is 4", one, seed=4)
    refused(r"n_sources was 1, is 2.*sources\[1\].name was None, is 'b'", two)
    other = SourceConfig(name="a", format="jsonl", glob=str(tmp_path / "*.jsonl"), weight=3.0)
    write_jsonl(tmp_path / "a.jsonl", words("a", 71))
    refused(r"sources\[0\].documents was 70, is 71", config(other))
    renamed = BytesTokenizer()
    renamed.name = "other"
    refused("tokenizer was 'bytes', is 'other'", one, tok=renamed)
    del state["5"], state["6"]
    missing = r"lacks rows \[5\] of this process; it has rows \[0, 1, 2, 3, 4, 7\]"
    refused(missing, one, process=5, n_processes=8)


def test_the_same_data_in_another_folder_resumes(one, tmp_path):
    moved = tmp_path / "a.jsonl"
    shutil.copy(one.sources[0].glob, moved)
    loader = Loader(one, TOK)
    take(loader, 3)
    again = Loader(config(SourceConfig(name="a", format="jsonl", glob=str(moved), weight=3.0)), TOK)
    again.restore(through_json(loader))
    np.testing.assert_array_equal(next(again)["tokens"], next(loader)["tokens"])


class Flaky(BytesTokenizer):
    """Fails when it meets `text` while `error` is set."""

    def __init__(self, text, error):
        super().__init__()
        self.text, self.error = text, error

    def encode(self, text):
        if self.error and text == self.text:
            raise self.error
        return super().encode(text)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failed_read_is_raised_and_no_token_is_lost_after_it(one, prefetch):
    c = config(*one.sources, prefetch=prefetch)
    whole = take(Loader(c, TOK), 30)["tokens"]
    tok = Flaky(words("a", 70)[33], OSError("storage is away"))
    loader, got, failures = Loader(c, tok), [], 0
    while len(got) < 30:
        try:
            got.append(next(loader)["tokens"])
        except OSError:
            failures += 1
            tok.error = None
    assert failures == 1
    np.testing.assert_array_equal(np.stack(got), whole)


def test_a_panic_in_a_tokenizer_ends_the_run_and_does_not_hang_it(one):
    class Panic(BaseException):
        """As pyo3 raises for a panic in Rust."""

    loader = Loader(one, Flaky(words("a", 70)[33], Panic("index out of bounds")))
    with pytest.raises(RuntimeError, match="index out of bounds"):
        take(loader, 30)


def test_heldout_documents_come_once_and_pads_are_segment_zero(two):
    c = config(*two.sources, holdout=0.3)
    got = [b for p in range(2) for b in heldout_batches(c, TOK, p, 2, 30)]
    assert len(got) == 60
    tokens = np.concatenate([np.stack([b["tokens"] for b in got[i : i + 30]], 1) for i in (0, 30)])
    segments = np.concatenate(
        [np.stack([b["segments"] for b in got[i : i + 30]], 1) for i in (0, 30)]
    )
    assert not tokens[segments == 0].any()
    assert not segments[:, -1].any()
    held = [d for row in range(8) for d in documents_of(tokens[row][segments[row] > 0])]
    assert len(set(held)) == len(held)
    trained = set(global_order(take(Loader(c, TOK), 120)["tokens"]))
    assert not trained & set(held)
    assert trained | set(held) == {*words("a", 70), *words("b", 40)}
    assert 15 < len(held) < 55  # 33 expected of 110
    again = list(heldout_batches(config(*two.sources, holdout=0.3, seed=9), TOK, 1, 2, 30))
    np.testing.assert_array_equal(again[0]["tokens"], got[30]["tokens"])


def test_a_heldout_loader_repeats_only_heldout_documents(one):
    c = config(*one.sources, holdout=0.3)
    held = set(global_order(take(Loader(c, TOK, split="holdout"), 40)["tokens"]))
    assert held
    assert not held & set(global_order(take(Loader(c, TOK), 80)["tokens"]))


def test_loader_refuses_wrong_numbers(one):
    for match, c, kwargs in (
        ("batch=8 rows do not divide over 3 processes", one, {"n_processes": 3}),
        ("process 4 is not one of 0..3", one, {"process": 4, "n_processes": 4}),
        ("at least one, each with its own name", config(), {}),
        ("each with its own name", config(*one.sources, *one.sources), {}),
        ("seq_len=0", config(*one.sources, seq_len=0), {}),
        ("holdout=1.0", config(*one.sources, holdout=1.0), {}),
        ("weight 0.0 is not above 0", config(SourceConfig(name="z", weight=0.0)), {}),
        ("'test' is neither", one, {"split": "test"}),
        ("none of its 70 documents fall into 'holdout'", one, {"split": "holdout"}),
    ):
        with pytest.raises(ValueError, match=match):
            Loader(c, TOK, **kwargs)


def test_a_batch_of_eight_rows_costs_under_two_milliseconds():
    """Processor time of all threads, so that other work on the machine does not count."""
    c = config(SourceConfig(name="py", format="stdlib"), seq_len=256, prefetch=8)
    loader = Loader(c, TOK)
    next(loader)
    start = time.process_time()
    take(loader, 500)
    assert (time.process_time() - start) / 500 < 2e-3
    loader.close()
