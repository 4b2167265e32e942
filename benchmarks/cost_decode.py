"""KDA decode at K3's sizes, 12 heads a device: bytes against reading and writing the states once.

Bytes: the kernel as it is, compiled at full size. Cycles: the profiler cannot follow block numbers
and branches that depend on data, so that the kernel's source is edited to what holds when every row
is active and keeps all its tokens; two sizes in whole blocks of 8 rows are extrapolated, and one
row is two rows less the slope from two to four. The cores of a v5p share the heads: those of one
core are profiled alone. Operands come in the layout that XLA gives them inside a layer. The plan of
the rows, a few operations on B integers which leave the loop over layers, is not counted.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.tpucost import CHIPS, NoFigure, answer, ask, figures, line_through, tpu_cost
from pallas_kernels.kda import decode

F32, BF16 = jnp.float32, jnp.bfloat16
H, D, W = 12, 128, 4
ROWS, TOKENS = (1, 8, 64, 256), (1, 4, 8)
PROFILED = (2, 4, 8, 16, 24)

EDITS = (
    ("keep = a.plan[here + r]", "keep = t"),
    ("plan[first + g * rows + r], j, 0, 0", "g * rows + r, j, 0, 0"),
    ("@pl.when((g == 0) & (r == 0) & (a.plan[3 * n_slots] == 1))", "@pl.when(False)"),
    ("(layer[0], 0, j, g, 0)", "(0, 0, j, g, 0)"),
    ("(layer[0], g * rows", "(0, g * rows"),
    ("rows, heads = sizes.rows, heads_per_step(sizes, vmem, cores)", "rows, heads = sizes.rows, H"),
)


def rows(chips):
    """One row for each chip, number of tokens and number of rows."""
    for chip in chips:
        for t in TOKENS:
            labels = {"chip": chip, "tokens": t}
            try:
                full, cycles = (
                    {int(B): found for B, found in _ask(chip, t, what).items()}
                    for what in ("bytes", "cycles")
                )
            except NoFigure as error:
                yield labels | {"note": str(error)}
                continue
            for B in ROWS:
                states = 2 * B * H * D * D * 4
                found = figures(chip, cycles_of(cycles, B), full[B]["bytes"], states)
                ratio = full[B]["bytes"] / states
                found |= {"bytes_over_floor": ratio, "compile_s": full[B]["compile_s"]}
                yield labels | {"rows": B} | found


def _ask(chip, t, what):
    profile = what == "cycles"
    return ask("benchmarks.cost_decode", profile=profile, chip=chip, t=t, what=what)


def cycles_of(cycles, B):
    """Cycles of B rows from those of 2, 4, 8, 16 and 24."""
    if B == 1:
        return line_through(2, cycles[2], 4, cycles[4], 1)
    # The first block of 8 rows also waits for its states.
    return cycles[8] + (B - 8) * (cycles[24] - cycles[16]) / 8


def cost(chip, t, what):
    """In a process of its own: bytes and compile seconds, or cycles, by the number of rows."""
    if what == "cycles":
        kernel, heads = static_kernel(), H // CHIPS[chip].cores
        return {B: _compiled(kernel, chip, B, t, heads)[0].cycles for B in PROFILED}
    found = {}
    for B in ROWS:
        op, seconds = _compiled(decode.kda_decode, chip, B, t, H)
        found[B] = {"bytes": op.bytes, "compile_s": seconds}
    return found


def static_kernel():
    """kda_decode with EDITS. Raises ValueError where its source has changed too much for one."""
    text = Path(decode.__file__).read_text(encoding="utf-8")
    for old, new in EDITS:
        if text.count(old) != 1:
            raise ValueError(
                f"{decode.__file__} has {old!r} {text.count(old)} times; once expected"
            )
        text = text.replace(old, new)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        spec = importlib.util.spec_from_file_location("static_decode", file.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules["static_decode"] = module
        spec.loader.exec_module(module)
    return module.kda_decode


def _compiled(kernel, chip, B, t, heads):
    """The kernel's Op, and compile seconds. Rows stand second to last, as XLA lays them out."""
    shape = jax.ShapeDtypeStruct
    token, past = shape((t, heads, B, D), BF16), shape((W - 1, heads, B, D), BF16)
    taps = shape((heads, W, D), F32)
    shapes = (
        *(token,) * 4,
        *(shape((t, B, heads), BF16), token),
        *(taps,) * 3,
        *(shape((heads,), F32), shape((heads, D), F32), shape((D,), F32)),
        *(shape((B, heads, D, D), F32), past, past, past),
        shape((B,), jnp.bool_),
    )

    def inside_a_layer(*operands):
        q, k, v, logit, beta, gate, *rest = operands
        taps, others, pasts, active = rest[:3], rest[3:7], rest[7:10], rest[10]
        y, state, *pasts = kernel(
            *(x.transpose(2, 0, 1, 3) for x in (q, k, v, logit)),
            *(beta.swapaxes(0, 1), gate.transpose(2, 0, 1, 3)),
            *(x.swapaxes(0, 1) for x in taps),
            *others,
            *(x.transpose(2, 0, 1, 3) for x in pasts),
            active,
            lower_bound=-5.0,
            eps=1e-5,
        )
        return y.transpose(1, 2, 0, 3), state, *(x.transpose(1, 2, 0, 3) for x in pasts)

    r = tpu_cost(inside_a_layer, shapes, chip, donate_argnums=(12, 13, 14, 15))
    return next(op for op in r["ops"] if op.opcode == "custom-call"), r["compile_s"]


if __name__ == "__main__":
    answer(cost)
