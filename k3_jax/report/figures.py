"""Figures as SVG that takes its colours and its fonts from the page it stands in."""

import io
import re
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from k3_jax.report.record import Column

# Drawn in colours that stand for the page's CSS variables: light, dark and paper differ.
PAPER, INK, LINE, BAD = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050505", "#060606")
VARIABLES = {PAPER: "paper", INK: "ink", LINE: "line", BAD: "bad"} | dict(
    zip(SERIES, ("first", "second"), strict=True)
)
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "k3_jax",  # the same record makes the same page
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.4,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "none",
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),
}
WIDTH = 5.6  # inches; a phone shows it at 0.85 of that
POINTS = 800  # of a curve; more are thinned
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Curve(NamedTuple):
    """A column of numbers in a panel. look: "line", "smooth" (a running mean over the faint
    points), "dots" (marks joined by a line) or "stairs"."""

    label: str
    column: Column
    look: str = "line"


class Panel(NamedTuple):
    """Curves over steps. label: of the vertical axis, with the unit. scale: "log", "zero" (the axis
    begins there) or "". limit: a labelled line."""

    label: str
    curves: list[Curve]
    scale: str = ""
    limit: tuple[str, float] | None = None


class Map(NamedTuple):
    """Rows over steps: values [n, rows]. label: of the rows. bar: of the colours, with the unit.
    centre: the value in the middle of two colours; log: colours by orders of magnitude."""

    title: str
    label: str
    bar: str
    column: Column
    centre: float | None = None
    log: bool = False
    names: list | None = None


def curves(panels: list[Panel], stages) -> tuple[str, str]:
    """Panels above each other with one axis of steps; and, in words, what is not in the frames."""
    with matplotlib.rc_context(STYLE):
        fig, axes = _stacked(len(panels), 1.6)
        notes = []
        for ax, panel in zip(axes, panels, strict=True):
            for curve in panel.curves:
                _draw(ax, curve)
            notes += _frame(ax, panel)
            if panel.limit:
                ax.axhline(panel.limit[1], color=INK, lw=0.8, ls="--", label=panel.limit[0])
            ax.set_ylabel(panel.label)
            if len(panel.curves) > 1 or panel.limit:
                ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.1)
        _borders(axes, stages)
        place = dict(transform=axes[0].get_xaxis_transform(), rotation=90, in_layout=False)
        ground = dict(facecolor=PAPER, edgecolor="none", pad=0.5)
        for step, name in stages:
            axes[0].text(step, 0.97, name, size=7, va="top", bbox=ground, **place)
        axes[-1].set_xlabel("step")
        _whole(axes[-1].xaxis)
        return _svg(fig), " ".join(notes)


def maps(drawn: list[Map], stages) -> str:
    """Maps above each other with one axis of steps."""
    with matplotlib.rc_context(STYLE):
        fig, axes = _stacked(len(drawn), 1.9)
        for ax, m in zip(axes, drawn, strict=True):
            steps, values = m.column
            rows = np.arange(values.shape[1] + 1) - 0.5
            _coloured(fig, ax, _edges(steps), rows, values.T, _norm(m), m.bar)
            ax.set_ylabel(m.label)
            ax.set_title(m.title, fontsize=9, loc="left")
            _whole(ax.yaxis, m.names)
        _borders(axes, stages)
        axes[-1].set_xlabel("step")
        _whole(axes[-1].xaxis)
        return _svg(fig)


def shares(titles: list[str], parts: list[np.ndarray], rows: str, columns: str, bar: str) -> str:
    """Matrices [rows, columns] of shares in 0 .. 1 beside each other; NaN stays empty."""
    n_rows = len(parts[0])
    high = np.nanquantile(np.concatenate([part.ravel() for part in parts]), 0.98)
    norm = Normalize(0, high if high > 0 else 1)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, min(1.2 + 0.22 * n_rows, 6.5)), layout="constrained")
        axes = fig.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        for ax, title, part in zip(axes, titles, parts, strict=True):
            y, x = (np.arange(n + 1) - 0.5 for n in part.shape)
            is_last = ax is axes[-1]
            _coloured(fig, ax, x, y, part, norm, bar if is_last else None)
            ax.set_title(title, fontsize=9, loc="left")
            ax.set_xlabel(columns)
            _whole(ax.xaxis)
            _whole(ax.yaxis)
            if part.size <= 120:
                for (i, j), value in np.ndenumerate(part):
                    if np.isfinite(value):
                        color = "white" if value < 0.6 * norm.vmax else "black"
                        ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, size=7)
        axes[0].set_ylabel(rows)
        return _svg(fig)


