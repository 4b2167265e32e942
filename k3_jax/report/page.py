"""The page: one HTML file without links to anything outside it."""

import html

import numpy as np
from etils import epath

from k3_jax.checkpoint.zarr import replace_text
from k3_jax.report.record import Record, read
from k3_jax.report.sections import Part, Section, sections

CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --line: #9aa3ad; --soft: #eef1f4;
  --bad: #c2382f; --first: #1f6fb2; --second: #c8650a; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e4e8ec; --line: #66707b; --soft: #22272e;
    --bad: #ff7b6e; --first: #6db3f2; --second: #f2a65a; } }
body { margin: 0 auto; max-width: 46rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; break-after: avoid; }
h3 { font-size: 1rem; margin: 1rem 0 0.25rem; break-after: avoid; }
figure { margin: 0 0 1.5rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption, .missing { font-size: 0.9rem; }
.missing { font-style: italic; }
nav a { color: var(--first); margin-right: 1rem; display: inline-block; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.15rem 1rem 0.15rem 0;
  border-bottom: 1px solid var(--soft); overflow-wrap: anywhere; }
th { font-weight: normal; width: 45%; }
td { font-variant-numeric: tabular-nums; }
.sections { columns: 2 18rem; column-gap: 2rem; }
.sections th { width: 58%; }
.sections h3:first-child { margin-top: 0; }
@page { margin: 15mm; }
@media print { nav { display: none; } body { max-width: none; padding: 0; font-size: 10pt; }
  figure svg { max-height: 21cm; } }
"""


def write(directory, output=None) -> epath.Path:
    """Draw the run in `directory`; where the page was written. Raises OSError or ValueError."""
    record = read(directory)
    path = epath.Path(output) if output else epath.Path(directory) / "report.html"
    text = page(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    return path


def page(record: Record) -> str:
    """The whole page as text."""
    shown = [*sections(record)]
    links = [*(section.title for section in shown), "Configuration"]
    name = html.escape(record.name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{CSS}</style>
</head>
<body>
<h1>{name}</h1>
{_table(summary(record))}
<nav>{"".join(f'<a href="#{_id(title)}">{html.escape(title)}</a>' for title in links)}</nav>
{"".join(_section(section) for section in shown)}
<h2 id="{_id(links[-1])}">{links[-1]}</h2>
{_configuration(record)}
</body>
</html>
"""


def summary(record: Record) -> dict[str, str]:
    """What a reader wants first; what the record lacks is left out."""
    out = {}
    if "parameters" in record.about:
        layers, width = record.config("model.n_layers"), record.config("model.width")
        sizes = f", {layers} layers of width {width}" if layers and width else ""
        out["model"] = f"{record.about['parameters']:,} parameters{sizes}"
    if "devices" in record.about:
        out["on"] = record.about["devices"]
    out["step"] = f"{record.last_step:,}"
    steps, batch, length = (record.config(k) for k in ("steps", "data.batch", "data.seq_len"))
    if None not in (steps, batch, length) and not record.stages:  # which have their own
        out["step"] += f" of {steps:,}"
        out["tokens"] = f"{record.last_step * batch * length:,} in rows of {length:,}"
    loss = record.column("loss")
    if loss is not None:
        last = loss.values[-max(len(loss.values) // 20, 1) :]
        mean = np.mean(last[np.isfinite(last)]) if np.isfinite(last).any() else np.nan
        out["training loss"] = f"{mean:.4f} nats per token (last {len(last)} of the logged steps)"
    held_out, bits = record.last("heldout_loss"), record.last("heldout_bits_per_byte")
    if held_out is not None:
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        out["held-out loss"] = f"{held_out:.4f} nats per token{more}"
    rate = record.column("tokens_per_second")
    if rate is not None:
        out["speed"] = f"{np.nanmedian(rate.values):,.0f} tokens per second (median)"
    if record.last("skipped") is not None:
        spikes = record.last("spikes")
        more = "" if spikes is None else f", {spikes:,.0f} of them spikes"
        out["steps left out"] = f"{record.last('skipped'):,.0f}{more}"
    if record.stages:
        later = (f"{name} from step {first:,}" for first, name in record.stages[1:])
        out["stages"] = ", ".join([record.stages[0][1], *later])
    if record.n_unread:
        out["lines that could not be read"] = f"{record.n_unread:,} of metrics.jsonl"
    return out


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(section: Section) -> str:
    title = html.escape(section.title)
    parts = [_part(title, f"{_id(title)}-{i}", part) for i, part in enumerate(section.parts)]
    return f'<h2 id="{_id(section.title)}">{title}</h2>\n' + "".join(parts)


def _part(title: str, name: str, part: Part) -> str:
    caption = html.escape(part.caption)
    if part.svg is None:
        return f'<p class="missing">{caption}</p>\n'
    svg = part.svg.replace("FIGURE-", f"{name}-")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return f"<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>\n"


def _table(rows: dict[str, str]) -> str:
    cells = (
        f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _configuration(record: Record) -> str:
    config = record.about.get("config")
    if not isinstance(config, dict):
        return '<p class="missing">The run left no run.json, as runs before this report.</p>'
    inner = {key: value for key, value in config.items() if value and isinstance(value, dict)}
    outer = {key: value for key, value in config.items() if key not in inner}
    told = (
        f"<h3>{html.escape(title)}</h3>{_table(dict(flat(values)))}"
        for title, values in {"run": outer, **inner}.items()
    )
    return f'<div class="sections">{"".join(told)}</div>'


def flat(values: dict, before: str = ""):
    """(dotted key, value in words) of nested mappings, in their order."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{before}{key}.")
        elif isinstance(value, list):
            yield f"{before}{key}", ", ".join(map(str, value)) or "none"
        elif isinstance(value, float):
            yield f"{before}{key}", f"{value:.6g}"
        else:
            yield f"{before}{key}", "none" if value in ("", {}) else str(value)
