"""MLA's attention over whole rows: our kernels and the splash attention that JAX ships.

One device's share, 12 heads, B = 1, T = 8192, bfloat16, of one document and of four. The profiler
follows no list of blocks that is data, and no branches: each kind of step is profiled by itself, on
one block, and counted as often as the list has it. The floor is the products' time at the chip's
peak, of pairs that see each other; keys are 192 wide and values 128, and a 256-wide matrix unit
(v6e, tpu7x) fills 256 with either, so that 1.6 is the least there forward and 1.5 backward; on v5p
1.2. `hbm_us`: blocks of keys come again for each block of queries. Splash is profiled forward on
v6e alone; for others, and for its gradients, libtpu ends the process or takes 16 GB.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from benchmarks.tpucost import CHIPS, answer, ask, figures, kernels, row, target, tpu_cost
from pallas_kernels.mla import mosaic
from pallas_kernels.mla import mosaic_kernels as K

T, H, Q, V = 8192, 12, 192, 128
DOCUMENTS = (1, 4)
STEPS = 16  # of a kind that are profiled
DIRECTIONS = ("forward", "backward")
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
S = jax.ShapeDtypeStruct


def rows(chips):
    """One row for each chip, kernel, direction and number of documents."""
    for chip in chips:
        for direction in DIRECTIONS:
            for documents in DOCUMENTS:
                labels = {"chip": chip, "kernel": "k3_jax", "direction": direction}
                labels["documents"] = documents
                yield row(labels, functools.partial(ours, labels))
        if chip == "v6e":
            labels = {"chip": chip, "kernel": "splash", "direction": "forward", "documents": 1}
            yield row(labels, functools.partial(splash, labels))


def ours(labels):
    chip, direction, documents = (labels[x] for x in ("chip", "direction", "documents"))
    cycles = _cycles_of_kinds(chip, direction)
    counts, pairs = listed(direction, documents)
    # Heads by groups, on the cores side by side.
    groups = H // cycles["heads"] // CHIPS[chip].cores
    total = groups * sum(n * cycles[kind] for kind, n in counts.items())
    return beside_products(
        chip, direction, documents, total, moved(direction, pairs, plan_for((1, 1)).rows)
    )


@functools.cache
def _cycles_of_kinds(chip, direction):
    return ask("benchmarks.cost_mla", profile=True, part="kinds", chip=chip, direction=direction)


def listed(direction, documents):
    """How many steps of each kind a group of heads takes, and how many pairs of blocks that is."""
    ids = jnp.asarray(np.repeat(1 + np.arange(documents), T // documents), I32)[None, None]
    plan = plan_for((1, 1))
    codes, steps = mosaic.pairs(plan, ids, ids, jnp.zeros(1, I32), by_keys=direction == "backward")
    kinds = np.asarray(codes)[0, : int(steps)]
    counts = {"open": K.OPEN, "diagonal": K.DIAGONAL, "masked": K.MASKED, "edges": K.FIRST}
    found = {name: int(np.count_nonzero(kinds & bit)) for name, bit in counts.items()}
    # What begins and ends the list is linear in T, of which one block is profiled.
    return found | {"ends": T // plan.rows}, len(kinds)


def plan_for(heads):
    rows, tile = mosaic.block_and_tile(T)
    piece = mosaic.queries_per_call(T, rows)
    return mosaic.Plan(Q**-0.5, BF16, rows, tile, rows, piece, heads, False)


def moved(direction, pairs, block):
    """Bytes of HBM: what a pair fetches, and the rest once. Lanes fill up to 256 and 128."""
    once = {"forward": T, "backward": 3 * T}[direction]
    return H * 2 * (256 + 128) * (once + pairs * block)


def beside_products(chip, direction, documents, cycles, nbytes):
    found = figures(chip, cycles, nbytes)
    pairs = H * T * T // documents // 2
    width = {"forward": Q + V, "backward": 3 * Q + 2 * V}[direction]
    floor_us = 2 * pairs * width / CHIPS[chip].flops * 1e6
    return found | {"floor_us": floor_us, "over_floor": found["us"] / floor_us}


def splash(labels):
    """Tiles above the diagonal are passed over, which the profiler does not know."""
    cycles = ask(
        "benchmarks.cost_mla", profile=True, part="splash", chip="v6e", direction="forward"
    )
    tiles = T // mosaic.TILE
    pairs = tiles * (tiles + 1) // 2
    nbytes = moved("forward", pairs, mosaic.TILE)
    return beside_products("v6e", "forward", labels["documents"], cycles * pairs / tiles**2, nbytes)


def cost(part, chip, direction):
    """In a process of its own."""
    return splash_cycles(chip) if part == "splash" else cycles_of_kinds(chip, direction)


def cycles_of_kinds(chip, direction):
    """Cycles of a step of each kind for a group of heads."""
    back = direction == "backward"
    rows, tile = mosaic.block_and_tile(T)
    with target(chip):
        vmem = pltpu.get_tpu_info().vmem_capacity_bytes
    sizes = rows, tile, rows, Q, V, 2
    heads = mosaic.heads_per_step(H, *sizes, mosaic.queries_per_call(T, rows) * back, vmem)
    profile = functools.partial(cycles_a_step, chip, back, heads, rows)
    idle = profile(0)
    return {
        "open": profile(K.OPEN),
        "diagonal": profile(K.DIAGONAL),
        "masked": profile(K.MASKED),
        "edges": profile(K.FIRST | K.LAST) - idle,
        "ends": profile(K.BEGIN | K.END) - idle,
        "heads": heads,
    }


def cycles_a_step(chip, back, heads, block, kinds):
    """Of a kernel that takes each step for all these kinds at once, always on the same block."""
    K.when = lambda _, what: lambda body: body() if kinds & what else None
    mosaic.pairs = lambda *_, **__: (jnp.zeros((1, STEPS), I32), STEPS)
    plan, n = plan_for((heads, heads)), heads * CHIPS[chip].cores
    q, v, stats = S((1, n, block, Q), BF16), S((1, n, block, V), BF16), S((1, n, 1, block), F32)
    ids, first = S((1, 1, block), I32), S((1,), I32)
    if back:
        fn = functools.partial(mosaic.backward, plan, dtype=BF16)
        args = q, q, v, v, stats, stats, ids, ids, first
    else:
        fn, args = functools.partial(mosaic.forward, plan), (q, q, v, ids, ids, first)
    found = kernels(tpu_cost(lambda *x: fn(*x), args, chip)["ops"])
    ((cycles, _),) = found.values()
    return cycles / STEPS


def splash_cycles(chip):
    """Without the branch around a tile: the profiler leaves out what is in one."""
    found = splash_attention_kernel._next_nonzero
    always = lambda *x, **more: [*(told := found(*x, **more))[:2], True, told[3]]  # noqa: E731
    splash_attention_kernel._next_nonzero = always
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H),
        block_sizes=splash_attention_kernel.BlockSizes(
            **{f"block_{x}": mosaic.TILE for x in names}
        ),
    )

    def fn(q, k, v, ids):
        return kernel(q, k, v, segment_ids=splash_attention_kernel.SegmentIds(ids, ids))

    args = S((H, T, Q), BF16), S((H, T, Q), BF16), S((H, T, V), BF16), S((T,), I32)
    return sum(cycles for cycles, _ in kernels(tpu_cost(fn, args, chip)["ops"]).values())


if __name__ == "__main__":
    answer(cost)
