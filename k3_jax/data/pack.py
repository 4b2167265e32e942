"""Documents -> rows: one endless stream of tokens per row, cut into rows of equal length."""

import numpy as np

from k3_jax.tokenizer import MAX_CHARACTERS


class Turns:
    """Row streams taken in turn: a row after the other, each from the next stream.

    `position` is (whose turn it is, the streams' positions).
    """

    def __init__(self, streams: list["RowStream"]):
        self._streams = streams
        self._turn = 0

    @property
    def position(self):
        return self._turn, [list(stream.position) for stream in self._streams]

    @position.setter
    def position(self, value):
        self._turn, positions = value
        for stream, position in zip(self._streams, positions, strict=True):
            stream.position = tuple(position)

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        row = next(self._streams[self._turn])
        self._turn = (self._turn + 1) % len(self._streams)
        return row


class RowStream:
    """Packs documents one after the other into rows of `seq_len` tokens.

    Reads `documents[n]` for the n in `numbers`, each followed by `tokenizer.eos_id`. A row's
    segments count its documents from 1; a document that a row's end splits goes on as segment 1 of
    the next row. After the last document what remains of the row is 0 with segment 0, and so are
    all later rows.

    `position` is (index into `numbers`, token of that document): the next token to hand out, and
    all the state there is.

    Grain's ConcatThenSplitIterDataset makes the same rows (tests use it as the oracle). It is not
    used here, because its state does not survive JSON (tuples return as lists) and follows Grain's
    versions, and because it holds all tokens of a document at once.
    """

    def __init__(self, documents, numbers: range, tokenizer, seq_len: int):
        self._documents = documents
        self._numbers = numbers
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self.position = (0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self._document, self._token

    @position.setter
    def position(self, value: tuple[int, int]):
        """Reads nothing yet: the document is opened by the next row."""
        self._document, self._token = value
        self._pieces = None
        self._ids = np.zeros(0, np.int32)

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens_T and segments_T, int32."""
        tokens_T = np.zeros(self._seq_len, np.int32)
        segments_T = np.zeros(self._seq_len, np.int32)
        filled, segment = 0, 1
        while filled < self._seq_len and self._document < len(self._numbers):
            ids = self._ids[: self._seq_len - filled]
            tokens_T[filled : filled + len(ids)] = ids
            segments_T[filled : filled + len(ids)] = segment
            filled += len(ids)
            self._token += len(ids)
            self._ids = self._ids[len(ids) :]
            if not len(self._ids) and not self._next_piece():
                self.position = (self._document + 1, 0)
                segment += 1
        return tokens_T, segments_T

    def _next_piece(self) -> bool:
        """The next piece of the document into `_ids`; False after its last."""
        if self._pieces is None:
            text = self._documents[self._numbers[self._document]]
            self._pieces = self._encode(text, self._token)
        ids = next(self._pieces, None)
        if ids is not None:
            self._ids = ids
        return ids is not None

    def _encode(self, text: str, n_skipped: int):
        """Yields ids in pieces, so that a long document never exists as ids all at once. The pieces
        are those into which Kimi K3's tokenizer cuts a text, hence its ids do not change."""
        for at in range(0, len(text) + 1, MAX_CHARACTERS):
            ids = self._tokenizer.encode(text[at : at + MAX_CHARACTERS])
            if at + MAX_CHARACTERS > len(text):
                ids.append(self._tokenizer.eos_id)
            n_cut = min(n_skipped, len(ids))
            n_skipped -= n_cut
            yield np.array(ids[n_cut:], np.int32)
        if n_skipped:
            raise ValueError(
                f"document {self._numbers[self._document]} ends {n_skipped} tokens before token "
                f"{self._token}, where the row should go on: the text changed since it was saved"
            )
