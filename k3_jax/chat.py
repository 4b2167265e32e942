"""Kimi K3's chat format ("XTML", report appendix F): conversations as tokens, with a loss mask.

An element is <|open|>tag key="value"<|sep|>body<|close|>tag<|sep|>, a message is an element that
<|end_of_msg|> follows. Only those four markers are control tokens; they come from here and never
out of text. Each part is tokenised by itself, so that no token spans two of them.
"""

import difflib
import itertools
import json
from typing import NamedTuple

import numpy as np

from k3_jax.config import nearest
from k3_jax.config.mapping import check_choice
from k3_jax.tokenizer import Tokenizer

# What an object that holds a conversation says; its other keys are not looked at.
KEYS = ("messages", "tools", "thinking", "thinking_effort", "tool_choice", "response_format")
# Beside `role`, which a message always has.
MESSAGE_KEYS = {
    "system": ("content", "name", "tools"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "tool_calls"),
    "tool": ("content", "name", "tool_call_id"),
}
EFFORTS = ("low", "high", "max")

TOOLS = """# Tools
Here are the available tools, described in JSONSchema.

```json
{}
```"""
MORE_TOOLS = """## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{}
```"""
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Part(NamedTuple):
    """What is tokenised by itself: text, or a marker (the name of a control token)."""

    text: str
    is_marker: bool = False
    is_learned: bool = False


OPEN, CLOSE, SEP, END = (
    Part(name, is_marker=True) for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
)


def conversation(given) -> tuple[Part, ...]:
    """A conversation to learn from; `given` is a JSON object of `KEYS`, messages as OpenAI's API
    has them (`reasoning_content` is the think channel).

    Learned is what the model would write: of each assistant message all that follows the opening
    of its first channel, up to and with <|end_of_msg|>, save arguments that are not JSON, which
    the report masks. Where the loss begins and ends otherwise it does not say; chosen here.
    Without `thinking` it is thinking if a message has `reasoning_content` (chosen here); in
    thinking mode the effort is "max" as in the released encoder, null leaves its message out.
    Options for one answer (`tool_choice`, `response_format`) stand before the last message.
    Raises ValueError naming the message.
    """
    messages = _messages(given)
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise ValueError("no assistant message: there is nothing to learn")
    before, options = _options(given, any(m.get("reasoning_content") for m in answers))
    if options and messages[-1]["role"] != "assistant":
        raise ValueError(
            "tool_choice and response_format are for the last message, which must be the "
            f"assistant's, not of role {messages[-1]['role']!r}"
        )
    *rendered, last = _rendered(messages, before.is_thinking)
    return tuple(itertools.chain(before.parts, *rendered, options, last))


def prompt(given) -> tuple[Part, ...]:
    """What the model is given to answer: `given` as for `conversation`, then the opening of the
    answer's first channel. Without `thinking` it is thinking, as in the released encoder.
    """
    messages = _messages(given)
    before, options = _options(given, True)
    rendered = _rendered(messages, before.is_thinking)
    opening = _answer_opening({}, before.is_thinking)
    return tuple(itertools.chain(before.parts, *rendered, options, opening))


def encode(parts: tuple[Part, ...], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and, of each, whether it is learned; both int32 [n]."""
    ids, learned = [], []
    for part in parts:
        new = [tokenizer.specials[part.text]] if part.is_marker else tokenizer.encode(part.text)
        ids += new
        learned += [part.is_learned] * len(new)
    return np.array(ids, np.int32), np.array(learned, np.int32)


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise ValueError when the tokenizer lacks a marker."""
    missing = [p.text for p in (OPEN, CLOSE, SEP, END) if p.text not in tokenizer.specials]
    if missing:
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has no control token {', '.join(missing)}: "
            'conversations need Kimi K3\'s tiktoken.model, "bytes", or one that has them all'
        )


class _Before(NamedTuple):
    is_thinking: bool
    parts: list[Part]


