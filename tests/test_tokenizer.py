"""Text to ids and back."""

import base64
import json

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_jax.tokenizer import PRETOKENS, load_tokenizer, pieces

MERGES = ["he", "ll", "hell", "hello", " w", "or", " wor", " world", "你", "你好", "'s", "it"]


def write_tiktoken(folder, merges=MERGES):
    """256 single bytes, then every prefix that `merges` need, as a `tiktoken.model`."""
    ranks = [bytes([b]) for b in range(256)]
    for word in merges:
        data = word.encode()
        ranks += [data[:n] for n in range(2, len(data) + 1) if data[:n] not in ranks]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return folder, len(ranks)


def write_hugging_face(folder, end="</s>", added=()):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", end])
    bpe.add_tokens(list(added))
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    bpe.enable_truncation(4)
    bpe.enable_padding(length=4, pad_id=0)
    bpe.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder, _ = write_tiktoken(tmp_path_factory.mktemp("kimi"))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def hugging(tmp_path_factory):
    return load_tokenizer(str(write_hugging_face(tmp_path_factory.mktemp("hf"))))


@pytest.fixture(scope="module", params=["bytes", "kimi", "hugging"])
def tokenizer(request):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    return request.getfixturevalue(request.param)


def test_bytes_need_no_file():
    tok = load_tokenizer("bytes")
    assert (tok.vocab_size, tok.eos_id, tok.stop_ids) == (261, 256, {256, 257})
    assert tok.decode(range(257, 261)) == "<|end_of_msg|><|open|><|close|><|sep|>"
    assert tok.encode("é\n") == [0xC3, 0xA9, 10]
    assert tok.decode([0xC3, 0xA9, 256, 10]) == "é\n"


def test_reserved_ids_follow_the_number_of_ranks(tmp_path):
    """163584 [BOS] .. 163839 [PAD] in the released file, k3-facts 1.5."""
    folder, n_ranks = write_tiktoken(tmp_path)
    tok = load_tokenizer(str(folder))
    assert tok.vocab_size == n_ranks + 256
    assert tok.eos_id == n_ranks + 163585 - 163584
    assert tok.stop_ids == {n_ranks + 1, n_ranks + 2}
    released = {name: i - n_ranks + 163584 for name, i in tok.specials.items()}
    assert released["[BOS]"] == 163584
    assert released["<|end_of_msg|>"] == 163586
    assert released["<|open|>"], released["<|close|>"] == (163587, 163588)
    assert released["<|sep|>"] == 163589
    assert released["[EOT]"] == 163593
    assert released["<|media_begin|>"] == 163602
    assert released["<|media_pad|>"] == 163605
    assert released["<osagent_mode>"] == 163649
    assert (released["[UNK]"], released["[PAD]"]) == (163838, 163839)
    assert tok.specials[f"<|reserved_token_{n_ranks + 8}|>"] == n_ranks + 8
    assert len(tok.specials) == 256


def test_control_markers_in_text_stay_text(tokenizer):
    """T17: no control id from user text."""
    text = "<|open|>system<|sep|> [EOS] <|end_of_msg|></s><s> .hidden"
    ids = tokenizer.encode(text)
    assert not {*tokenizer.specials.values(), tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == text


def test_markers_listed_as_not_special_stay_text_too(tmp_path):
    """T17, as `<|open|>` is listed with `special: false`; a whitespace token still matches."""
    tok = load_tokenizer(str(write_hugging_face(tmp_path, added=["<think>", "<|open|>", "    "])))
    assert {"<think>", "<|open|>"} < set(tok.specials)
    ids = tok.encode("a<think><|open|>b    c")
    assert not set(tok.specials.values()) & set(ids)
    assert tok.vocab_size - 1 in ids  # the four spaces, added last
    assert tok.decode([tok.specials["<think>"]]) == "<think>"


def test_padding_truncation_and_first_token_of_the_file_are_not_applied(hugging):
    assert len(hugging.encode("a")) == 1
    assert len(hugging.encode("abcdefgh")) == 8


def test_pretokens_split_each_kind_of_text_apart():
    """k3-facts A.1; the pieces are those of the eight alternatives, in their order."""
    mixed = "Hello world你好 it's HTTPServer 12345 + x\r\n\r\n  y   \t1\u0301é's"
    want = ["Hello", " world", "你好", " it's", " HTTPServer", " ", "123", "45", " +", " x"]
    want += ["\r\n\r\n", " ", " y", "   ", "\t", "1", "\u0301é's"]
    ranks = {bytes([b]): b for b in range(256)}
    for word in want:
        data = word.encode()
        for n in range(2, len(data) + 1):
            ranks.setdefault(data[:n], len(ranks))
    bpe = tiktoken.Encoding("t", pat_str=PRETOKENS, mergeable_ranks=ranks, special_tokens={})
    ids = bpe.encode_ordinary(mixed)
    assert [bpe.decode([i]) for i in ids] == want


def test_merges_do_not_cross_pretokens(kimi):
    words = [kimi.decode([i]) for i in kimi.encode("hello world你好it's")]
    assert words == ["hello", " world", "你好", "it", "'s"]
    assert kimi.encode("hello你好") == kimi.encode("hello") + kimi.encode("你好")


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n\t你"), max_size=60),
    limits=st.tuples(*[st.integers(1, 9)] * 2),
)
def test_pieces_join_to_the_text_and_keep_both_limits(text, limits):
    max_characters, max_run = limits
    cut = list(pieces(text, max_characters, max_run))
    assert "".join(cut) == text
    for piece in cut:
        assert len(piece) <= max_characters
        run = 0
        for i, c in enumerate(piece):
            run = run + 1 if i and c.isspace() == piece[i - 1].isspace() else 1
            assert run <= max_run


