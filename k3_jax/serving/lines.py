"""What is written of each request: its line of JSON, and how many tokens that took."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3_jax.serving.engine import Engine, Request
from k3_jax.serving.scoring import score
from k3_jax.serving.text import GrowingText
from k3_jax.tokenizer import Tokenizer


class Line(NamedTuple):
    """A finished request: `content` is JSON, `n_tokens` counts those made, or scored."""

    request: Request
    content: dict
    n_tokens: int


def answer_lines(
    engine: Engine,
    requests: list[Request],
    tokenizer: Tokenizer | None,
    *,
    with_logprobs: bool = False,
    show: Callable[[str], None] | None = None,
) -> Iterator[Line]:
    """{"text", "token_ids", "finish_reason"[, "logprobs"][, "error"]} of each request.

    `text` is without the stop string or stop id; None without a tokenizer. `show` gets text as it
    becomes certain, of all rows alike.
    """
    texts: dict[int, GrowingText] = {}

    def text_of(request):
        new = GrowingText(tokenizer.stream(), request.settings.stop, show)
        return texts.setdefault(request.index, new)

    def watch(request, token):
        return tokenizer is not None and text_of(request).push(token)

    for end in engine.run(requests, watch):
        text = None
        if tokenizer is not None:
            text = text_of(end.request).flush()
            del texts[end.request.index]
        content = {"text": text, "token_ids": end.tokens, "finish_reason": end.reason}
        if with_logprobs:
            content["logprobs"] = end.logprobs
        if end.error is not None:
            content["error"] = end.error
        yield Line(end.request, content, len(end.tokens))


def score_lines(
    engine: Engine, requests: list[Request], *, folder: str | None = None
) -> Iterator[Line]:
    """{"token_ids", "token_logprobs"[, "full_logits"][, "error"]} of each request.

    The first token's log-probability is None: nothing precedes it. With a `folder`, log p of
    every token after each position goes to `<index>.npz` there, as `logprobs` [tokens, V].
    """
    limits = dict(n_rows=engine.n_rows, max_length=engine.max_length)
    for end in score(engine.model, requests, **limits, with_rows=folder is not None):
        content = {"token_ids": end.request.tokens, "token_logprobs": end.logprobs}
        if end.rows_TV is not None:
            # Written before the line that names it, so that a line is never without its file.
            path = Path(folder) / f"{end.request.index}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, logprobs=end.rows_TV)
            content["full_logits"] = str(path)
        if end.error is not None:
            content["error"] = end.error
        yield Line(end.request, content, len(end.logprobs))
