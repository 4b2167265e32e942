"""Text to ids and back: raw bytes, Kimi K3's `tiktoken.model`, or a Hugging Face `tokenizer.json`.

Text is only ever text: a control marker written inside it ("<|open|>") becomes ordinary tokens.
Whoever needs a control id asks for it by name in `Tokenizer.specials`.
"""

import abc
import base64
import binascii
import codecs
import hashlib
import json
import re

import tiktoken
import tokenizers
from etils import epath

# Kimi K3's reserved ids follow the mergeable ranks; offset -> name, the rest are named by their id.
N_RESERVED = 256
RESERVED_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRETOKENS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# A tokenizer.json does not say which token ends a document; these names do so in released models.
END_NAMES = (
    "[EOS]",
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_msg|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
)

_MARKER = re.compile(r"<\S+>|\[\S+\]")
_UNKNOWN = "\ufffd".encode()


class Tokenizer(abc.ABC):
    """Text <-> ids.

    `name` identifies the vocabulary by content, not by path. `eos_id` ends a document, `stop_ids`
    end an answer, `specials` maps the name of each control token to its id.
    """

    name: str
    vocab_size: int
    eos_id: int
    stop_ids: frozenset[int]
    specials: dict[str, int]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all of it ordinary text; nothing is put before or after it."""

    @abc.abstractmethod
    def decode(self, ids) -> str:
        """Text of `ids`. Invalid UTF-8 and ids outside the vocabulary become U+FFFD."""

    @abc.abstractmethod
    def stream(self):
        """A decoder fed one id at a time: `push(id)` and `flush()` return the text now complete."""


class _ByteTokenizer(Tokenizer):
    """A tokenizer whose every id stands for fixed bytes."""

    @abc.abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """The bytes that `token` stands for; those of U+FFFD outside the vocabulary."""

    def decode(self, ids) -> str:
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def stream(self):
        return _ByteStream(self)


class _ByteStream:
    def __init__(self, tokenizer: _ByteTokenizer):
        self._bytes_of = tokenizer.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes_of(token))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class BytesTokenizer(_ByteTokenizer):
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document and has no text, 257 and on are the
    markers of Kimi K3's chat format."""

    def __init__(self):
        self.name = "bytes"
        self.eos_id = 256
        markers = (RESERVED_NAMES[i] for i in range(2, 6))
        self.specials = {name: i for i, name in enumerate(markers, self.eos_id + 1)}
        self.vocab_size = self.eos_id + 1 + len(self.specials)
        self.stop_ids = frozenset({self.eos_id, self.specials["<|end_of_msg|>"]})
        self._markers = {i: name.encode() for name, i in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        return list(_valid(text).encode("utf-8"))

    def bytes_of(self, token: int) -> bytes:
        if 0 <= token < self.eos_id:
            return bytes((token,))
        return b"" if token == self.eos_id else self._markers.get(token, _UNKNOWN)


class KimiTokenizer(_ByteTokenizer):
    """Kimi K3's byte-pair encoding; `content` is a `tiktoken.model`, `path` is for messages.

    The 256 reserved ids start where the mergeable ranks end (163,584 in the released file).
    """

    def __init__(self, content: bytes, path: str):
        ranks = _mergeable_ranks(content, path)
        first = len(ranks)
        names = [
            RESERVED_NAMES.get(i, f"<|reserved_token_{first + i}|>") for i in range(N_RESERVED)
        ]
        self.name = f"tiktoken:{_digest(content)}"
        self.vocab_size = first + N_RESERVED
        self.specials = {name: first + i for i, name in enumerate(names)}
        self.eos_id = self.specials["[EOS]"]
        self.stop_ids = frozenset({self.eos_id, self.specials["<|end_of_msg|>"]})
        self._bpe = tiktoken.Encoding(
            self.name, pat_str=PRETOKENS, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in pieces(text):
            ids.extend(self._bpe.encode_ordinary(piece))
        return ids

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return _UNKNOWN
        return self._bpe.decode_single_token_bytes(int(token))


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; `config` is the parsed `tokenizer_config.json` beside it, or {}.

    The file's own padding, truncation and beginning-of-text token are not applied.
    """

    def __init__(self, content: bytes, config: dict, path: str):
        self._bpe = _hugging_face(content, path)
        ids = self._bpe.get_vocab(with_added_tokens=True)
        added = self._bpe.get_added_tokens_decoder()
        self.name = f"huggingface:{_digest(content)}"
        self.vocab_size = max(ids.values()) + 1
        self.specials = {t.content: i for i, t in added.items() if t.special}
        ends = [name for name in END_NAMES if name in ids]
        stated = config.get("eos_token")
        stated = stated.get("content") if isinstance(stated, dict) else stated
        if stated is not None and stated not in ids:
            raise ValueError(f"tokenizer {path}: eos_token {stated!r} is not in its vocabulary")
        if stated is None and not ends:
            raise ValueError(
                f"tokenizer {path}: no token that ends a document; put eos_token into "
                f"tokenizer_config.json beside it, or use one of {', '.join(END_NAMES)}"
            )
        self.eos_id = ids[stated if stated is not None else ends[0]]
        self.stop_ids = frozenset({self.eos_id, *(ids[name] for name in ends)})

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(_valid(text), add_special_tokens=False).ids

    def decode(self, ids) -> str:
        text, known = [], []
        for token in ids:
            if 0 <= token < self.vocab_size:
                known.append(int(token))
                continue
            text += [self._bpe.decode(known, skip_special_tokens=False), "\ufffd"]
            known = []
        return "".join(text) + self._bpe.decode(known, skip_special_tokens=False)

    def stream(self):
        return _TextStream(self)


class _TextStream:
    """Decodes a short window again at each id and shows what can no longer change.

    An unfinished character decodes to at most three U+FFFD (one for each byte so far).
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._n_shown = 0

    def push(self, token: int) -> str:
        self._window.append(int(token))
        text = self._decode(self._window)
        n_sure = len(text)
        while n_sure and len(text) - n_sure < 3 and text[n_sure - 1] == "\ufffd":
            n_sure -= 1
        new = text[self._n_shown : n_sure]
        self._n_shown = max(self._n_shown, n_sure)
        if n_sure == len(text):
            # The last id stays, because decoders treat the first word of a text in another way.
            self._window = [int(token)]
            self._n_shown = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        text = self._decode(self._window)[self._n_shown :]
        self._window, self._n_shown = [], 0
        return text


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names.

    `spec` is "bytes", a `tiktoken.model`, a `tokenizer.json`, or a directory that holds one of
    them (`tiktoken.model` is preferred). Raises FileNotFoundError or ValueError.
    """
    if spec == "bytes":
        return BytesTokenizer()
    path = epath.Path(spec)
    if not spec or not path.exists():
        raise FileNotFoundError(
            f'tokenizer {spec!r}: no such file or directory; use "bytes", a tiktoken.model or a '
            "tokenizer.json, or a directory that holds one of them"
        )
    if path.is_dir():
        found = [path / n for n in ("tiktoken.model", "tokenizer.json") if (path / n).exists()]
        if not found:
            raise FileNotFoundError(
                f"tokenizer {spec!r}: the directory holds neither tiktoken.model nor tokenizer.json"
            )
        path = found[0]
    if path.suffix != ".json":
        return KimiTokenizer(path.read_bytes(), str(path))
    beside = path.parent / "tokenizer_config.json"
    config = json.loads(beside.read_text()) if beside.exists() else {}
    return HuggingFaceTokenizer(path.read_bytes(), config, str(path))


def pieces(text: str, max_characters: int = MAX_CHARACTERS, max_run: int = MAX_RUN):
    """Cuts `text` as Kimi K3's tokenizer does before BPE, whose cost grows faster than its input.

    Cuts fall every `max_characters`, and inside them every `max_run` characters of a run that is
    all whitespace or all non-whitespace.
    """
    for at in range(0, len(text), max_characters):
        part = text[at : at + max_characters]
        start = 0
        if len(part) > max_run:
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + max_run, run.end(), max_run):
                    yield part[start:cut]
                    start = cut
        yield part[start:]


def _valid(text: str) -> str:
    """`text` with lone surrogates (JSON can hold them, UTF-8 cannot) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _mergeable_ranks(content: bytes, path: str) -> dict[bytes, int]:
    """Parses lines of "base64 rank". tiktoken's own reader keeps a stale copy in a temp folder."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            shown = line[:40].decode("utf-8", "replace")
            raise ValueError(
                f"tokenizer {path}: line {number} is {shown!r}, not a base64 token and its rank"
            ) from None
    missing = [b for b in range(256) if bytes((b,)) not in ranks]
    if missing:
        raise ValueError(
            f"tokenizer {path}: {len(missing)} of the 256 single bytes have no rank (first: "
            f"{missing[0]}), so some text could not be encoded"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"tokenizer {path}: ranks are not 0..{len(ranks) - 1}, each once")
    return ranks


def _hugging_face(content: bytes, path: str) -> tokenizers.Tokenizer:
    try:
        spec = json.loads(content)
        # Chat markers are often listed as "not special"; the library would then find them in text.
        for token in spec.get("added_tokens") or ():
            token["special"] = token["special"] or bool(_MARKER.fullmatch(token["content"]))
        bpe = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"tokenizer {path}: not a tokenizer.json: {error}") from None
    bpe.encode_special_tokens = True
    bpe.no_padding()
    bpe.no_truncation()
    return bpe
