"""The table of parameters and their rules."""

import math
from typing import NamedTuple

from k3_jax.config import OptimConfig
from k3_jax.optim import decays
from k3_jax.optim.muon import Rule, axes, rule


class Row(NamedTuple):
    """All parameters of one name: how many arrays, numbers and matrices (0 for AdamW), and which
    sizes of matrices there are."""

    name: str
    rule: Rule
    arrays: int
    parameters: int
    matrices: int
    sizes: tuple[str, ...]


def coverage(leaves: dict, c: OptimConfig) -> list[Row]:
    """One row for each name among a model's leaves, Muon's first. Raises ValueError for a name
    without a rule."""
    by_name: dict[str, list] = {}
    for path, x in leaves.items():
        by_name.setdefault(path.rsplit("/", 1)[-1], []).append((path, x))
    rows = [_row(name, found, c) for name, found in by_name.items()]
    return sorted(rows, key=lambda row: (row.rule.optimizer != "muon", row.rule, row.name))


def _row(name: str, found: list, c: OptimConfig) -> Row:
    (of,) = {rule(path, c.name) for path, _ in found}
    sizes, matrices = {}, 0
    for path, x in found:
        if of.optimizer == "muon":
            rows, columns = (
                math.prod(x.shape[i] for i in axes(path, x.ndim, letters))
                for letters in (of.rows, of.columns)
            )
            matrices += x.size // (rows * columns)
            sizes[f"{rows} x {columns}"] = None
    n = sum(math.prod(x.shape) for _, x in found)
    return Row(name, of, len(found), n, matrices, tuple(sizes))


def lines(rows: list[Row]) -> list[str]:
    """The table for people. Muon's factor is update_rms sqrt(max(rows, columns))."""
    head = ("parameter", "update", "matrix", "decay", "arrays", "matrices", "rows x columns")
    table = [head]
    for row in rows:
        matrix = f"{row.rule.rows},{row.rule.columns}" if row.matrices else "-"
        decay = "yes" if decays(row.name) else "no"
        counts = f"{row.arrays:,}", f"{row.matrices:,}" if row.matrices else "-"
        sizes = ", ".join(row.sizes) or f"{row.parameters:,} numbers"
        table.append((row.name, row.rule.optimizer, matrix, decay, *counts, sizes))
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    out = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in table]
    n = sum(row.parameters for row in rows)
    muon = sum(row.parameters for row in rows if row.matrices)
    return [*out, f"{n:,} parameters, {muon / n:.1%} of them by Muon"]