def _options(given: dict, default_thinking: bool) -> tuple[_Before, list[Part]]:
    """What stands before the first message, and what stands before the last answer."""
    is_thinking = given.get("thinking", default_thinking)
    if not isinstance(is_thinking, bool):
        raise ValueError(f"thinking={is_thinking!r} must be true or false")
    before = _declared(TOOLS, given["tools"]) if given.get("tools") else []
    effort = given.get("thinking_effort", EFFORTS[-1] if is_thinking else None)
    if effort is not None:
        check_choice("thinking_effort", effort, EFFORTS)
        if not is_thinking:
            raise ValueError(f"thinking_effort={effort!r} needs thinking, which is false")
        before = [*before, *_system("thinking-effort", EFFORT.format(effort))]
    options = []
    choice = given.get("tool_choice") or "auto"
    check_choice("tool_choice", choice, ("auto", *TOOL_CHOICE))
    if choice != "auto":
        options += _system("tool-choice", TOOL_CHOICE[choice])
    asked = given.get("response_format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, dict) else asked
    check_choice("response_format.type", kind, ("text", "json_object", "json_schema"))
    if kind != "text":
        body = RESPONSE_FORMAT.format(kind)
        if kind == "json_schema":
            try:
                body += SCHEMA.format(_compact(asked["json_schema"]["schema"]))
            except (KeyError, TypeError):
                raise ValueError("response_format has no json_schema.schema") from None
        options += _system("response-format", body)
    return _Before(is_thinking, before), options


def _messages(given) -> list[dict]:
    """The messages, each with a known role and known keys, their tool calls as `_calls`."""
    if not isinstance(given, dict):
        raise ValueError(f"a JSON {type(given).__name__}, not an object with messages")
    for key in given.keys() - KEYS:
        # Other keys are the data set's own affair, unless it is a slip of the pen.
        if close := difflib.get_close_matches(key, KEYS, n=1, cutoff=0.9):
            raise ValueError(f'unknown key {key!r}; did you mean "{close[0]}"?')
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is missing: a list of at least one message")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{i}] is {type(message).__name__}, not an object")
        check_choice(f"messages[{i}].role", message.get("role"), tuple(MESSAGE_KEYS))
        known = MESSAGE_KEYS[message["role"]]
        for key in message:
            if key not in ("role", *known):
                raise ValueError(
                    f"messages[{i}]: unknown key {key!r} in a message of role "
                    f"{message['role']!r}{nearest(key, known)} (known: {', '.join(known)})"
                )
        try:
            _string(message, "tool_call_id")
            checked.append(message | {"tool_calls": _calls(message)})
        except ValueError as error:
            raise ValueError(f"messages[{i}]: {error}") from None
    return checked


def _rendered(messages: list[dict], is_thinking: bool) -> list[list[Part]]:
    """The parts of each message, results of tools in the order of their calls."""
    rendered, calls, n_results = [], [], 0
    for i, message in enumerate(_in_order_of_calls(messages)):
        try:
            if message["role"] == "assistant":
                calls, n_results = message["tool_calls"], 0
                rendered.append(_assistant(message, is_thinking))
            elif message["role"] == "tool":
                n_results += 1
                rendered.append(_result(message, calls, n_results))
            elif message.get("tools"):
                if message.get("content"):
                    raise ValueError("a system message has content or tools, not both")
                rendered.append(_declared(MORE_TOOLS, message["tools"]))
            else:
                names = _named(message)
                rendered.append(_message(_content(message), role=message["role"], **names))
        except ValueError as error:
            raise ValueError(f"messages[{i}]: {error}") from None
    return rendered


def _in_order_of_calls(messages: list[dict]) -> list[dict]:
    """Each run of tool messages sorted by the call that `tool_call_id` names, and named after it;
    a run that has a message without such a call stays as it is."""
    out, calls = [], {}
    for role, run in itertools.groupby(messages, key=lambda message: message["role"]):
        run = list(run)
        if role == "assistant":
            made = reversed(list(enumerate(run[-1]["tool_calls"])))  # of equal ids the first counts
            calls = {call["id"]: (i, call["name"]) for i, call in made if call["id"] is not None}
        elif role == "tool" and all(m.get("tool_call_id") in calls for m in run):
            run.sort(key=lambda m: calls[m["tool_call_id"]][0])
            run = [m | {"name": calls[m["tool_call_id"]][1]} for m in run]
        out += run
    return out


