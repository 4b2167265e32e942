"""What a run left behind, as columns: `metrics.jsonl`; and what it was: `run.json`."""

import dataclasses
import json
from typing import NamedTuple

import numpy as np
from etils import epath

from k3_jax.checkpoint.zarr import replace_text

KEPT_LISTS = 256  # lines of a key whose values are lists: a map is no wider than that


class Column(NamedTuple):
    """The values [n, ...] of one key and the n steps they are of; NaN for what was not finite."""

    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Record:
    """A run.

    columns: by the keys of `metrics.jsonl`; those with lists have at most KEPT_LISTS + 1 entries,
    evenly spaced, the last among them. stages: (first step, name), in order. about: `run.json`, or
    {}. n_unread: lines that are not of a step, such as the half line of a run that was killed.
    """

    name: str
    columns: dict[str, Column]
    stages: list[tuple[int, str]]
    about: dict
    n_unread: int

    def column(self, key: str) -> Column | None:
        """None where no line has a finite number of this key."""
        found = self.columns.get(key)
        return found if found is not None and np.isfinite(found.values).any() else None

    def last(self, key: str):
        """The newest finite number of a key; None where there is none."""
        found = self.column(key)
        return None if found is None else found.values[np.isfinite(found.values)][-1]

    @property
    def last_step(self) -> int:
        return int(max(column.steps[-1] for column in self.columns.values()))

    def config(self, key: str, default=None):
        """A value of the run's configuration by its dotted key, such as "model.n_layers"."""
        found = self.about.get("config")
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return default if found is None else found


def describe(directory, n_params: int, devices: str, config: dict) -> None:
    """Write `run.json`. It is called so because a folder with a `config.json` is taken for one in
    the released format."""
    about = {"parameters": n_params, "devices": devices, "config": config}
    replace_text(epath.Path(directory) / "run.json", json.dumps(about, indent=1) + "\n")


def read(directory) -> Record:
    """The record of a run's folder, local or remote. Raises OSError or ValueError in words."""
    directory = epath.Path(directory)
    path = directory / "metrics.jsonl"
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no folder; give the --workdir of a run")
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; give the --workdir of a run of train.py")
    columns: dict[str, _Numbers | _Lists] = {}
    stages, n_unread = [], 0
    with path.open("rb") as lines:
        for line in lines:
            values = _parsed(line)
            if values is None:
                n_unread += bool(line.strip())
                continue
            step = values.pop("step")
            stage = values.pop("stage", None)
            if isinstance(stage, str) and (not stages or stages[-1][1] != stage):
                stages.append((step, stage))
            for key, value in values.items():
                _add(columns, key, step, value)
    finished = {key: column.finished() for key, column in columns.items()}
    finished = {key: column for key, column in finished.items() if len(column.steps)}
    if not finished:
        told = f"none of its {n_unread} lines is of a step" if n_unread else "it is empty"
        raise ValueError(f"nothing to draw in {path}: {told}; was a step logged yet (log_every)?")
    return Record(_name(directory), finished, stages, _about(directory / "run.json"), n_unread)


def _name(directory) -> str:
    """The folder's own name, also where it was given as "." or with a slash at its end."""
    return directory.name or directory.resolve().name or str(directory)


def _parsed(line: bytes) -> dict | None:
    """A line's keys and values; None unless it is a whole line of a step."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    is_step = isinstance(values, dict) and type(values.get("step")) is int
    return values if is_step else None


def _about(path) -> dict:
    """`run.json`; {} where an older run has none or something else is written there."""
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


class _Numbers:
    """A column of single numbers, all of them."""

    def __init__(self):
        self.steps, self.values = [], []

    def add(self, step, value):
        self.steps.append(step)
        self.values.append(value)

    def finished(self) -> Column:
        values = np.array(self.values, float)
        return Column(np.array(self.steps, int), np.where(np.isfinite(values), values, np.nan))


class _Lists:
    """A column of lists: every k-th line, k doubling when there are too many, and the last one."""

    def __init__(self):
        self.every, self.n, self.kept, self.last = 1, 0, [], None

    def add(self, step, value):
        self.last = step, value
        if self.n % self.every == 0:
            # Python's own numbers would take eight times the memory.
            self.kept.append((step, _array(value)))
            if len(self.kept) > KEPT_LISTS:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.n += 1

    def finished(self) -> Column:
        step, value = self.last
        if self.kept[-1][0] != step:
            self.kept.append((step, _array(value)))
        kept = [(step, x) for step, x in self.kept if x is not None]
        # Where shapes differ the run changed; what it is now is what counts.
        kept = [(step, x) for step, x in kept if x.shape == kept[-1][1].shape]
        return Column(np.array([step for step, _ in kept], int), np.array([x for _, x in kept]))


def _array(value) -> np.ndarray | None:
    """A list, or lists of one length, of numbers and nulls, which are NaN; None for other things"""
    try:
        found = np.array(value, np.float32)
    except (ValueError, TypeError):
        return None
    return np.where(np.isfinite(found), found, np.nan)


def _add(columns, key, step, value):
    """One value to its column. A null is a number that was not finite, but says nothing where the
    key's other values are lists; words are not drawn."""
    if isinstance(value, list):
        if not isinstance(columns.get(key), _Lists):
            columns[key] = _Lists()
        columns[key].add(step, value)
    elif value is None or type(value) in (int, float):
        column = columns.setdefault(key, _Numbers())
        if isinstance(column, _Numbers):
            column.add(step, np.nan if value is None else value)
