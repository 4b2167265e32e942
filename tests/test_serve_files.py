"""What goes into a batch job and what comes out: prompts, drawing, ends, lines, resuming."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from serve_models import GREEDY, SMALL, build, prompt, requests

from k3_jax.checkpoint.load import eos_ids
from k3_jax.serving.engine import Engine, Request
from k3_jax.serving.jobs import Output, Reader
from k3_jax.serving.lines import answer_lines, score_lines
from k3_jax.serving.sampling import Draw, Settings, draw_tokens, exclude
from k3_jax.serving.text import GrowingText
from k3_jax.tokenizer import BytesTokenizer
from sharding import act_spec, make_mesh


@pytest.fixture(scope="module")
def engine():
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        yield Engine(build(SMALL), n_rows=4, piece=64)


# Drawing


def draw_of(n, **changes):
    columns = dict(temperature=1, top_k=0, top_p=1, min_p=0, seed=0, request=0, number=0) | changes
    types = ("f4", "i4", "f4", "f4", "u4", "u4", "u4")
    values = zip(columns.values(), types, strict=True)
    return Draw(*(np.broadcast_to(np.array(v, t), n).copy() for v, t in values))


def excluded_plainly(logits, k, p, least):
    """Top-k, top-p, min-p one after another, a token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[: k or None]
    chance = {i: float(np.exp(np.float64(logits[i]) - logits.max())) for i in kept}
    total, reached, some = sum(chance.values()), 0.0, []
    for i in kept:
        if reached < p * total or p == 1:
            some.append(i)
        reached += chance[i]
    return {i for i in some if chance[i] >= least * chance[order[0]]}


@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_top_k_top_p_and_min_p_keep_exactly_the_right_tokens(has_ties):
    rng = np.random.default_rng(3)
    cases = [
        (k, p, m) for k in (0, 1, 5, 40, 99) for p in (1e-6, 0.3, 0.9, 1) for m in (0, 0.05, 1)
    ]
    logits = rng.normal(size=(len(cases), 40)).astype(np.float32) * 2
    if has_ties:
        logits = np.round(logits)
    k, p, m = (np.array(column) for column in zip(*cases, strict=True))
    out = np.asarray(jax.jit(exclude)(logits, k, p.astype(np.float32), m.astype(np.float32)))
    for row, case in enumerate(cases):
        kept = set(np.flatnonzero(np.isfinite(out[row])).tolist())
        assert kept == excluded_plainly(logits[row], *case), case
        assert (out[row][sorted(kept)] == logits[row][sorted(kept)]).all()


@pytest.mark.parametrize(
    "settings", [dict(), dict(temperature=0.5), dict(top_k=3), dict(temperature=2, top_p=0.8)]
)
def test_tokens_come_as_often_as_their_probability_says(engine, settings):
    """20,000 draws; 5 standard deviations of a frequency."""
    n, logits = 20_000, np.array([1.0, 0.2, -1.0, 0.5, 0.0, -3.0], np.float32)
    draw = draw_of(n, number=np.arange(n), **settings)
    drawn = jax.jit(draw_tokens)(put_rows(np.tile(logits, (n, 1))), Draw(*map(put_rows, draw)))
    scaled = logits / settings.get("temperature", 1)
    kept = excluded_plainly(scaled, settings.get("top_k", 0), settings.get("top_p", 1), 0)
    p = np.array([np.exp(x) if i in kept else 0 for i, x in enumerate(scaled)])
    p /= p.sum()
    found = np.bincount(np.asarray(drawn.token_B), minlength=6) / n
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / n)).all(), (found, p)
    plain = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(drawn.logprob_B, plain[np.asarray(drawn.token_B)], atol=1e-6)


def put_rows(x):
    return jax.device_put(x, jax.sharding.NamedSharding(jax.sharding.get_mesh(), act_spec("B")))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_non_finite_logit_is_told_apart(engine, bad):
    """T10: the token itself would be 0, which looks like an answer."""
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = bad
    drawn = jax.jit(draw_tokens)(put_rows(logits), Draw(*map(put_rows, draw_of(3))))
    assert drawn.is_finite_B.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("seed", 2**32),
        ("stop", ("",)),
        ("stop_ids", (-1,)),
        ("ignore_eos", 1),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Settings(**{field: value})


