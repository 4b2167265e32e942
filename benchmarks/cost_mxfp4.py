"""The grouped matmul with packed MXFP4 weights beside bfloat16 weights: 14 experts of K3's size.

`bytes` is the kernel compiled at full size beside `jax.lax.ragged_dot` on bfloat16. `time` extends
profiled cycles: the profiler cannot follow a schedule that depends on group sizes, so that the
kernel's own body runs on fixed ones, where each visit of a block of rows has a new expert (which
unpacks weights) or the same one. A product of N rows makes at least N / block visits (`aligned`
groups) and at most 13 more (`ragged`, groups that end anywhere). The same schedule with bfloat16
weights, and the floor of bfloat16 (bytes, or the matrix units' peak), stand beside.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpucost import CHIPS, answer, ask, figures, line_through, row, target, tpu_cost
from pallas_kernels.experts import mxfp4

BF16, U8 = jnp.bfloat16, jnp.uint8
E = 14
SIZES = {"gate, up": (3584, 3072), "down": (3072, 3584)}
PER_EXPERT = {"gate, up": (1, 8, 64, 512), "down": (64, 512)}
PROFILED = (2, 4)  # visits


def rows(chips):
    """One row for each chip, matrix and number of tokens per expert; times first, then bytes."""
    for chip in chips:
        for part, measure in (("time", times), ("bytes", moved)):
            for matrix, tokens in PER_EXPERT.items():
                for t in tokens:
                    labels = {"chip": chip, "part": part, "matrix": matrix, "tokens": t}
                    work = functools.partial(measure, chip, t, *SIZES[matrix])
                    yield row(labels, work)


def moved(chip, t, L, F):
    return ask("benchmarks.cost_mxfp4", profile=False, what="full", chip=chip, t=t, L=L, F=F)


def times(chip, t, L, F):
    """Microseconds of the whole product, ours and bfloat16's, from cycles of single visits."""
    asked = ask("benchmarks.cost_mxfp4", profile=True, what="visits", chip=chip, t=t, L=L, F=F)
    N, row_blocks = E * t, -(-E * t // asked["block_rows"])
    # Consecutive visits of one block of x share its copy; every block of columns reads x anew.
    column_blocks = F // asked["block_columns"]
    reads = min(CHIPS[chip].cores, column_blocks) if asked["x_is_held"] else column_blocks
    x_and_y = N * L * 2 * reads + N * F * 2
    found = {name: asked[name] for name in ("block_rows", "block_columns")}
    for weights, per_expert in (("mxfp4", L * F // 2 + L * F // 32), ("bf16", 2 * L * F)):
        for groups, visits in (("aligned", max(row_blocks, E)), ("ragged", row_blocks + E - 1)):
            cycles = cycles_of(asked[weights], visits, E)
            r = figures(chip, cycles, E * per_expert + x_and_y)
            found[f"{weights}_{groups}_us"] = r["us"]
    # As if every expert's weights were there in time, which the pipeline's one step ahead is not.
    r = figures(chip, cycles_of(asked["bf16"], row_blocks + E - 1, 0), E * 2 * L * F + x_and_y)
    found["bf16_ragged_no_wait_us"] = r["us"]
    floor = 2 * (E * L * F + N * (L + F)) / CHIPS[chip].bandwidth
    found["bf16_floor_us"] = max(floor, 2 * N * L * F / CHIPS[chip].flops) * 1e6
    found["ragged_over_bf16"] = found["mxfp4_ragged_us"] / found["bf16_ragged_us"]
    return found


def cycles_of(of_visits, visits, new):
    """Cycles of a product in which `new` of the visits bring another expert.

    of_visits: {"new": [cycles of 2 visits, of 4], "same": the same with one expert throughout}.
    """
    low, high = PROFILED
    each, again = ((y[1] - y[0]) / (high - low) for y in (of_visits["new"], of_visits["same"]))
    before = max(0.0, line_through(low, of_visits["new"][0], high, of_visits["new"][1], 0))
    return before + new * each + (visits - new) * again


def cost(what, chip, t, L, F):
    """In a process of its own: `full` bytes, or cycles of `visits`."""
    return {"full": full, "visits": visit_cycles}[what](chip, t, L, F)


def full(chip, t, L, F):
    shape, N = jax.ShapeDtypeStruct, E * t
    x, sizes = shape((N, L), BF16), shape((E,), jnp.int32)
    packed, scales = shape((E, L // 2, F), U8), shape((E, L // 32, F), U8)
    r = tpu_cost(mxfp4.grouped_matmul_mxfp4, (x, packed, scales, sizes), chip)
    q = tpu_cost(jax.lax.ragged_dot, (x, shape((E, L, F), BF16), sizes), chip)
    return {
        "mxfp4_bytes": r["hbm_bytes"],
        "ragged_dot_bytes": q["hbm_bytes"],
        "bytes_ratio": r["hbm_bytes"] / q["hbm_bytes"],
        "temp_bytes": r["temp_bytes"],
        "ragged_dot_flops_over_ideal": q["flops"] / (2 * N * L * F),
        "compile_s": r["compile_s"],
    }


def visit_cycles(chip, t, L, F):
    with target(chip):
        blocks = mxfp4.choose(E * t, E, L, F, 2, pltpu.get_tpu_info())
    found = {"block_rows": blocks.rows, "block_columns": blocks.columns}
    found["x_is_held"] = blocks.x_rows >= E * t
    for weights, make in (("mxfp4", fixed_mxfp4), ("bf16", fixed_bf16)):
        found[weights] = {
            name: [tpu_cost(*make(blocks, L, F, n, is_new), chip)["cycles"] for n in PROFILED]
            for name, is_new in (("new", True), ("same", False))
        }
    return found


class Table:
    """A prefetched table that is a known function of the visit."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, visit):
        return self.function(visit)


def fixed_mxfp4(blocks, L, F, visits, is_new):
    """The kernel's own body on full blocks; each visit with its own expert, or all with one."""
    rows = blocks.rows
    blocks = dataclasses.replace(blocks, x_rows=rows)
    plan = (lambda v: expert(v, is_new), lambda v: v, lambda v: v * rows, lambda v: v * rows + rows)

    def kernel(*refs):
        mxfp4._kernel(*map(Table, plan), *refs, blocks=blocks)

    weights = ((L // 2, U8), (L // 32, U8))
    vmem = mxfp4.vmem_bytes(rows, rows, blocks.columns, L, 2) * 4 // 3
    scratch = mxfp4.scratch(blocks, L)
    return _on_schedule(kernel, blocks, (L, F), visits, is_new, weights, scratch, vmem)


def fixed_bf16(blocks, L, F, visits, is_new):
    """A plain matmul on the same schedule."""

    def kernel(x, w, y):
        y[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32).astype(y.dtype)

    return _on_schedule(kernel, blocks, (L, F), visits, is_new, ((L, BF16),), (), 60 << 20)


def expert(visit, is_new):
    return visit if is_new else 0 * visit


def _on_schedule(kernel, blocks, sizes, visits, is_new, weights, scratch, vmem):
    """The call and its operands' shapes; `weights` are (rows, dtype) of an expert's arrays.

    Each visit has its own block of x: the profiler refuses one that stays, and the work of a visit
    does not depend on how much of x is held.
    """
    (L, F), rows, columns, shape = sizes, blocks.rows, blocks.columns, jax.ShapeDtypeStruct
    of_expert = [
        pl.BlockSpec((None, n, columns), lambda f, v: (expert(v, is_new), 0, f)) for n, _ in weights
    ]
    call = pl.pallas_call(
        kernel,
        grid=(F // columns, visits),
        in_specs=[pl.BlockSpec((rows, L), lambda f, v: (v, 0)), *of_expert],
        out_specs=pl.BlockSpec((rows, columns), lambda f, v: (v, f)),
        out_shape=shape((visits * rows, F), BF16),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
    )
    experts = visits if is_new else 1
    arrays = [shape((experts, n, F), dtype) for n, dtype in weights]
    return call, (shape((visits * rows, L), BF16), *arrays)


if __name__ == "__main__":
    answer(cost)
