"""Documents of several sources and lengths, and where the next stage goes on in them."""

import collections
import dataclasses
import json

import numpy as np
import pytest
import stages_config
from checkpoint_states import assert_same_bits

from k3_jax.config import LengthConfig, SourceConfig, TrainConfig, from_dict, planned
from k3_jax.data import StagedLoader, stages
from k3_jax.data.mixture import WINDOW, Mixture
from k3_jax.data.source import open_source
from k3_jax.data.split import Split
from k3_jax.tokenizer import BytesTokenizer, load_tokenizer
from sharding.hosts import furthest

TOK = load_tokenizer("bytes")


def words(name, n, size=lambda i: i * 37 % 55):
    """n distinct documents."""
    return [f"{name}{i}." + "x" * size(i) for i in range(n)]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return SourceConfig(name=path.stem, format="jsonl", glob=str(path))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """{"a": 600 documents, every tenth of 900 bytes, "b": 300 short ones}, and their sources."""
    folder = tmp_path_factory.mktemp("texts")
    made = {"a": words("a", 600, lambda i: 900 if i % 10 == 0 else 20), "b": words("b", 300)}
    return made, {name: write_lines(folder / f"{name}.jsonl", made[name]) for name in made}


def test_a_mixture_gives_each_part_in_its_order(texts):
    """Against counting: what `passed` says of any beginning, and shares of 2, 1 and 0.01."""
    made, _ = texts
    parts = {"a": (made["a"], 2.0), "b": (made["b"], 1.0), "c": (words("c", 90), 0.01)}
    mixture = Mixture(parts, 5, {})
    later = Mixture(parts, 5, start := mixture.passed(900))
    n = WINDOW + 300
    beyond = {k: start[k] + many for k, many in later.passed(n).items()}
    alone = {k: [Mixture({k: v}, 5, {})[i] for i in range(beyond[k])] for k, v in parts.items()}
    drawn = [mixture[i] for i in range(n)]
    for end in (0, 1, 17, WINDOW, n):
        passed = mixture.passed(end)
        assert sum(passed.values()) == end
        want = collections.Counter(x for k, many in passed.items() for x in alone[k][:many])
        assert collections.Counter(drawn[:end]) == want
    shares = [mixture.passed(WINDOW)[k] / WINDOW for k in parts]
    np.testing.assert_allclose(shares, np.array([2, 1, 0.01]) / 3.01, atol=1 / WINDOW)
    want = collections.Counter(x for k in parts for x in alone[k][start[k] :])
    assert collections.Counter(later[i] for i in range(n)) == want


def test_long_documents_are_drawn_as_often_as_told(texts):
    """60 of 600 are long: four times as often are 240 of 780 draws, each one as often as another;
    those of 10^6 bytes or more, of which there are none, change nothing."""
    made, sources = texts
    split = Split(open_source(sources["a"]), 0.0, "train")
    table = [("long", 500, 4.0), ("longest", 10**6, 50.0)]
    lengths = tuple(LengthConfig(name=k, min_bytes=n, times=x) for k, n, x in table)
    found = split.by_length(lengths)
    assert [(least, len(part)) for least, part, _ in found] == [(0, 540), (500, 60)]
    np.testing.assert_allclose([share for *_, share in found], [540 / 780, 240 / 780])
    assert all(len(text) > 500 for text in (found[1][1][i] for i in range(60)))
    parts = {str(n): ([part[i] for i in range(len(part))], share) for n, part, share in found}
    n = 780 * 4
    drawn = collections.Counter(Mixture(parts, 1, {})[i] for i in range(n))
    assert {drawn[t] for t in made["a"] if len(t) > 500} <= {15, 16, 17}
    assert {drawn[t] for t in made["a"] if len(t) < 500} <= {3, 4, 5}


def two_stages(sources, *, n=60, interleave=1, prefetch=2, **second):
    """Planned stages of n steps of 8 x 64 and n of 4 x 128 over sources a (3 to 1) and b."""
    c = from_dict(TrainConfig, stages_config.get_config())
    a, b = (dataclasses.replace(sources[k], weight=w) for k, w in (("a", 3.0), ("b", 1.0)))
    data = dataclasses.replace(
        c.data, sources=(a, b), interleave=interleave, holdout=0.0, prefetch=prefetch
    )
    one, two = c.stages
    one = dataclasses.replace(one, tokens=n * 8 * 64, batch=8)
    two = dataclasses.replace(two, tokens=n * 4 * 128, batch=4, **second)
    return planned(dataclasses.replace(c, data=data, stages=(one, two)))


