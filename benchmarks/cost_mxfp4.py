"""The grouped matmul with packed MXFP4 weights beside bfloat16 weights: 14 experts of K3's size.

`bytes` is the kernel compiled at full size, and `over_bf16` its bytes over those of a product with
bfloat16 weights that moves each array once. So many XLA tells of `jax.lax.ragged_dot` for v5p; its
count for v6e and tpu7x leaves out the weights and is printed only.

`time` extends profiled cycles: the profiler cannot follow a schedule that depends on group sizes,
so that the kernel's own body runs on fixed ones, where each visit of a block of rows has a new
expert (which unpacks weights) or the same one. A product of N rows makes at least N / block visits
(`aligned` groups) and at most 13 more (`ragged`, groups that end anywhere). The same schedule with
bfloat16 weights, our own kernel for those (`bf16_kernel`, see `cost_grouped`), and the floor of
bfloat16 (bytes, or the matrix units' peak), stand beside.

`glu` is gate, up and SiTU-GLU in one call beside two products and the activation, which is counted
as moving its three arrays and nothing else; `mxfp8_us` is the one call with MXFP8 rows. On a tpu7x
the profiler cannot walk the activation between the products: there the two sums are only added,
and the activation is the whole of its transcendentals, as if none hid behind the matrix unit.
`ffn` is an expert's FFN as it is served: that call and the product `down`, in one program.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks import cost_grouped
from benchmarks.cost_grouped import PROFILED, SIZES, Table, cycles_of, expert, full_visits
from benchmarks.tpucost import CHIPS, answer, ask, figures, row, target, tpu_cost
from pallas_kernels.experts import mxfp4
from pallas_kernels.experts.mxfp8 import E4M3
from pallas_kernels.situ import situ_glu

BF16, U8 = jnp.bfloat16, jnp.uint8
E = 14
PER_EXPERT = {"gate, up": (1, 8, 64, 512), "down": (64, 512)}
BETAS = {"beta": 4.0, "linear_beta": 25.0}
TRANSCENDENTALS = 4  # tanh, tanh, and a sigmoid's exponential and reciprocal


def rows(chips):
    """One row for each chip, matrix and number of tokens per expert; times first, then bytes."""
    for chip in chips:
        for part, measure in (("time", times), ("bytes", moved)):
            for matrix, tokens in PER_EXPERT.items():
                for t in tokens:
                    labels = {"chip": chip, "part": part, "matrix": matrix, "tokens": t}
                    work = functools.partial(measure, chip, t, *SIZES[matrix])
                    yield row(labels, work)
        for t in PER_EXPERT["gate, up"]:
            labels = {"chip": chip, "part": "glu", "matrix": "gate, up", "tokens": t}
            yield row(labels, functools.partial(glu, chip, t, *SIZES["gate, up"]))


def moved(chip, t, L, F):
    return ask("benchmarks.cost_mxfp4", profile=False, what="full", chip=chip, t=t, L=L, F=F)


def times(chip, t, L, F):
    """Microseconds of the whole product, ours and bfloat16's, from cycles of single visits."""
    asked = ask("benchmarks.cost_mxfp4", profile=True, what="visits", chip=chip, t=t, L=L, F=F)
    N, row_blocks = E * t, -(-E * t // asked["block_rows"])
    x_and_y = N * L * 2 * asked["reads_of_x"] + N * F * 2
    found = {name: asked[name] for name in ("block_rows", "block_columns")}
    for weights, per_expert in (("mxfp4", L * F // 2 + L * F // 32), ("bf16", 2 * L * F)):
        for groups, visits in (("aligned", max(row_blocks, E)), ("ragged", row_blocks + E - 1)):
            cycles = cycles_of(asked[weights], visits, E)
            r = figures(chip, cycles, E * per_expert + x_and_y)
            found[f"{weights}_{groups}_us"] = r["us"]
    # As if every expert's weights were there in time, which the pipeline's one step ahead is not.
    r = figures(chip, cycles_of(asked["bf16"], row_blocks + E - 1, 0), E * 2 * L * F + x_and_y)
    found["bf16_ragged_no_wait_us"] = r["us"]
    floor = bf16_bytes(N, L, F) / CHIPS[chip].bandwidth
    found["bf16_floor_us"] = max(floor, 2 * N * L * F / CHIPS[chip].flops) * 1e6
    found["bf16_kernel_ragged_us"] = cost_grouped.times(chip, N, E, L, F, ["forward"])["forward"]
    found["ragged_over_bf16"] = found["mxfp4_ragged_us"] / found["bf16_ragged_us"]
    return found


def glu(chip, t, L, F):
    """Microseconds of gate, up and activation: in one call, in three, and with MXFP8 rows."""
    asked = ask("benchmarks.cost_mxfp4", profile=True, what="glu", chip=chip, t=t, L=L, F=F)
    N, found = E * t, {}
    for name, matrices in (("one", 2), ("separate", 1), ("mxfp8", 2)):
        of = asked[name]
        visits = -(-N // of["block_rows"]) + E - 1
        x = N * (L + mxfp4.scale_lanes(L) if name == "mxfp8" else 2 * L) * of["reads_of_x"]
        moved = matrices * E * (L * F // 2 + L * F // 32) + x + 2 * N * F
        cycles = cycles_of(of["cycles"], visits, E)
        if chip == "tpu7x" and matrices == 2:
            cycles += visits * of["block_rows"] * F / 1024 * TRANSCENDENTALS
        found[f"{name}_us"] = figures(chip, cycles, moved)["us"]
    found["separate_us"] = 2 * found["separate_us"] + 6 * N * F / CHIPS[chip].bandwidth * 1e6
    found["one_over_separate"] = found["one_us"] / found["separate_us"]
    found["mxfp8_over_one"] = found["mxfp8_us"] / found["one_us"]
    asked = ask("benchmarks.cost_mxfp4", profile=False, what="glu_full", chip=chip, t=t, L=L, F=F)
    return found | asked


def cost(what, chip, t, L, F):
    """In a process of its own: bytes at full size, or cycles of visits. t: rows or experts."""
    found = {"full": full, "visits": visit_cycles, "glu": glu_cycles, "glu_full": glu_full}
    return found[what](chip, t, L, F)


def bf16_bytes(N, L, F, matrices=1):
    """Products of N rows with bfloat16 weights, [L,F] of each expert, if each array moves once."""
    return 2 * (matrices * E * L * F + N * (L + F))


def full(chip, t, L, F):
    shape, N = jax.ShapeDtypeStruct, E * t
    x, sizes = shape((N, L), BF16), shape((E,), jnp.int32)
    packed, scales = shape((E, L // 2, F), U8), shape((E, L // 32, F), U8)
    r = tpu_cost(mxfp4.grouped_matmul_mxfp4, (x, packed, scales, sizes), chip)
    q = tpu_cost(jax.lax.ragged_dot, (x, shape((E, L, F), BF16), sizes), chip)
    return {
        "mxfp4_bytes": r["hbm_bytes"],
        "ragged_dot_bytes": q["hbm_bytes"],
        "over_bf16": r["hbm_bytes"] / bf16_bytes(N, L, F),
        "temp_bytes": r["temp_bytes"],
        "ragged_dot_flops_over_ideal": q["flops"] / (2 * N * L * F),
        "compile_s": r["compile_s"],
    }


def visit_cycles(chip, t, L, F):
    with target(chip):
        blocks = mxfp4.choose(E * t, E, L, F, 2, pltpu.get_tpu_info())
    found = {"block_rows": blocks.rows, "block_columns": blocks.columns}
    found["reads_of_x"] = blocks.reads_of_x(E * t, F)
    for weights, make in (("mxfp4", fixed_mxfp4), ("bf16", fixed_bf16)):
        found[weights] = {
            name: [tpu_cost(*make(blocks, L, F, n, is_new), chip)["cycles"] for n in PROFILED]
            for name, is_new in (("new", True), ("same", False))
        }
    return found


def glu_full(chip, t, L, F):
    shape, N = jax.ShapeDtypeStruct, E * t
    x, sizes = shape((N, L), BF16), shape((E,), jnp.int32)
    pair = shape((N, L), E4M3), shape((N, L // 32), U8)
    matrix = shape((E, L // 2, F), U8), shape((E, L // 32, F), U8)

    def separate(x, gate, up, sizes):
        y = (mxfp4.grouped_matmul_mxfp4(x, *matrix, sizes) for matrix in (gate, up))
        return situ_glu(*y, **BETAS)

    one = functools.partial(mxfp4.grouped_glu_mxfp4, **BETAS)

    def ffn(x, gate, up, sizes, packed, scales):
        return mxfp4.grouped_matmul_mxfp4(one(x, gate, up, sizes), packed, scales, sizes)

    forms = {"one": (one, x), "separate": (separate, x), "mxfp8": (one, pair), "ffn": (ffn, x)}
    down = shape((E, F // 2, L), U8), shape((E, F // 32, L), U8)
    found = {}
    for name, (form, rows) in forms.items():
        operands = (rows, matrix, matrix, sizes, *(down if name == "ffn" else ()))
        found[f"{name}_bytes"] = tpu_cost(form, operands, chip)["hbm_bytes"]
    both = bf16_bytes(N, L, F, matrices=2)
    found["one_over_bf16"] = found["one_bytes"] / both
    found["ffn_over_bf16"] = found["ffn_bytes"] / (both + bf16_bytes(N, F, L))
    return found


def glu_cycles(chip, t, L, F):
    found = {}
    for name, matrices, is_mxfp8 in (("one", 2, False), ("separate", 1, False), ("mxfp8", 2, True)):
        with target(chip):
            chip_info = pltpu.get_tpu_info()
        blocks = mxfp4.choose(E * t, E, L, F, 2, chip_info, matrices, is_mxfp8)
        found[name] = {"block_rows": blocks.rows, "block_columns": blocks.columns}
        found[name]["reads_of_x"] = blocks.reads_of_x(E * t, F)
        finish = None
        if matrices == 2:
            activation = functools.partial(mxfp4.activation, **BETAS)
            finish = jnp.add if chip == "tpu7x" else activation
        make = functools.partial(
            fixed_mxfp4, blocks, L, F, matrices=matrices, is_mxfp8=is_mxfp8, finish=finish
        )
        found[name]["cycles"] = {
            visit: [tpu_cost(*make(n, is_new), chip)["cycles"] for n in PROFILED]
            for visit, is_new in (("new", True), ("same", False))
        }
    return found


def fixed_mxfp4(blocks, L, F, visits, is_new, *, matrices=1, is_mxfp8=False, finish=None):
    """The kernel's own body on full blocks; each visit with its own expert, or all with one."""
    rows = blocks.rows
    blocks = dataclasses.replace(blocks, x_rows=rows)
    plan = full_visits(rows, is_new)
    options = {"matrices": matrices, "is_mxfp8": is_mxfp8, "finish": finish}

    def kernel(*refs):
        mxfp4._kernel(*map(Table, plan), *refs, blocks=blocks, **options)

    x = ((L, E4M3), (mxfp4.scale_lanes(L), U8)) if is_mxfp8 else ((L, BF16),)
    weights = ((L // 2, U8), (L // 32, U8)) * matrices
    vmem = mxfp4.vmem_bytes(rows, rows, blocks.columns, L, 2, matrices, is_mxfp8) * 4 // 3
    scratch = mxfp4.scratch(blocks, L, matrices, is_mxfp8)
    return _on_schedule(kernel, blocks, x, F, visits, is_new, weights, scratch, vmem)


def fixed_bf16(blocks, L, F, visits, is_new):
    """A plain matmul on the same schedule."""

    def kernel(x, w, y):
        y[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32).astype(y.dtype)

    return _on_schedule(kernel, blocks, ((L, BF16),), F, visits, is_new, ((L, BF16),), (), 60 << 20)


def _on_schedule(kernel, blocks, x, F, visits, is_new, weights, scratch, vmem):
    """The call and its operands' shapes.

    x are (columns, dtype) of the arrays of rows, `weights` (rows, dtype) of an expert's arrays.

    Each visit has its own block of x: the profiler refuses one that stays, and the work of a visit
    does not depend on how much of x is held.
    """
    rows, columns, shape = blocks.rows, blocks.columns, jax.ShapeDtypeStruct
    of_rows = [pl.BlockSpec((rows, n), lambda f, v: (v, 0)) for n, _ in x]
    of_expert = [
        pl.BlockSpec((None, n, columns), lambda f, v: (expert(v, is_new), 0, f)) for n, _ in weights
    ]
    call = pl.pallas_call(
        kernel,
        grid=(F // columns, visits),
        in_specs=[*of_rows, *of_expert],
        out_specs=pl.BlockSpec((rows, columns), lambda f, v: (v, f)),
        out_shape=shape((visits * rows, F), BF16),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
    )
    experts = visits if is_new else 1
    of_x = [shape((visits * rows, n), dtype) for n, dtype in x]
    return call, (*of_x, *[shape((experts, n, F), dtype) for n, dtype in weights])


if __name__ == "__main__":
    answer(cost)
