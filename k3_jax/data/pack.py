"""Documents -> rows: one endless stream of tokens per row, cut into rows of equal length."""

from typing import NamedTuple

import numpy as np
from absl import logging

from k3_jax import chat
from k3_jax.tokenizer import MAX_CHARACTERS

MAX_WARNINGS = 3


class Row(NamedTuple):
    """Each int32 [T]. `mask` is 1 where a token is to be learned."""

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray


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

    def __next__(self) -> Row:
        row = next(self._streams[self._turn])
        self._turn = (self._turn + 1) % len(self._streams)
        return row


class RowStream:
    """Packs documents one after the other into rows of `seq_len` tokens.

    Reads `documents[n]` for the n in `numbers`. A row's segments count its documents from 1. After
    the last document what remains of the row is 0 with segment 0, and so are all later rows.

    A text is followed by `tokenizer.eos_id`, all of it is learned, and where a row's end splits it
    it goes on as segment 1 of the next row. A conversation (`chat.conversation`) is never split,
    because an answer without its question teaches something else: one that does not fit into what
    remains of a row begins the next, and pads of segment 0 take its place. One that is longer than
    a row loses its end, with a warning.

    `position` is (index into `numbers`, token of that document): the next token to hand out, and
    all the state there is.

    Grain's ConcatThenSplitIterDataset makes the same rows of texts (tests use it as the oracle). It
    is not used here, because its state does not survive JSON (tuples return as lists) and follows
    Grain's versions, and because it holds all tokens of a document at once.
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
        self._ids = self._learned = np.zeros(0, np.int32)

    def __next__(self) -> Row:
        tokens_T, segments_T, mask_T = np.zeros((3, self._seq_len), np.int32)
        filled, segment = 0, 1
        while filled < self._seq_len and self._document < len(self._numbers):
            if self._pieces is None:
                self._open()
            if self._is_whole and filled and filled + len(self._ids) > self._seq_len:
                break
            end = min(filled + len(self._ids), self._seq_len)
            n = end - filled
            tokens_T[filled:end], mask_T[filled:end] = self._ids[:n], self._learned[:n]
            segments_T[filled:end] = segment
            filled = end
            self._token += n
            self._ids, self._learned = self._ids[n:], self._learned[n:]
            if self._is_whole or (not len(self._ids) and not self._next_piece()):
                self.position = (self._document + 1, 0)
                segment += 1
        return Row(tokens_T, segments_T, mask_T)

    def _open(self) -> None:
        """Opens the document at `position`, its first tokens in `_ids`."""
        document = self._documents[self._numbers[self._document]]
        self._is_whole = not isinstance(document, str)
        if not self._is_whole:
            self._pieces = self._encode(document, self._token)
            self._next_piece()
            return
        self._ids, self._learned = chat.encode(document, self._tokenizer)
        self._pieces = iter(())
        if len(self._ids) > self._seq_len:
            logging.log_first_n(
                logging.WARNING,
                "a conversation of %d tokens is cut to data.seq_len=%d; %d of its %d learned "
                "tokens stay (the first %d such conversations are told of)",
                *(MAX_WARNINGS, len(self._ids), self._seq_len),
                *(self._learned[: self._seq_len].sum(), self._learned.sum(), MAX_WARNINGS),
            )

    def _next_piece(self) -> bool:
        """The next piece of a text into `_ids`; False after its last."""
        ids = next(self._pieces, None)
        if ids is not None:
            self._ids, self._learned = ids, np.ones(len(ids), np.int32)
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
