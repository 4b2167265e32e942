"""Chunked KDA, forward and backward, at K3's head size: B = 1, with segments and states.

At 12 heads a device (K3's 96 over 8), at 4 and 24, and 12 at T = 65536; and 12 with what a shard of
a sequence does to any state before it (`pallas_kernels.kda.sequence`). A kernel's cycles come from
one and two grid steps along time and are extended to all that a core makes; HBM bytes and
temporaries come from compiling the full size. The time is the larger of the two for each kernel,
and on top the bytes that XLA moves around them. The floor moves each input and output once: 5
arrays [T, heads, 128] of bfloat16 forward, 16 forward and backward, of which 2 are the saved states
(one for every 128 tokens is as large as such an array).

The model counts both arms of a branch. The one that clears pads runs only in blocks that have some:
a single store stands in for it here, and the look for pads is counted. On v6e it makes 15 us of the
forward kernel at 12 heads where it runs in every block. What the kernels are told of documents is
made in XLA from segments and is a row of the section `layers`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpucost import (
    CHIPS,
    answer,
    ask,
    kernels,
    line_through,
    row,
    target,
    tpu_cost,
)
from pallas_kernels.kda import mosaic, mosaic_backward, mosaic_forward
from pallas_kernels.kda.mosaic import Plan, Raw

F32, BF16 = jnp.float32, jnp.bfloat16
D, CHUNK = 128, 128
# T, heads, V. With twice the values comes what a shard of a sequence does to a state before it.
SIZES = ((8192, 12, D), (8192, 4, D), (8192, 24, D), (65536, 12, D), (8192, 12, 2 * D))
# Arrays of K and of V numbers a token and head.
ARRAYS = {"forward": (3, 2), "forward+backward": (9, 7)}


def rows(chips):
    """One row for each chip, direction and size."""
    for chip in chips:
        profiled = {}
        for T, H, V in SIZES:
            for direction in ARRAYS:
                kernel = "ours" if V == D else "ours, with transitions"
                labels = {"chip": chip, "kernel": kernel, "direction": direction}
                work = functools.partial(full_size, profiled, chip, direction, T, H, V)
                yield row(labels | {"tokens": T, "heads": H}, work)


def full_size(profiled, chip, direction, T, H, V):
    """Figures of one size; `profiled` keeps the cycles that sizes of one plan share."""
    question = {"chip": chip, "direction": direction, "T": T, "H": H, "V": V}
    full = ask("benchmarks.cost_kda", profile=False, what="full", **question)
    plans, cycles = [Plan(**plan) for plan in full["plans"]], {}
    for name in full["kernels"]:
        is_backward = "backward" in name
        plan, saves = plans[is_backward], direction != "forward"
        key = (is_backward, saves, plan, V)
        if key not in profiled:
            question = {"chip": chip, "plan": plan._asdict(), "is_backward": is_backward}
            question |= {"saves": saves, "V": V, "what": "profile"}
            profiled[key] = ask("benchmarks.cost_kda", profile=True, **question)
        steps = T // (plan.chunks * CHUNK) * -(-H // (plan.heads * CHIPS[chip].cores))
        cycles[name] = line_through(1, profiled[key][0], 2, profiled[key][1], steps)
    walks = ", ".join(f"{plan.heads} x {plan.chunks}" for plan in plans)
    found = whole(chip, cycles, full) | of_size(chip, direction, T, H, full, V)
    return found | {"heads_x_chunks": walks}


def whole(chip, cycles, full):
    """A program from the cycles of each of its kernels, and bytes as `program_cost` gives them."""
    _, clock, _, bandwidth, _ = CHIPS[chip]
    core_us = {name: cycles[name] / clock * 1e6 for name in full["kernels"]}
    moved_us = {name: moved / bandwidth * 1e6 for name, (_, moved) in full["kernels"].items()}
    around_us = full["around_bytes"] / bandwidth * 1e6
    us = sum(max(core_us[name], moved_us[name]) for name in core_us) + around_us
    return {"us": us, "core_us": sum(core_us.values()), "around_us": around_us}


def of_size(chip, direction, T, H, full, V=D):
    """The rest of a row: bytes beside the floor, temporaries, time to compile."""
    moved = full["around_bytes"] + sum(in_kernel for _, in_kernel in full["kernels"].values())
    of_k, of_v = ARRAYS[direction]
    floor = (of_k * D + of_v * V) * T * H * 2
    return {
        "hbm_us": moved / CHIPS[chip].bandwidth * 1e6,
        "hbm_bytes": moved,
        "bytes_over_floor": moved / floor,
        "temp_bytes": full["temp_bytes"],
        "compile_s": full["compile_s"],
    }


def cost(what, **question):
    """In a process of its own: the `full` program, or a kernel's `profile`."""
    return {"full": full_program, "profile": profile}[what](**question)