# Ends


def test_a_row_stops_at_any_end_id_that_config_or_tokenizer_names(tmp_path, engine):
    """T16: three files that disagree; the first id of any of them ends the row with "stop"."""
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 163586}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [163586, 7, null]}')
    assert eos_ids(tmp_path) == {163586, 7}
    reader = Reader(BytesTokenizer(), 300, eos_ids(tmp_path), Settings(stop_ids=(9,)))
    assert reader.text("a").settings.stop_ids == (7, 9, 256, 257, 163586)
    reader = Reader(BytesTokenizer(), 300, {7}, Settings(stop_ids=(9,), ignore_eos=True))
    assert reader.text("a").settings.stop_ids == (9,)

    (whole,) = engine.run(requests((5,)))
    tokens = whole.tokens
    last = next(i for i in range(3, 32) if tokens[i] not in tokens[:i])
    ids = (tokens[last], tokens[-1] if tokens[-1] not in tokens[:-1] else 299)
    (end,) = engine.run(requests((5,), dataclasses.replace(GREEDY, stop_ids=ids)))
    assert (end.tokens, end.reason) == (tokens[: last + 1], "stop")
    assert end.logprobs == whole.logprobs[: last + 1]


def feed(text, stops, pieces=None):
    shown = []
    grown = GrowingText(BytesTokenizer().stream(), stops, shown.append)
    for token in text.encode():
        if grown.push(token):
            break
    return grown.flush(), shown


def test_stop_strings_are_found_across_tokens_and_never_shown_in_part():
    text, shown = feed("one\nEND two", ("\nEND", "zzz"))
    assert text == "one" == "".join(shown)
    text, shown = feed("one\nEN", ("\nEND",))
    assert text == "one\nEN" == "".join(shown) and shown[-1] == "\nEN"
    assert feed("aab", ("ab",))[0] == "a"
    assert feed("naïve €", ("€",))[0] == "naïve "
    assert feed("abc", ("c", "bc"))[0] == "a"
    assert feed("plain", ())[1] == list("plain")


def test_an_answer_ends_before_its_stop_string(engine):
    """The ids are those drawn, the text is cut."""
    endless = dataclasses.replace(GREEDY, ignore_eos=True)
    asked = Reader(BytesTokenizer(), 300, (), endless).text("def")
    (whole,) = answer_lines(engine, [asked], BytesTokenizer())
    stop = whole.content["text"][5:7]
    asked = dataclasses.replace(asked, settings=dataclasses.replace(GREEDY, stop=(stop,)))
    shown = []
    (cut,) = answer_lines(engine, [asked], BytesTokenizer(), show=shown.append, with_logprobs=True)
    text = whole.content["text"]
    assert cut.content["finish_reason"] == "stop"
    assert cut.content["text"] == text[: text.index(stop)] == "".join(shown)
    n = len(cut.content["token_ids"])
    assert cut.content["token_ids"] == whole.content["token_ids"][:n] and n < 32
    assert len(cut.content["logprobs"]) == n


# Files


def reader(**kwargs):
    return Reader(BytesTokenizer(), 300, (), Settings(**kwargs))


def test_prompts_are_read_in_each_format(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "ab", "id": 7}\n\n{"token_ids": [1, 2], "max_tokens": 3, "stop": "x"}\n'
        '{"text": "c\\u20ac", "temperature": 0, "stop_ids": [4]}'
    )
    a, b, c = reader(seed=5).file(str(path))
    assert (a.index, a.id, a.tokens) == (0, 7, (97, 98)) and a.settings.seed == 5
    assert (b.index, b.tokens, b.settings.max_tokens) == (1, (1, 2), 3)
    assert b.settings.stop == ("x",) and c.settings.stop_ids == (4, 256, 257)
    assert c.tokens == (99, 0xE2, 0x82, 0xAC) and c.settings.temperature == 0
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n\n")
    assert [bytes(r.tokens) for r in reader().file(str(path))] == [b"one\ntwo\n\n"]
    assert [bytes(r.tokens) for r in reader().file(str(path), "lines")] == [b"one", b"two"]
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert [bytes(r.tokens) for r in reader().file("-")] == [b"one\ntwo\n\n"]
    with (tmp_path / "p.jsonl").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert len(reader().file("-")) == 3


