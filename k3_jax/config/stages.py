"""A run as a list of stages, each of which looks like a run without stages."""

import dataclasses
import re
import typing

if typing.TYPE_CHECKING:
    from k3_jax.config.run import SourceConfig, StageConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """The steps `first` to `last` of a run, counted from 1, and what they are made with.

    `config` is the run's, with rows, micro-batches and sources of this stage, `steps` of the whole
    run, and no stages. `name` is empty where a run has none.
    """

    name: str
    first: int
    last: int
    rates: tuple[float, ...]
    config: "TrainConfig"

    def steps_after(self, done: int) -> range:
        """Its steps that come after the first `done` steps of the run."""
        return range(max(self.first, done + 1), self.last + 1)


def planned(c: "TrainConfig") -> tuple[Stage, ...]:
    """All stages of a run in their order: one where it names none. Raises ValueError by stage."""
    if not c.stages:
        return (Stage("", 1, c.steps, (), c),)
    by_place = {_place(s.name): s for s in c.stages}
    if sorted(by_place) != list(range(1, len(c.stages) + 1)):
        raise ValueError(
            f"stages={[s.name for s in c.stages]}: a name begins with its place, as s1_short and "
            "s2_long do, because the sections of a configuration have no order"
        )
    ordered = [by_place[i] for i in sorted(by_place)]
    n_steps = [-(-s.tokens // (s.batch * s.seq_len)) for s in ordered]
    sources = _cut_alike([_sources(s, c.data.sources) for s in ordered])
    stages, done = [], 0
    for s, n, mixed in zip(ordered, n_steps, sources, strict=True):
        try:
            config = dataclasses.replace(
                c,
                data=dataclasses.replace(c.data, seq_len=s.seq_len, batch=s.batch, sources=mixed),
                steps=sum(n_steps),
                accumulate=s.accumulate,
                stages=(),
                stage="",
            )
        except ValueError as e:
            raise ValueError(f"stages.{s.name}: {e}") from None
        stages.append(Stage(s.name, done + 1, done + n, s.rates, config))
        done += n
    return tuple(stages)


def current(c: "TrainConfig") -> tuple[Stage, ...]:
    """The stages that are to be trained now: all, or the one that `c.stage` names."""
    return tuple(s for s in planned(c) if c.stage in ("", s.name))


def _place(name: str) -> int:
    """2 of s2_long; 0 of a name that says no place."""
    found = re.fullmatch(r"s(\d+)(_\w+)?", name)
    return int(found[1]) if found else 0


def _sources(s: "StageConfig", known: tuple["SourceConfig", ...]) -> tuple["SourceConfig", ...]:
    """Those of the run as the stage mixes and cuts them."""
    if s.mixture:
        weights = {share.name: share.weight for share in s.mixture}
        known = tuple(
            dataclasses.replace(x, weight=weights[x.name]) for x in known if x.name in weights
        )
    return tuple(dataclasses.replace(x, lengths=s.lengths or x.lengths) for x in known)


def _cut_alike(mixtures: list[tuple["SourceConfig", ...]]) -> list[tuple["SourceConfig", ...]]:
    """Every stage cuts a source at the lengths at which any stage does, the times drawn unchanged:
    so that the documents between two lengths are the same list in all stages."""
    entries: dict[str, dict] = {}
    for source in (s for sources in mixtures for s in sources):
        known = entries.setdefault(source.name, {})
        for entry in source.lengths:
            known.setdefault(entry.min_bytes, entry)

    def cut(source):
        times, here, lengths = 1.0, {x.min_bytes: x.times for x in source.lengths}, []
        for n, entry in sorted(entries[source.name].items()):
            times = here.get(n, times)
            lengths.append(dataclasses.replace(entry, times=times))
        return dataclasses.replace(source, lengths=tuple(lengths))

    return [tuple(map(cut, sources)) for sources in mixtures]