def full_program(chip, direction, T, H, V):
    plans = plans_of(chip, direction, T, H, V)
    function, shapes = program(direction, plans, T, H, V)
    return program_cost(function, shapes, chip) | {"plans": [plan._asdict() for plan in plans]}


def plans_of(chip, direction, T, H, V):
    """Of the forward kernel, and of the backward kernel where it runs."""
    with target(chip):
        info = pltpu.get_tpu_info()
    backward = (False,) if direction == "forward" else (False, True)
    return [mosaic.plan_for(T, H, D, V, 2, is_backward, info) for is_backward in backward]


def program_cost(function, shapes, chip):
    r = tpu_cost(function, shapes, chip)
    around = [op for op in r["ops"] if op.opcode != "custom-call"]
    return {
        "kernels": kernels(r["ops"]),
        "around_bytes": sum(op.runs * op.bytes for op in around),
        "temp_bytes": r["temp_bytes"],
        "compile_s": r["compile_s"],
    }


def profile(chip, plan, is_backward, saves, V):
    """Cycles of one and of two grid steps of a kernel, with the heads of one step alone.

    The profiler cannot follow the saved states where a block has some of the heads.
    """
    plan, shape, cycles = Plan(**plan), jax.ShapeDtypeStruct, []
    H = plan.heads
    options = {"plan": plan, "raw": Raw(-5.0, D**-0.5), "interpret": False}
    for module in (mosaic_forward, mosaic_backward):
        module.clear_pads = look_for_pads
    for T in (plan.chunks * CHUNK, 2 * plan.chunks * CHUNK):
        x, gate = shape((1, T, H * D), BF16), shape((1, H * D), F32)
        v, mask = shape((1, T, H * V), BF16), shape((1, T // CHUNK, 8, CHUNK), F32)
        state, saved = shape((1, H, D, V), F32), shape((1, T // CHUNK, H, D, V), BF16)
        tokens = (mask, x, x, v, x, shape((1, T, H), F32))
        if is_backward:
            function = functools.partial(mosaic.backward, **options)
            r = tpu_cost(function, (*tokens, (gate, gate), saved, v, state), chip)
        else:
            function = functools.partial(mosaic.forward, saves=saves, **options)
            r = tpu_cost(function, (*tokens, (gate, gate), state), chip)
        ((total, _),) = kernels(r["ops"]).values()
        cycles.append(total)
    return cycles


def look_for_pads(mask_ref, refs, fills):
    """`clear_pads` in a block without pads: it looks, and takes a branch of one store."""

    @pl.when(mosaic_forward.has_pads(mask_ref))
    def _():
        refs[0][0, 0:16, 0:D] = jnp.zeros((16, D), refs[0].dtype)


def program(direction, plans, T, H, V):
    """KDA on raw q, k, v and gate, and its operands' shapes; heads are on lanes, as in a layer."""
    shape = jax.ShapeDtypeStruct
    options = {"raw": Raw(-5.0, D**-0.5), "plans": (plans[0], plans[-1])}

    def forward(q, k, v, g, beta, rate, bias, state, documents):
        x = [y.reshape(1, T, H, -1) for y in (q, k, v, g)]
        gates, real = (rate, bias), documents >= 0
        o, last = mosaic.kda_mosaic(*x, beta, gates, state, documents, real, **options)
        return o.reshape(1, T, H * V), last

    def both(grads, documents, *operands):
        out, pull = jax.vjp(lambda *x: forward(*x, documents), *operands)
        return out, pull(grads)

    x, v, state = shape((1, T, H * D), BF16), shape((1, T, H * V), BF16), shape((1, H, D, V), F32)
    beta, documents = shape((1, T, H), F32), shape((1, T), jnp.int32)
    operands = (x, x, v, x, beta, shape((H,), F32), shape((H, D), F32), state)
    if direction == "forward":
        return forward, (*operands, documents)
    return both, ((v, state), documents, *operands)


if __name__ == "__main__":
    answer(cost)
