"""The files of a job: prompts come in, JSON lines go out, and a job that was cut off goes on."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

from k3_jax import chat
from k3_jax.config import nearest
from k3_jax.serving.engine import Request
from k3_jax.serving.sampling import Settings

CONTENT = ("prompt", "text", "token_ids", "messages")
OVERRIDES = tuple(f.name for f in dataclasses.fields(Settings))
KEYS = (*CONTENT, "id", *OVERRIDES)
FORMATS = ("auto", "text", "lines", "jsonl")


class Reader:
    """Turns prompts into requests of token ids, and refuses what is no prompt by its line number.

    `tokenizer` may be None where every prompt is given as ids. Its end ids and `eos_ids`, those of
    the checkpoint, all end a row, unless its settings ignore them: either may be wrong (T16).
    """

    def __init__(self, tokenizer, vocab_size: int, eos_ids, settings: Settings):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._settings = settings
        self._eos_ids = {*eos_ids, *(tokenizer.stop_ids if tokenizer is not None else ())}
        if tokenizer is not None and tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model only {vocab_size}"
            )

    def text(self, text: str, index: int = 0) -> Request:
        """A prompt as it stands."""
        return self._request(index, {"text": text})

    def file(self, source: str, form: str = "auto") -> list[Request]:
        """All prompts of a file, or of stdin for "-".

        `form`: "jsonl" is one object a line; "text" is one prompt, the whole file; "lines" is one
        prompt a line. "auto" is "jsonl" for a file of that name, and for stdin that starts with
        "{", else "text". Empty lines are no prompts.
        """
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"prompts {source}: not UTF-8 text ({e})") from None
        except OSError as e:
            raise type(e)(e.errno, f"prompts {source}: {e.strerror}") from None
        if form == "auto":
            is_json = source.endswith(".jsonl") or (source == "-" and text.lstrip().startswith("{"))
            form = "jsonl" if is_json else "text"
        if form == "text":
            return [self.text(text)] if text else []
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        if form == "lines":
            return [self.text(line.removesuffix("\r"), i) for i, (_, line) in enumerate(lines)]
        requests = []
        for number, line in lines:
            try:
                requests.append(self._request(len(requests), _object(line)))
            except ValueError as e:
                raise ValueError(f"prompts {source}, line {number}: {e}") from None
        return requests

    def _request(self, index: int, row: dict) -> Request:
        known = dict.fromkeys((*KEYS, *chat.KEYS) if "messages" in row else KEYS)
        for key in row:
            if key not in known:
                raise ValueError(
                    f"unknown key {key!r}{nearest(key, known)} (known: {', '.join(known)})"
                )
        given = [key for key in CONTENT if key in row]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(CONTENT)} is needed, not {given}")
        tokens = self._tokens(given[0], row)
        changes = {key: row[key] for key in OVERRIDES if key in row}
        if isinstance(changes.get("stop"), str):
            changes["stop"] = [changes["stop"]]
        for key in ("stop", "stop_ids"):
            if key in changes:
                if not isinstance(changes[key], list):
                    raise ValueError(f"{key}={changes[key]!r}: must be a list")
                changes[key] = tuple(changes[key])
        settings = dataclasses.replace(self._settings, **changes)
        if settings.stop and self._tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer: this checkpoint has none, see --tokenizer"
            )
        if not settings.ignore_eos:
            ids = tuple(sorted({*settings.stop_ids, *self._eos_ids}))
            settings = dataclasses.replace(settings, stop_ids=ids)
        return Request(index, tokens, settings, row.get("id"))

    def _tokens(self, key: str, row: dict) -> tuple[int, ...]:
        if key == "token_ids":
            return self._ids(row[key])
        if key != "messages" and not isinstance(row[key], str):
            raise ValueError(f"{key} is {type(row[key]).__name__}, not a string")
        if self._tokenizer is None:
            raise ValueError(
                "text needs a tokenizer: this checkpoint has none; name one with --tokenizer, or "
                "give token_ids"
            )
        if key != "messages":
            return tuple(self._tokenizer.encode(row[key]))
        chat.check_tokenizer(self._tokenizer)
        conversation = {k: v for k, v in row.items() if k in chat.KEYS}
        return tuple(chat.encode(chat.prompt(conversation), self._tokenizer)[0].tolist())

    def _ids(self, ids) -> tuple[int, ...]:
        if not isinstance(ids, list):
            raise ValueError(f"token_ids is {type(ids).__name__}, not a list")
        for at, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(f"token_ids[{at}]={token!r} is no id of 0..{self._vocab_size - 1}")
        return tuple(ids)


def _object(line: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ValueError(f"not JSON: {e}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object")
    return row


class Output:
    """JSON lines, in the order in which rows end, each written at once and whole.

    Every line carries a `key`, a fingerprint of all that it follows from: the checkpoint, the
    prompt and the settings. Opening a file that exists keeps its lines, takes off a last one that
    was cut short, and refuses lines that other prompts or settings made.
    """

    def __init__(self, path: str | None, requests: list[Request], made_by: dict):
        """`made_by`: what all rows depend on. Without a path lines go to stdout."""
        self.path = path
        self._keys = {r.index: fingerprint(r, made_by) for r in requests}
        self.done: set[int] = set()
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._keep_whole_lines(path)
        # Unbuffered: a line is one write, so that no signal leaves a part of it.
        self._file = sys.stdout.buffer if path is None else open(path, "ab", buffering=0)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def write(self, request: Request, row: dict) -> None:
        """One line: the request's index and id, then `row`."""
        line = {"index": request.index}
        if request.id is not None:
            line["id"] = request.id
        line |= row | {"key": self._keys[request.index]}
        self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
        self._file.flush()

    def _keep_whole_lines(self, path: str) -> None:
        if not os.path.exists(path):
            return
        data = Path(path).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                index, is_same = row["index"], self._keys.get(row["index"]) == row["key"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"output {path}, line {number}: not a line of this program"
                ) from None
            if not is_same:
                raise ValueError(
                    f"output {path}, line {number} (index {index}) was made from another prompt, "
                    "checkpoint or settings: give the same ones to continue, or another --output"
                )
            self.done.add(index)
        if len(whole) < len(data):
            os.truncate(path, len(whole))


def fingerprint(request: Request, made_by: dict) -> str:
    """16 hex digits that change with anything that the request's answer depends on."""
    parts = [
        made_by,
        request.index,
        request.id,
        request.tokens,
        dataclasses.asdict(request.settings),
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