def spectrum(panels: list[tuple[str, np.ndarray, bool]], names: list) -> str:
    """For each panel (label, quantiles [rows, 5], whether the axis is logarithmic) a bar for each
    row: from the outer quantiles, thick between the inner ones, with a dot at the middle one."""
    with matplotlib.rc_context(STYLE):
        fig, axes = _stacked(len(panels), 1.9)
        for ax, (label, of, is_log) in zip(axes, panels, strict=True):
            x = np.arange(len(of))
            thick = min(9, 160 / len(of))
            ax.vlines(x, of[:, 0], of[:, 4], color=SERIES[0], lw=thick / 4)
            ax.vlines(x, of[:, 1], of[:, 3], color=SERIES[0], lw=thick, alpha=0.45)
            ax.plot(x, of[:, 2], "o", color=SERIES[1], ms=min(4, thick))
            ax.set_ylabel(label)
            if is_log:
                _logarithmic(ax)
        _whole(axes[-1].xaxis, names)
        axes[-1].set_xlabel("layer")
        return _svg(fig)


def bars(values: dict[str, float], label: str, told: list[str]) -> str:
    """A bar for each name, with what is told of it at its end."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 0.7 + 0.3 * len(values)), layout="constrained")
        ax = fig.subplots()
        ax.grid(axis="y", visible=False)
        drawn = ax.barh(list(values), list(values.values()), color=SERIES[0], height=0.6)
        ax.bar_label(drawn, told, padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.25)
        ax.set_xlabel(label)
        return _svg(fig)


def _stacked(n: int, height: float):
    """A figure of n axes above each other, each some inches high, with one horizontal axis."""
    fig = Figure(figsize=(WIDTH, 0.5 + height * n), layout="constrained")
    axes = fig.subplots(n, squeeze=False, sharex=True)[:, 0]
    return fig, axes


def _draw(ax, curve: Curve) -> None:
    steps, values = thinned(*curve.column)
    if curve.look == "stairs":
        ax.step(steps, values, where="post", label=curve.label)
    elif curve.look == "dots":
        is_there = np.isfinite(values)
        size = 3 if is_there.sum() <= 60 else 0
        ax.plot(steps[is_there], values[is_there], "o-", ms=size, label=curve.label)
    elif curve.look == "smooth" and np.isfinite(values).sum() >= 40:
        (faint,) = ax.plot(steps, values, lw=0.7, alpha=0.4)
        at, mean = thinned(curve.column.steps, running_mean(curve.column.values))
        ax.plot(at, mean, color=faint.get_color(), label=curve.label)
    else:
        alone = "o" if np.isfinite(values).sum() == 1 else None
        ax.plot(steps, values, lw=1, marker=alone, label=curve.label)
    bad = steps[np.isnan(values)]
    place = ax.get_xaxis_transform()
    ax.plot(bad, np.full(len(bad), 0.03), "x", color=BAD, ms=4, transform=place, in_layout=False)


def _frame(ax, panel: Panel) -> list[str]:
    """Choose what is seen: all of it, or, of many points, all but the highest one in fifty."""
    values = np.concatenate([curve.column.values for curve in panel.curves])
    n_bad, values = np.isnan(values).sum(), values[np.isfinite(values)]
    name = panel.label.split(",")[0]
    notes = [f"Crosses, where {name} was not finite: {n_bad:,}."] if n_bad else []
    if panel.scale == "log" and (values > 0).any():
        _logarithmic(ax)
        return notes
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    low, top = 0 if panel.scale == "zero" else values.min(), values.max()
    high = np.quantile(values, 0.98, method="lower") if len(values) >= 20 else top
    if low < high and top > high + 0.5 * (high - low):
        room = 0.08 * (high - low)
        ax.set_ylim(low - room, high + room)
        n = (values > high + room).sum()
        notes.append(f"Points of {name} above the frame: {n:,}, up to {brief(top)}.")
    elif panel.scale == "zero":
        top = 1.08 * top if top > 0 else 1
        ax.set_ylim(-0.03 * top, top)
    return notes


def brief(number: float) -> str:
    """A number in as many digits as a reader wants."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _plain(value, _=None) -> str:
    return f"{value:,.10g}"