LONG = (LengthConfig(name="long", min_bytes=500, times=5.0),)


class Recording(BytesTokenizer):
    """Keeps the documents that were opened."""

    def __init__(self):
        super().__init__()
        self.read = []

    def encode(self, text):
        self.read.append(text)
        return super().encode(text)


@pytest.mark.parametrize("interleave", [1, 3])
def test_the_next_stage_begins_after_all_that_was_begun(texts, interleave):
    """No document comes twice, though the second stage draws long ones five times as often."""
    parts = two_stages(texts[1], n=12, interleave=interleave, prefetch=0, lengths=LONG)
    tok = Recording()
    loader = StagedLoader(parts, tok)
    for _ in range(12):
        loader.rows(parts[0])
    first, tok.read = tok.read, []
    loader.rows(parts[1])
    starts = loader.state()["0"]["data"]["starts"]
    for _ in range(11):
        loader.rows(parts[1])
    loader.close()
    assert len(first) > 40 and len(tok.read) > 15
    assert len({*first, *tok.read}) == len(first) + len(tok.read)
    assert [*starts] == ["a", "a from 500 bytes", "b"]
    assert len(first) <= sum(starts.values())
    shares = [np.mean([len(text) > 500 for text in x]) for x in (first, tok.read)]
    assert shares[0] < 0.15 and shares[1] > 0.2


def run_processes(parts, n_processes, steps, states, monkeypatch):
    """Batches of some steps of the run, from n processes that are simulated one after another."""
    loaders = [StagedLoader(parts, TOK, p, n_processes) for p in range(n_processes)]
    if states:
        for loader in loaders:
            loader.restore(steps.start - 1, states)
    batches = []
    for step in steps:
        stage = next(s for s in parts if step <= s.last)
        if step == stage.first > 1 and loaders[0]._loader is not None:
            reached = max(loader._loader.reached() for loader in loaders)
            monkeypatch.setattr(stages, "furthest", lambda n, most=reached: most)
        rows = [loader.rows(stage) for loader in loaders]
        batches.append({k: np.concatenate([r[k] for r in rows]) for k in rows[0]})
    states = {}
    for loader in loaders:
        states |= loader.state()
        loader.close()
    return batches, json.loads(json.dumps(states))


@pytest.mark.parametrize("stop", [9, 10, 11])
def test_processes_change_at_a_border_and_every_row_is_the_same(texts, monkeypatch, stop):
    """T26 one step before the border (after step 10), at it, and one step after: four processes,
    then two, three steps later one; row by row equal to one uninterrupted run."""
    parts = two_stages(texts[1], n=10, interleave=2, lengths=LONG)
    assert [s.last for s in parts] == [10, 20]
    whole, _ = run_processes(parts, 1, range(1, 17), None, monkeypatch)
    got, states = run_processes(parts, 4, range(1, stop + 1), None, monkeypatch)
    more, states = run_processes(parts, 2, range(stop + 1, stop + 4), states, monkeypatch)
    last, _ = run_processes(parts, 1, range(stop + 4, 17), states, monkeypatch)
    for want, found in zip(whole, [*got, *more, *last], strict=True):
        assert_same_bits(found, want)


def test_a_state_of_another_stage_is_refused(texts):
    """The plan changed under the run: its first stage is longer now."""
    parts = two_stages(texts[1], n=3)
    loader = StagedLoader(parts, TOK)
    for stage in (parts[0], parts[0], parts[0], parts[1]):
        loader.rows(stage)
    states = json.loads(json.dumps(loader.state()))
    loader.close()
    again = StagedLoader(two_stages(texts[1], n=5), TOK)
    with pytest.raises(ValueError, match="belong to other data|lacks rows"):
        again.restore(4, states)
    again.close()


def test_a_wrong_source_of_a_late_stage_is_refused_at_once(texts, tmp_path):
    wrong = dataclasses.replace(texts[1]["b"], glob=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="stages.s1_short.*no file matches.*none.jsonl"):
        StagedLoader(two_stages(texts[1] | {"b": wrong}), TOK)


def test_numbers_beyond_32_bits_are_compared():
    assert furthest(3 << 40 | 7) == 3 << 40 | 7 and furthest(0) == 0