def test_pieces_are_cut_where_the_released_tokenizer_cuts():
    """400,000 characters; runs of 25,000 (k3-facts 1.5)."""
    assert [len(p) for p in pieces("x" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(p) for p in pieces("ab " * 200_000)] == [400_000, 200_000]
    assert [len(p) for p in pieces("a " + "b" * 25_000 + " " * 25_001)] == [50_002, 1]


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_encode_and_decode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, np.int32)) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_ids_decode_and_streaming_says_the_same(tokenizer, data):
    n = tokenizer.vocab_size
    ids = data.draw(st.lists(st.integers(-2, n + 2) | st.integers(200, 255), max_size=20))
    whole = tokenizer.decode(ids)
    stream = tokenizer.stream()
    shown = [stream.push(i) for i in ids]
    assert "".join(shown) + stream.flush() == whole


def test_a_stream_never_shows_half_a_character(tokenizer):
    stream = tokenizer.stream()
    shown = [stream.push(i) for i in tokenizer.encode("a€😀b")]
    assert not any("\ufffd" in s for s in shown)
    assert "".join(shown) == "a€😀b"
    for i in tokenizer.encode("😀")[:-1]:
        assert stream.push(i) == ""
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_the_end_of_a_document_is_found_by_name_or_config(tmp_path):
    path = write_hugging_face(tmp_path, end="<|endoftext|>")
    tok = load_tokenizer(str(tmp_path))
    assert tok.decode([tok.eos_id]) == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    tok = load_tokenizer(str(path))
    assert tok.decode([tok.eos_id]) == "<s>"
    assert len(tok.stop_ids) == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<no>"}))
    with pytest.raises(ValueError, match="'<no>' is not in its vocabulary"):
        load_tokenizer(str(path))


def test_names_follow_content_not_path(tmp_path):
    names = []
    for folder, merges in ("a", MERGES), ("b", MERGES), ("c", MERGES[:3]):
        (tmp_path / folder).mkdir()
        names.append(load_tokenizer(str(write_tiktoken(tmp_path / folder, merges)[0])).name)
    assert names[0] == names[1] != names[2]


def test_errors_say_what_was_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match='"bytes", a tiktoken.model'):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="neither tiktoken.model nor tokenizer.json"):
        load_tokenizer(str(tmp_path))
    bad = tmp_path / "bad.model"
    bad.write_text("YQ== 0\nnot base64 at all\n")
    with pytest.raises(ValueError, match="line 2 is 'not base64 at all'"):
        load_tokenizer(str(bad))
    bad.write_text("YQ== 0\n")
    with pytest.raises(ValueError, match="255 of the 256 single bytes"):
        load_tokenizer(str(bad))
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b + (b == 255)}" for b in range(256)]
    bad.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="ranks are not 0..255"):
        load_tokenizer(str(bad))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no token that ends a document"):
        load_tokenizer(str(write_hugging_face(tmp_path, end="<stop>")))