def _assistant(message: dict, is_thinking: bool) -> list[Part]:
    """The three channels; all but the opening, which the model is given, is learned."""
    calls, content = message["tool_calls"], message.get("content")
    thought = _string(message, "reasoning_content") or ""
    written = []
    if is_thinking:
        # Blank thoughts are none, as in the released encoder.
        written += [*_text(thought if thought.strip() else ""), *_close("think")]
        written += _open("response")
    # Calls may stand alone; their message then has an empty response channel.
    written += [*([] if calls and content is None else _content(message)), *_close("response")]
    written = _learned(written)
    if calls:
        written += _learned(_open("tools"))
        for index, call in enumerate(calls, 1):
            written += _call(call, index)
        written += _learned(_close("tools"))
    end = _learned([*_close("message"), END])
    return [*_answer_opening(_named(message), is_thinking), *written, *end]


def _answer_opening(names: dict, is_thinking: bool) -> list[Part]:
    channel = "think" if is_thinking else "response"
    return [*_open("message", role="assistant", **names), *_open(channel)]


def _calls(message: dict) -> list[dict]:
    """[{"id", "name", "arguments"}, ...]; arguments are a dict, or text that is not JSON."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {type(calls).__name__}, not a list")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls[{i}] has no function.name")
        arguments = _arguments(function.get("arguments"), f"tool_calls[{i}].function.arguments")
        id = _string(call, "id")
        found.append({"id": id, "name": function["name"], "arguments": arguments})
    return found


def _arguments(given, where: str) -> dict | str:
    """`given` is an object, the text of one, or nothing."""
    parsed = {} if given is None else given
    if isinstance(given, str):
        try:
            parsed = json.loads(given) if given.strip() else {}
        except json.JSONDecodeError:
            return given
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _call(call: dict, index: int) -> list[Part]:
    parts = _learned(_open("call", tool=call["name"], index=str(index)))
    if isinstance(call["arguments"], str):
        # Such a call can only be something to look back on: nobody shall learn to write it.
        parts += [*_open("json", type="object"), *_text(call["arguments"]), *_close("json")]
    else:
        for key, value in call["arguments"].items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts += _learned(_open("argument", key=key, type=_type(value)))
            parts += _learned([*_text(text), *_close("argument")])
    return parts + _learned(_close("call"))


def _type(value) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object"}
    return "null" if value is None else names.get(type(value), "array")


def _result(message: dict, calls: list[dict], index: int) -> list[Part]:
    """The `index`-th result since the assistant's message."""
    name = _string(message, "name")
    name = name or (calls[index - 1]["name"] if index <= len(calls) else None)
    if not name:
        raise ValueError("no tool call before it and no name: which tool's result is it?")
    return _message(_content(message), role="tool", tool=name, index=str(index))


def _declared(heading: str, tools) -> list[Part]:
    if not isinstance(tools, list):
        raise ValueError(f"tools is {type(tools).__name__}, not a list")
    return _system("tool-declare", heading.format(_compact(tools)))


def _system(kind: str, body: str) -> list[Part]:
    return _message(_text(body), role="system", type=kind)


def _message(body: list[Part], **attributes: str) -> list[Part]:
    return [*_open("message", **attributes), *body, *_close("message"), END]


def _named(message: dict) -> dict[str, str]:
    name = _string(message, "name")
    return {"name": name} if name else {}


def _string(row: dict, key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is {type(value).__name__}, not a string")
    return value


def _content(message: dict) -> list[Part]:
    """A string, or a list of {"type": "text", "text": ...}."""
    content = message.get("content")
    if content is None:
        raise ValueError("content is missing: a string, or a list of text parts")
    if isinstance(content, str):
        return _text(content)
    if not isinstance(content, list):
        raise ValueError(f"content is {type(content).__name__}, not a string or a list")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content[{i}] is of type {kind!r}; only text can be rendered")
        parts += _text(part["text"])
    return parts


def _open(tag: str, **attributes: str) -> list[Part]:
    parts = [OPEN, Part(tag)]
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        parts += [Part(f" {key}"), Part('="'), *_text(escaped), Part('"')]
    return [*parts, SEP]


def _close(tag: str) -> list[Part]:
    return [CLOSE, Part(tag), SEP]


def _text(text: str) -> list[Part]:
    return [Part(text)] if text else []


def _learned(parts: list[Part]) -> list[Part]:
    return [part._replace(is_learned=True) for part in parts]


def _compact(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
