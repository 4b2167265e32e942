"""Frozen dataclasses from nested mappings and back, with refusals that name the key."""

import dataclasses
import difflib
import typing


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError when `value` is not one of `allowed`, with the nearest."""
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r} is not one of {', '.join(allowed)}{nearest(value, allowed)}"
        )


def nearest(word: str, known) -> str:
    """'; did you mean "x"?' when a known word is close, else nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def from_dict(cls, values, where: str = "config"):
    """Build the frozen dataclass `cls` from a mapping, nested sections included.

    A field that holds a tuple of sections takes a mapping of names to sections, each of which
    gets its key as `name`. Raises ValueError naming an unknown or missing key.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = dict(values)
    for key in values:
        if key not in fields:
            raise ValueError(f"unknown key {where}.{key}{nearest(key, fields)}")
    built = {}
    for name, f in fields.items():
        if name not in values:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where}.{name} is missing")
            continue
        built[name] = _convert(f.type, values[name], f"{where}.{name}")
    try:
        return cls(**built)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def _convert(kind, value, where):
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where)
    if typing.get_origin(kind) is tuple:
        (item,) = (a for a in typing.get_args(kind) if a is not ...)
        if dataclasses.is_dataclass(item):
            return tuple(
                from_dict(item, {"name": k, **dict(v)}, f"{where}.{k}") for k, v in value.items()
            )
        return tuple(_convert(item, v, where) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{where}={value!r} is a {type(value).__name__}; it must be a {kind.__name__}"
        )
    return value


def to_dict(config) -> dict:
    """The mapping that `from_dict` reads back, made of JSON types."""
    out = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif any(dataclasses.is_dataclass(item) for item in typing.get_args(f.type)):
            value = {v.name: {k: x for k, x in to_dict(v).items() if k != "name"} for v in value}
        elif isinstance(value, tuple):
            value = list(value)
        out[f.name] = value
    return out
