"""Modelled cost of the TPU kernels and of what surrounds them, on a machine without a TPU.

    pip install libtpu==0.0.52
    python -m benchmarks.kernels --chips v6e,tpu7x,v5p

prints one table a section and saves all rows in benchmarks/results/kernels.json after each of them,
so that a run may be stopped; what it did not reach stays as the last run left it. Sections: `kda`,
the chunked forward and backward, beside public kernels where those are installed; `mla`, attention;
`decode`; `situ`; `mxfp4` and `grouped`, the experts' matmul, packed to be served and in bfloat16 to
be trained; `layers`, whole layers and what XLA makes of them. `tpucost` says what these figures are
and how far to trust them; nothing here is measured.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

from benchmarks import (
    cost_decode,
    cost_grouped,
    cost_kda,
    cost_layers,
    cost_mla,
    cost_mxfp4,
    cost_peers,
    cost_situ,
)
from benchmarks.tpucost import check_chips, versions

RESULTS = Path(__file__).parent / "results" / "kernels.json"
SECTIONS = ("kda", "mla", "decode", "situ", "mxfp4", "grouped", "layers")


def rows_of(section, chips, peer_python):
    """The rows of a section, each as soon as it is known."""
    if section == "kda":
        yield from cost_kda.rows(chips)
        yield from cost_peers.rows(chips, peer_python)
        return
    of = {"mla": cost_mla, "decode": cost_decode, "situ": cost_situ}
    of |= {"mxfp4": cost_mxfp4, "grouped": cost_grouped, "layers": cost_layers}
    yield from of[section].rows(chips)


def run(section, chip, peer_python, results):
    """Print a chip's table of a section; rows are saved one by one."""
    start, found = time.time(), []
    entry = {"date": datetime.date.today().isoformat(), **versions(), "rows": found}
    for row in rows_of(section, [chip], peer_python):
        found.append({name: plain(value) for name, value in row.items()})
        entry["seconds"] = round(time.time() - start)
        save(results, section, chip, entry)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{section} on {chip}, {entry.get('seconds', 0)} s:\n{table(found)}\n", flush=True)


def save(path, section, chip, entry):
    """Put one section of one chip into the file, and leave the others."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved.setdefault(section, {})[chip] = entry
    part = path.with_suffix(".part")
    part.write_text(json.dumps(saved, indent=1) + "\n")
    part.replace(path)


def plain(value):
    return round(value, 3) if isinstance(value, float) else value


def table(rows: list[dict]) -> str:
    """Rows under headings; new headings where other columns come. Bytes are shown in MB.

    A note stands behind its row; lists (what takes most of a layer) are in the saved file alone.
    """
    blocks = []
    for row in rows:
        shown = {heading(n): text(n, v) for n, v in row.items() if n != "note" and not listed(v)}
        if not blocks or not shown.keys() <= blocks[-1][0].keys():
            blocks.append([{name: name for name in shown}])
        cells = [shown.get(name, "") for name in blocks[-1][0]]
        blocks[-1].append(cells + [row.get("note", "")])
    lines = []
    for names, *block in blocks:
        lines += aligned([[*names, ""], *block])
    return "\n".join(lines)


def listed(value):
    return isinstance(value, list | dict)


def heading(name):
    return name.removesuffix("_bytes") + " MB" if name.endswith("bytes") else name


def text(name, value):
    if name.endswith("bytes"):
        return f"{value / 1e6:.2f}"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def aligned(cells):
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    return [
        "  ".join([*(c.rjust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in cells
    ]


def chosen(text, known, what):
    """A comma-separated option as a list. Raises ValueError for a name that is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default="v6e,tpu7x,v5p")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PATH",
        help="a Python with jax, libtpu and the kernels to compare with (tokamax); default: this",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    options = parser.parse_args()
    try:
        chips = check_chips(options.chips.split(","))
        sections = chosen(options.sections, SECTIONS, "section")
    except ValueError as error:
        parser.error(str(error))
    print("modelled, not measured;", ", ".join(f"{k} {v}" for k, v in versions().items()))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for chip in chips:
            run(section, chip, options.peer_python, options.output)


if __name__ == "__main__":
    main()