def _orders() -> LogLocator:
    """1, 2 and 5 of each order of magnitude, where there is room."""
    return LogLocator(subs=(1, 2, 5))


def _logarithmic(ax) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(_orders())
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.minorticks_off()


def thinned(steps, values):
    """At most POINTS of a curve, the lowest and the highest of every stretch among them; where a
    stretch has a value that is not finite, one such."""
    n = len(steps)
    if n <= POINTS:
        return steps, values
    cuts = np.linspace(0, n, POINTS // 3 + 1).astype(int)
    kept = set()
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        part = values[start:end]
        kept |= {start + np.argmin(np.where(np.isnan(part), np.inf, part))}
        kept |= {start + np.argmax(np.where(np.isnan(part), -np.inf, part))}
        kept |= {start + np.argmax(np.isnan(part))} if np.isnan(part).any() else set()
    kept = np.array(sorted(kept))
    return steps[kept], values[kept]


def running_mean(values):
    """The mean of the finite values among the n/40 around each one."""
    n, is_there = len(values), np.isfinite(values)
    sums = np.concatenate([[0], np.cumsum(np.where(is_there, values, 0))])
    counts = np.concatenate([[0], np.cumsum(is_there)])
    half, at = max(n // 80, 1), np.arange(n)
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, n)
    n_there = counts[end] - counts[start]
    return np.where(is_there, (sums[end] - sums[start]) / np.maximum(n_there, 1), np.nan)


def _coloured(fig, ax, x, y, values, norm, bar: str | None) -> None:
    """Cells as a picture, which is small however many they are, and their colours' key."""
    ax.grid(False)
    cmap = "RdBu_r" if isinstance(norm, TwoSlopeNorm) else "viridis"
    masked = np.ma.masked_invalid(values)
    cells = ax.pcolormesh(x, y, masked, norm=norm, cmap=cmap, rasterized=True)
    if bar:
        ticks = _orders() if isinstance(norm, LogNorm) else None
        shape = dict(pad=0.02, fraction=0.06, aspect=12)
        form = FuncFormatter(_plain)
        key = fig.colorbar(cells, ax=ax, label=bar, ticks=ticks, format=form, **shape)
        key.minorticks_off()
        key.solids.set_rasterized(True)
        key.outline.set_visible(False)


def _norm(m: Map):
    """From the lowest to the highest value, without the few highest of a map."""
    values = m.column.values[np.isfinite(m.column.values)]
    if m.log:
        values = values[values > 0] if (values > 0).any() else np.ones(1)
        low, high = np.quantile(values, (0.005, 0.995))
        return LogNorm(low, max(high, 1.01 * low))
    if m.centre is not None:
        return TwoSlopeNorm(m.centre, 0, max(2 * m.centre, np.quantile(values, 0.995)))
    low, high = values.min(), np.quantile(values, 0.995)
    return Normalize(low, high if high > low else low + 1)


def _edges(steps):
    """Where each column of a map begins and ends: half way to its neighbours."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[:-1] + steps[1:]) / 2
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])


def _whole(axis, names=None) -> None:
    """Ticks at whole numbers; with names, the name of each."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    if names is not None:
        if len(names) <= 12:
            axis.set_major_locator(FixedLocator(range(len(names))))
        axis.set_major_formatter(
            FuncFormatter(lambda i, _: f"{names[int(i)]}" if 0 <= i < len(names) else "")
        )


def _borders(axes, stages) -> None:
    """A dotted line where a stage follows another."""
    axes[0].set_xlim(axes[0].get_xlim())
    for ax in axes:
        for step, _ in stages[1:]:
            ax.axvline(step, color=INK, lw=0.7, ls=":")


def _svg(fig) -> str:
    text = io.StringIO()
    fig.savefig(text, format="svg", dpi=150, metadata=NO_METADATA)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    # The page has several figures, each of which numbers its parts from one.
    return re.sub(r'(\bid="|url\(#|href="#)', r"\1FIGURE-", svg)