def test_messages_become_the_prompt_of_an_answer(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a"}], "thinking": false, "seed": 2}'
    )
    (request,) = reader().file(str(path))
    opened = b'\2message role="user"\4a\3message\4\1\2message role="assistant"\4\2response\4'
    assert request.tokens == tuple(b + 256 if b < 5 else b for b in opened)
    assert request.settings.seed == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"text": "a", "tools": []}', "line 2: unknown key 'tools'"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\]: content is missing"),
        ("[1]", "line 2: a JSON list, not an object"),
        ('{"txt": "a"}', "line 2: unknown key 'txt'; did you mean \"text\""),
        ('{"id": 1}', "line 2: exactly one of prompt, text, token_ids, messages"),
        ('{"text": "a", "token_ids": [1]}', "line 2: exactly one of"),
        ('{"text": 5}', "line 2: text is int, not a string"),
        ('{"token_ids": [1, 300]}', r"line 2: token_ids\[1\]=300 is no id of 0..299"),
        ('{"token_ids": [true]}', r"line 2: token_ids\[0\]=True"),
        ('{"token_ids": "a"}', "line 2: token_ids is str, not a list"),
        ('{"text": "a", "top_p": 2}', "line 2: top_p=2: must be above 0 and at most 1"),
        ('{"text": "a", "stop": 5}', "line 2: stop=5: must be a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        reader().file(str(path))


def test_files_and_tokenizers_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="prompts .*gone.txt: No such file"):
        reader().file(str(tmp_path / "gone.txt"))
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        reader().file(str(tmp_path / "p.txt"))
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        Reader(None, 300, (), GREEDY).text("a")
    with pytest.raises(ValueError, match="tokenizer has 261 ids, the model only 256"):
        Reader(BytesTokenizer(), 256, (), GREEDY)


def test_an_interrupted_job_continues_and_ends_with_the_lines_of_an_uninterrupted_one(
    tmp_path, engine
):
    asked = [reader(max_tokens=4).text(text, i) for i, text in enumerate(("a", "bc", "d", "ef"))]

    def job(path, stop_after=None):
        with Output(str(path), asked, ["model"]) as output:
            todo = [r for r in asked if r.index not in output.done]
            for n, line in enumerate(answer_lines(engine, todo, BytesTokenizer()), 1):
                output.write(line.request, line.content)
                if n == stop_after:
                    break
            return len(todo)

    job(tmp_path / "whole.jsonl")
    path = tmp_path / "cut.jsonl"
    job(path, stop_after=2)
    path.write_bytes(path.read_bytes() + b'{"index": 3, "te')
    assert job(path) == 2
    assert sorted(path.read_text().splitlines()) == sorted(
        (tmp_path / "whole.jsonl").read_text().splitlines()
    )
    assert job(path) == 0


def test_a_file_of_another_job_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "out.jsonl"
    asked = [reader().text("a")]
    with Output(str(path), asked, ["model"]) as output:
        output.write(asked[0], {"text": "b"})
    before = path.read_bytes() + b'{"half'
    path.write_bytes(before)
    others = (
        ([reader().text("b")], ["model"]),
        ([reader(seed=1).text("a")], ["model"]),
        (asked, [1]),
    )
    for requests_, made_by in (*others, ([], ["model"])):
        with pytest.raises(ValueError, match="line 1 .index 0. was made from another prompt"):
            Output(str(path), requests_, made_by)
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="line 1: not a line of this program"):
        Output(str(path), asked, ["model"])


def test_scores_are_lines_and_rows_in_files(tmp_path, engine):
    asked = [Request(0, prompt(5), GREEDY), Request(1, (), GREEDY)]
    lines = {
        line.request.index: line.content
        for line in score_lines(engine, asked, folder=str(tmp_path / "x"))
    }
    rows = np.load(lines[0]["full_logits"])["logprobs"]
    assert rows.shape == (5, 300)
    np.testing.assert_allclose(np.exp(rows).sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(
        lines[0]["token_logprobs"][1:], rows[np.arange(4), asked[0].tokens[1:]], atol=1e-5
    )
    assert lines[1]["token_logprobs"] == [] and "empty text" in lines[1]["error"]
