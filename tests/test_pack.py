"""Documents packed into rows."""

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_jax.data.pack import RowStream
from k3_jax.tokenizer import MAX_CHARACTERS, BytesTokenizer, load_tokenizer

TOK = load_tokenizer("bytes")
EOS = TOK.eos_id


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("abc", max_size=30), min_size=1, max_size=12), seq_len=st.integers(1, 16)
)
def test_rows_equal_those_of_grain(texts, seq_len):
    """The oracle is Grain's ConcatThenSplitIterDataset; its last row is padded like ours."""
    ds = grain.MapDataset.source(texts).map(
        lambda t: {"tokens": np.array(TOK.encode(t) + [EOS], np.int32)}
    )
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    want = list(
        grain.experimental.ConcatThenSplitIterDataset(ds, length_struct={"tokens": seq_len})
    )
    stream = RowStream(texts, range(len(texts)), TOK, seq_len)
    for row in want:
        got = next(stream)
        np.testing.assert_array_equal(got.tokens, row["tokens"])
        np.testing.assert_array_equal(got.segments, row["tokens_segment_ids"])
    assert stream.position == (len(texts), 0)
    assert not next(stream).segments.any()


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text("ab", max_size=9), min_size=1, max_size=8), n=st.integers(0, 12))
def test_a_row_stream_goes_on_at_its_token(texts, n):
    first = RowStream(texts, range(len(texts)), TOK, 5)
    for _ in range(n):
        next(first)
    second = RowStream(texts, range(len(texts)), TOK, 5)
    second.position = first.position
    for _ in range(4):
        for mine, other in zip(next(first), next(second), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_a_long_document_is_encoded_piece_by_piece_and_not_before_it_is_needed():
    class Counting(BytesTokenizer):
        sizes = []

        def encode(self, text):
            self.sizes.append(len(text))
            return super().encode(text)

    tok = Counting()
    text = "0123456789" * 300_001
    stream = RowStream([text], range(1), tok, 1000)
    rows = [next(stream)[0] for _ in range(1000)]
    assert max(tok.sizes) == MAX_CHARACTERS
    assert len(tok.sizes) == 3
    assert tok.decode(np.concatenate(rows)) == text[:1_000_000]
    stream.position = (0, len(text) - 1)
    row = next(stream)
    assert row.tokens[:3].tolist() == [ord("9"), EOS, 0]
    assert row.segments[:3].tolist() == row.mask[:3].tolist() == [1, 1, 0]


def test_a_document_that_shrank_since_the_save_is_refused():
    stream = RowStream(["abc"], range(1), TOK, 4)
    stream.position = (0, 9)
    with pytest.raises(ValueError, match="ends 5 tokens before token 9"):
        next(stream)
