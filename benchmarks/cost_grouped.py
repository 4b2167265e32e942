"""The grouped matmul with bfloat16 weights, as it is trained: K3's experts, ragged groups.

Forward, the gradients of x and of the weights, and all three, extended from profiled cycles: the
profiler cannot follow a schedule that depends on group sizes, so that the kernels' own bodies run
on fixed ones, where each visit of a block of rows has a new expert or the same one. N rows in
groups that end anywhere take N / block visits and one more for every expert but one. The floors are
the products' at the matrix units' peak, or each array's one way between HBM and chip where that is
more.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpucost import CHIPS, answer, ask, figures, line_through, row, target, tpu_cost
from pallas_kernels.experts import mosaic
from pallas_kernels.situ.fused import situ_glu

BF16 = jnp.bfloat16
SIZES = {"gate, up": (3584, 3072), "down": (3072, 3584)}
ROWS = 131072  # 8192 tokens and their 16 experts
TRAINED = (("gate, up", 14), ("down", 14), ("gate, up", 112))  # experts
PRODUCTS = ("forward", "dx", "dw")
PROFILED = (2, 4)  # visits
BETAS = (4.0, 25.0)
TRANSCENDENTALS = 3  # tanh, tanh, and a sigmoid as another


def rows(chips):
    """One row for each chip, matrix and number of experts."""
    for chip in chips:
        for matrix, experts in TRAINED:
            labels = {"chip": chip, "matrix": matrix, "experts": experts}
            yield row(labels, functools.partial(training, chip, experts, *SIZES[matrix]))
        labels = {"chip": chip, "matrix": "gate, up and SiTU-GLU", "experts": 14}
        yield row(labels, functools.partial(glu, chip, 14, *SIZES["gate, up"]))


def training(chip, experts, L, F):
    """Microseconds of each product, of all, and what they are of their floors."""
    weights = 2 * experts * L * F
    least = max(
        (2 * ROWS * (L + F) + weights) / CHIPS[chip].bandwidth,
        2 * ROWS * L * F / CHIPS[chip].flops,
    )
    found = {"rows": ROWS, "floor_us": least * 1e6}
    us = times(chip, ROWS, experts, L, F, PRODUCTS)
    for name in PRODUCTS:
        found |= {f"{name}_us": us[name], f"{name}_over_floor": us[name] / found["floor_us"]}
    found["all_us"] = sum(us.values())
    found["all_over_floor"] = found["all_us"] / 3 / found["floor_us"]
    question = {"what": "full", "chip": chip, "experts": experts, "L": L, "F": F}
    return found | ask("benchmarks.cost_grouped", profile=False, **question)


def glu(chip, experts, L, F):
    """Microseconds of both products and the activation forward: in one call, and in three.

    On a tpu7x the profiler cannot walk the activation between the products: there the two are only
    added, and the activation is the whole of its transcendentals, as if none hid.
    """
    us = times(chip, ROWS, experts, L, F, ["forward", "glu"])
    if chip == "tpu7x":
        us["glu"] += ROWS * F * TRANSCENDENTALS / 1024 / CHIPS[chip].clock * 1e6
    three = 2 * us["forward"] + 6 * ROWS * F / CHIPS[chip].bandwidth * 1e6
    return {"one_us": us["glu"], "three_us": three, "one_over_three": us["glu"] / three}


def times(chip, N, experts, L, F, products):
    """Microseconds of each product of N rows in groups that end anywhere."""
    question = {"chip": chip, "N": N, "experts": experts, "L": L, "F": F, "products": products}
    asked, found = ask("benchmarks.cost_grouped", profile=True, what="visits", **question), {}
    for name, of in asked.items():
        visits = -(-N // of["block_rows"]) + experts - 1
        moved = 2 * N * of["columns_moved"] + 2 * experts * L * F * of["matrices"]
        found[name] = figures(chip, cycles_of(of["cycles"], visits, experts), moved)["us"]
    return found


def cycles_of(of_visits, visits, new):
    """Cycles of a product in which `new` of the visits bring another expert.

    of_visits: {"new": [cycles of 2 visits, of 4], "same": the same with one expert throughout}.
    """
    low, high = PROFILED
    each, again = ((y[1] - y[0]) / (high - low) for y in (of_visits["new"], of_visits["same"]))
    before = max(0.0, line_through(low, of_visits["new"][0], high, of_visits["new"][1], 0))
    return before + new * each + (visits - new) * again


def cost(what, **question):
    """In a process of its own: bytes at full size, or cycles of visits."""
    return {"full": full, "visits": visit_cycles}[what](**question)


def visit_cycles(chip, N, experts, L, F, products):
    """Cycles of the products' visits, and the columns of x, dy and y that they move."""
    with target(chip):
        limits = mosaic.limits_of(pltpu.get_tpu_info())
    rows = mosaic.choose_rows(N, experts, limits)
    to_F, to_L = (mosaic.choose_columns(rows, *kn, 2, 2, limits) for kn in ((L, F), (F, L)))
    to_3F = mosaic.choose_columns(rows, L, F, 2, 2, limits, matrices=2, outs=3)
    inputs, columns = mosaic.choose_tile(rows, L, F, 2, limits)
    of = {
        "forward": (functools.partial(fixed_times, mosaic.TIMES, to_F), L * (F // to_F) + F),
        "dx": (functools.partial(fixed_times, mosaic.TIMES_TRANSPOSED, to_L), F * (L // to_L) + L),
        "dw": (
            functools.partial(fixed_outer, inputs, columns),
            L * (F // columns) + F * (L // inputs),
        ),
        "glu": (functools.partial(fixed_glu, chip, to_3F), L * (F // to_3F) + 3 * F),
    }
    found = {}
    for name in products:
        make, moved = of[name]
        found[name] = {"block_rows": rows, "columns_moved": moved}
        found[name]["matrices"] = 2 if name == "glu" else 1
        found[name]["cycles"] = {
            visit: [tpu_cost(*make(rows, L, F, n, is_new), chip)["cycles"] for n in PROFILED]
            for visit, is_new in (("new", True), ("same", False))
        }
    return found


def full(chip, experts, L, F):
    """That forward and backward compile, and what they hold beside arguments and results."""
    shape, N = jax.ShapeDtypeStruct, ROWS

    def step(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: mosaic.grouped_matmul(x, w, sizes, BF16), x, w)
        return y, pull(dy)

    w, sizes = shape((experts, L, F), BF16), shape((experts,), jnp.int32)
    r = tpu_cost(step, (shape((N, L), BF16), w, sizes, shape((N, F), BF16)), chip)
    return {name: r[name] for name in ("temp_bytes", "compile_s")}


def fixed_times(contract, columns, rows, L, F, visits, is_new):
    """x w, or dy w^T, on full blocks; each visit with its own expert, or all with one."""
    return _fixed(lambda y: [y], 1, 1, contract, columns, rows, L, F, visits, is_new)


def fixed_glu(chip, columns, rows, L, F, visits, is_new):
    """y, gate and up on full blocks."""

    def finish(gate, up):
        gate, up = (product.astype(BF16) for product in (gate, up))
        y = gate + up if chip == "tpu7x" else situ_glu(gate, up, *BETAS)
        return [y, gate, up]

    return _fixed(finish, 2, 3, mosaic.TIMES, columns, rows, L, F, visits, is_new)


def _fixed(finish, matrices, outs, contract, columns, rows, L, F, visits, is_new):
    K, M = (L, F) if contract == mosaic.TIMES else (F, L)
    kernel = functools.partial(
        mosaic._times_kernel, rows=rows, contract=contract, finish=finish, n=matrices
    )
    if contract == mosaic.TIMES:
        of_expert = pl.BlockSpec((None, K, columns), lambda m, v: (expert(v, is_new), 0, m))
    else:
        of_expert = pl.BlockSpec((None, columns, K), lambda m, v: (expert(v, is_new), m, 0))
    shape = jax.ShapeDtypeStruct
    vmem = mosaic.times_bytes(rows, K, columns, 2, 2, matrices, outs)
    call = pl.pallas_call(
        lambda *refs: kernel(*map(Table, full_visits(rows, is_new)), *refs),
        grid=(M // columns, visits),
        in_specs=[pl.BlockSpec((rows, K), lambda m, v: (v, 0)), *[of_expert] * matrices],
        out_specs=[pl.BlockSpec((rows, columns), lambda m, v: (v, m))] * outs,
        out_shape=[shape((visits * rows, M), BF16)] * outs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem * 4 // 3
        ),
    )
    weights = shape((visits if is_new else 1, L, F), BF16)
    return call, (shape((visits * rows, K), BF16), *[weights] * matrices)


def fixed_outer(inputs, columns, rows, L, F, visits, is_new):
    """x^T dy on full blocks."""
    kernel = functools.partial(mosaic._outer_kernel, rows=rows)
    shape = jax.ShapeDtypeStruct
    call = pl.pallas_call(
        lambda *refs: kernel(*map(Table, full_visits(rows, is_new)), *refs),
        grid=(L // inputs, F // columns, visits),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda i, f, v: (v, i)),
            pl.BlockSpec((rows, columns), lambda i, f, v: (v, f)),
        ],
        out_specs=pl.BlockSpec((None, inputs, columns), lambda i, f, v: (expert(v, is_new), i, f)),
        out_shape=shape((visits if is_new else 1, L, F), BF16),
        scratch_shapes=[pltpu.VMEM((inputs, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=mosaic.outer_bytes(rows, inputs, columns, 2) * 4 // 3,
        ),
    )
    return call, (shape((visits * rows, L), BF16), shape((visits * rows, F), BF16))


class Table:
    """A prefetched table that is a known function of the visit."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, visit):
        return self.function(visit)


def full_visits(rows, is_new):
    """Expert, block, first and end row of each visit."""
    return (
        lambda v: expert(v, is_new),
        lambda v: v,
        lambda v: v * rows,
        lambda v: v * rows + rows,
    )


def expert(visit, is_new):
    return visit if is_new else 0 * visit


if __name__ == "__main__":
    answer(cost)
