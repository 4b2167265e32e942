"""SiTU-GLU: the definition as XLA fuses it, our short form, and the Pallas kernel that lost.

`alone` is one pass over bfloat16 gate and up at K3's dense (33792), shared (2 x 3072) and routed
(3072, 16 experts a token) width; its floor reads 2 arrays and writes 1 forward, reads 3 and writes
2 backward. Cycles of two small sizes are extended to the full number of rows, bytes in proportion.
`ffn` is a small gated FFN around each form, 1024 x 2048 x 2048, at full size; the profiler cannot
do it on a tpu7x. The kernel has the arithmetic of the short form and exists only here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpucost import answer, ask, figures, line_through, row, tpu_cost
from pallas_kernels.situ import situ_glu

F32, BF16 = jnp.float32, jnp.bfloat16
BETA, LINEAR_BETA = 4.0, 25.0
ROWS = {33792: 8192, 6144: 8192, 3072: 8192 * 16}
ARRAYS = {"forward": 3, "backward": 5}  # read and written
FFN_ROWS, FFN_WIDTH = 1024, 2048
BLOCK_ROWS, STEP_ROWS = 256, 32


def rows(chips):
    """One row for each chip, width, direction and form; then the FFN."""
    for chip in chips:
        cases = [("alone", N, width, d) for width, N in ROWS.items() for d in ARRAYS]
        if chip != "tpu7x":
            cases += [("ffn", FFN_ROWS, FFN_WIDTH, d) for d in ("forward", "forward+backward")]
        for part, N, width, direction in cases:
            for form in FORMS:
                labels = {"chip": chip, "part": part, "rows": N, "width": width}
                labels |= {"direction": direction, "form": form}
                measure = alone if part == "alone" else ffn
                yield row(labels, functools.partial(measure, labels))


def alone(labels):
    N, width = labels["rows"], labels["width"]
    # As many rows as make one array of the larger size some 35 MB.
    small = BLOCK_ROWS * max(1, 33792 // width)
    costs = _ask_both(labels, (small, 2 * small))
    cycles = line_through(small, costs[0]["cycles"], 2 * small, costs[1]["cycles"], N)
    moved = costs[1]["hbm_bytes"] * N / (2 * small)
    return figures(labels["chip"], cycles, moved, ARRAYS[labels["direction"]] * N * width * 2)


def ffn(labels):
    (cost,) = _ask_both(labels, (labels["rows"],))
    return {name: cost[name] for name in ("us", "core_us", "hbm_us", "hbm_bytes")}


def _ask_both(labels, sizes):
    keys = ("chip", "part", "form", "direction", "width")
    question = {key: labels[key] for key in keys}
    return ask("benchmarks.cost_situ", profile=True, sizes=sizes, **question)


def cost(chip, part, form, direction, width, sizes):
    """In a process of its own: one result for each number of rows."""
    program = {"alone": pass_alone, "ffn": pass_ffn}[part]
    found = []
    for N in sizes:
        r = tpu_cost(*program(FORMS[form], direction, N, width), chip)
        found.append(
            {"cycles": r["cycles"], "us": r["us"], "core_us": r["us_core"], "hbm_us": r["us_hbm"]}
            | {"hbm_bytes": r["hbm_bytes"]}
        )
    return found


def pass_alone(form, direction, N, width):
    """The pass and its operands' shapes."""
    shapes = [jax.ShapeDtypeStruct((N, width), BF16)] * ARRAYS[direction]
    if direction == "forward":
        return form, shapes[:2]
    return lambda gate_NF, up_NF, dy_NF: jax.vjp(form, gate_NF, up_NF)[1](dy_NF), shapes[:3]


def pass_ffn(form, direction, N, width):
    """The same for an FFN as wide inside as outside."""
    matrix, x = (jax.ShapeDtypeStruct((n, width), BF16) for n in (width, N))

    def forward(x_ND, gate_DF, up_DF, down_FD):
        return _dot(form(_dot(x_ND, gate_DF), _dot(x_ND, up_DF)), down_FD)

    if direction == "forward":
        return forward, (x, matrix, matrix, matrix)
    both = lambda dy_ND, *args: jax.vjp(forward, *args)[1](dy_ND)  # noqa: E731
    return both, (x, x, matrix, matrix, matrix)


def _dot(a, b):
    return jnp.einsum("nd,df->nf", a, b, preferred_element_type=F32).astype(BF16)


def ours(impl):
    return lambda gate_NF, up_NF: situ_glu(gate_NF, up_NF, BETA, LINEAR_BETA, impl=impl)


def factors(gate_ref, up_ref, at):
    """BETA sigmoid(g), tanh(g / BETA) and tanh(u / LINEAR_BETA) of some rows."""
    g_tF, u_tF = gate_ref[at, :].astype(F32), up_ref[at, :].astype(F32)
    S_tF = BETA / 2 + (BETA / 2) * jnp.tanh(0.5 * g_tF)
    return S_tF, jnp.tanh(g_tF * (1 / BETA)), jnp.tanh(u_tF * (1 / LINEAR_BETA))


def forward_kernel(gate_ref, up_ref, y_ref):
    @pl.loop(0, BLOCK_ROWS // STEP_ROWS)
    def _(step):
        at = pl.ds(pl.multiple_of(step * STEP_ROWS, STEP_ROWS), STEP_ROWS)
        S_tF, t_tF, v_tF = factors(gate_ref, up_ref, at)
        y_tF = (LINEAR_BETA * S_tF) * (t_tF * v_tF)
        y_ref[at, :] = jnp.clip(y_tF.astype(BF16), -99.5, 99.5)


def backward_kernel(gate_ref, up_ref, dy_ref, dgate_ref, dup_ref):
    @pl.loop(0, BLOCK_ROWS // STEP_ROWS)
    def _(step):
        at = pl.ds(pl.multiple_of(step * STEP_ROWS, STEP_ROWS), STEP_ROWS)
        S_tF, t_tF, v_tF = factors(gate_ref, up_ref, at)
        dyS_tF = dy_ref[at, :].astype(F32) * S_tF
        slope_tF = 1 + t_tF * ((BETA - t_tF) - S_tF)
        dgate_ref[at, :] = ((dyS_tF * slope_tF) * (LINEAR_BETA / BETA * v_tF)).astype(BF16)
        dup_ref[at, :] = ((dyS_tF * t_tF) * (1 - v_tF * v_tF)).astype(BF16)


def in_blocks(kernel, outputs, *args):
    N, width = args[0].shape
    # 5 x 2 buffers of 1.5 MiB at most.
    columns = max(c for c in (3072, 2048) if width % c == 0)
    block = pl.BlockSpec((BLOCK_ROWS, columns), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        grid=(N // BLOCK_ROWS, width // columns),
        in_specs=[block] * len(args),
        out_specs=[block] * outputs,
        out_shape=[jax.ShapeDtypeStruct((N, width), BF16)] * outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name=kernel.__name__,
    )(*args)


@jax.custom_vjp
def pallas(gate_NF, up_NF):
    return in_blocks(forward_kernel, 1, gate_NF, up_NF)[0]


pallas.defvjp(
    lambda gate_NF, up_NF: (pallas(gate_NF, up_NF), (gate_NF, up_NF)),
    lambda saved, dy_NF: tuple(in_blocks(backward_kernel, 2, *saved, dy_NF)),
)

FORMS = {"reference": ours("reference"), "fused": ours("fused"), "pallas": pallas}


if __name__ == "__main__":
    answer(cost)
