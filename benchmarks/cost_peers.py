"""Public KDA kernels, compiled beside ours by the same compiler.

    python -m benchmarks.kernels --sections kda --peer-python PATH

PATH is a Python that has jax, libtpu and one of them or both; what is missing has no rows. Neither
figure has a short convolution in it, as ours has none.

`pip install tokamax==0.0.17`: for training. It takes arrays with the heads first, raw gates and q
and k before their norms, as ours do. `pip install flywheel-tpu==0.3.0`: for inference. Its own
kernel walks a ragged batch in ways that the profiler cannot follow, so that its functions for a
tile of 128 tokens run on a plain grid here: its arithmetic is counted, its bookkeeping is not.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.cost_kda import D, of_size, program_cost, whole
from benchmarks.tpucost import CHIPS, answer, ask, line_through, row, target

F32, BF16 = jnp.float32, jnp.bfloat16
T, H = 8192, 12
TILE = 128
PEERS = {"tokamax": ("forward", "forward+backward"), "flywheel-tpu": ("forward",)}


def rows(chips, python):
    """One row for each chip, peer and direction, of what is installed for `python`."""
    for peer, directions in PEERS.items():
        version = installed(peer, python)
        if version is None:
            print(f"{python} has no {peer}: left out (--peer-python)", file=sys.stderr)
            continue
        for chip in chips:
            for direction in directions:
                labels = {"chip": chip, "kernel": f"{peer} {version}", "direction": direction}
                work = functools.partial(full_size, chip, peer, direction, python)
                yield row(labels | {"tokens": T, "heads": H}, work)


def installed(package, python):
    """Its version for another Python, which may not be this one; None where it is missing."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def full_size(chip, peer, direction, python):
    """Figures at T tokens and H heads; cycles grow with the work, that of one core."""
    if peer == "tokamax":
        # One chunk long: the profiler cannot follow its blocks of longer arrays.
        small_sizes, full_work = [(64, 12), (64, 24)], T * H
    else:
        # Its grid has one axis; on two cores each would take half of the heads.
        heads = H // CHIPS[chip].cores
        small_sizes, full_work = [(TILE, heads), (2 * TILE, heads)], T * heads
    question = {"chip": chip, "peer": peer, "direction": direction, "python": python}
    small = ask("benchmarks.cost_peers", profile=True, sizes=small_sizes, **question)
    # A peer may keep in VMEM what fits there; ours are counted with every array in HBM.
    (full,) = ask("benchmarks.cost_peers", profile=False, in_hbm=False, sizes=[(T, H)], **question)
    cycles = {}
    for name in full["kernels"]:
        low, high = (program["kernels"][name][0] for program in small)
        work = [t * h for t, h in small_sizes]
        cycles[name] = line_through(work[0], low, work[1], high, full_work)
    return whole(chip, cycles, full) | of_size(chip, direction, T, H, full)


def cost(chip, peer, direction, sizes):
    """In a process of its own: a peer at each [tokens, heads]."""
    jax.default_backend = lambda: "tpu"  # by which tokamax chooses its TPU kernel
    program, found = {"tokamax": tokamax, "flywheel-tpu": flywheel}[peer], []
    for t, h in sizes:
        with target(chip):
            function, shapes = program(direction, t, h)
        found.append(program_cost(function, shapes, chip))
    return found


def tokamax(direction, t, h):
    from tokamax._src.ops.kda import pallas_mosaic_tpu

    kernel = pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttention
    kernel.supported_on = lambda self, device: True  # it asks for a device, and there is none
    op = kernel(config=pallas_mosaic_tpu.Config(rematerialize_for_backward=False))
    options = {"use_qk_l2norm": True, "use_gate_in_kernel": True, "output_final_state": False}
    options |= {"scale": D**-0.5, "lower_bound": -5.0}
    names = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias")

    def forward(*operands):
        return op(**dict(zip(names, operands, strict=True)), **options)[0]

    def both(do, *operands):
        o, pull = jax.vjp(forward, *operands)
        return o, pull(do)

    shape = jax.ShapeDtypeStruct
    x, beta = shape((h, 1, t, D), BF16), shape((h, 1, t), F32)
    operands = (x, x, x, x, beta, shape((h,), F32), shape((h * D,), F32))
    return (forward, operands) if direction == "forward" else (both, (x, *operands))


def flywheel(direction, t, h):
    from flywheel_tpu.linear_attention.kda import compute_kda, config, vmem_ldst

    dtypes = config.Dtypes(BF16, BF16, F32, F32, F32, F32)
    sizes = {"batch_size": t, "dim_size": 3 * h * D, "kernel_size": 4, "tile_size": TILE}
    sizes |= {"num_kq_heads": h, "num_v_heads": h, "kq_head_dim": D, "v_head_dim": D}
    c = config.KDAConfig(
        mode=config.KDAMode.PER_SEQ,
        dtypes=dtypes,
        compute_chunk_size=64,
        lower_bound=-5.0,
        **sizes,
    )

    def kernel(qkv, gate, beta, a_log, bias, o, state):
        @pl.when(pl.program_id(0) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        first, chunks = pl.program_id(0) * 0, []
        for start in range(0, TILE, 64):
            at = pl.ds(start, 64)
            x = qkv.at[:, at][...].astype(F32)
            parts = vmem_ldst.load_activation_as_chunked(x, gate.at[:, at][...], beta.at[:, at], c)
            q, k, v, b, g = parts
            args = (first, first + 64, q, k, v, b, g, a_log[...], bias[...], c)
            chunks.append(
                compute_kda.ChunkKDA(*(y[0] for y in compute_kda.prepare_chunk(*args)), c)
            )
        outs, state[...] = compute_kda.run_pipelined(chunks, state[...])
        for n, out in enumerate(outs):
            o[0, pl.ds(64 * n, 64)] = compute_kda.pack_out(out, c).astype(BF16)

    return _on_tiles(kernel, t, h)


def _on_tiles(kernel, t, h):
    shape = jax.ShapeDtypeStruct
    wide, narrow = (pl.BlockSpec((1, TILE, w), lambda i: (0, i, 0)) for w in (3 * h * D, h * D))
    beta = pl.BlockSpec((1, TILE, 1, 128), lambda i: (0, i, 0, 0))
    gate = pl.BlockSpec((h, 1, D), lambda i: (0, 0, 0))
    call = pl.pallas_call(
        kernel,
        grid=(t // TILE,),
        name="flywheel",
        in_specs=[wide, narrow, beta, gate, gate],
        out_specs=narrow,
        out_shape=shape((1, t, h * D), BF16),
        scratch_shapes=[pltpu.VMEM((h, D, D), F32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=60 << 20,
            disable_bounds_checks=True,
        ),
    )
    activations = [shape((1, t, n), BF16) for n in (3 * h * D, h * D)]
    gates = [shape((h, 1, D), F32)] * 2
    return call, (*activations, shape((1, t, 1, 128), F32), *gates)


if __name__ == "__main__":
    answer(cost)
