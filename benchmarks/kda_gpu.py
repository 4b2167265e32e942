"""GPU time of the KDA op beside flash-linear-attention's Triton kernels, measured in one run.

    python -m benchmarks.kda_gpu --output kda_gpu.json

One device's share is all of K3's 96 heads here: B = 1, T = 8192, d = 128, bfloat16, the gate, the
norms and beta's sigmoid inside, gradients of every input. Each side runs in a process of its own
(two frameworks would share the memory badly); the second is left out where torch and fla cannot be
imported. Times are medians over `--repeats` calls in milliseconds, after warm-up, with a wait for
the device around each. `error` is the relative distance of the first two heads' output and of
their gradient of q from the token recurrence in float32.
"""

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LOWER_BOUND = -5.0
COMPARED = 2  # heads


def inputs(t, h, d):
    """Raw q, k, v, gate [1, T, H, d], beta [1, T, H], a_log [H], bias [H, d], and o's gradient."""
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal((1, t, h, d), np.float32) for _ in range(4)]
    beta = rng.standard_normal((1, t, h), np.float32)
    a_log = rng.uniform(-1, 1, h).astype(np.float32)
    bias = rng.uniform(-4, 0, (h, d)).astype(np.float32)
    return (*tokens, beta, a_log, bias, rng.standard_normal((1, t, h, d), np.float32))


def median_ms(call, wait, repeats):
    for _ in range(3):
        wait(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(call())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure_jax(options, heads):
    """Our form's figures, and what the recurrence gives for the first heads."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kda import gated_kda

    def run(impl, dtype, *x):
        q, k, v, logit, beta, a_log, bias = x
        b, t, h, d = q.shape
        tokens = (y.astype(dtype) for y in (q, k, v, logit, beta))
        state, segments = jnp.zeros((b, h, d, d)), jnp.ones((b, t), jnp.int32)
        return gated_kda(*tokens, a_log, bias, state, segments, lower_bound=LOWER_BOUND, impl=impl)[
            0
        ]

    def both(impl, dtype, do, *x):
        o, pull = jax.vjp(lambda *y: run(impl, dtype, *y), *x)
        return o, pull(do.astype(o.dtype))

    *x, do = (jnp.asarray(y) for y in inputs(options.tokens, heads, options.dim))
    first = [y[:, :, :COMPARED] for y in x[:5]] + [y[:COMPARED] for y in x[5:]]
    first_do = do[:, :, :COMPARED]
    want_o, want = jax.jit(both, static_argnums=(0, 1))("reference", jnp.float32, first_do, *first)
    half = [y.astype(jnp.bfloat16) for y in x[:5]] + x[5:]
    forward = jax.jit(lambda *y: run("chunked", jnp.bfloat16, *y)).lower(*half).compile()
    pair = jax.jit(lambda *y: both("chunked", jnp.bfloat16, *y)).lower(do, *half).compile()
    o, grads = pair(do, *half)
    found = {
        "form": f"k3_jax chunked, jax {jax.__version__}",
        "device": jax.devices()[0].device_kind,
        "fwd_ms": median_ms(lambda: forward(*half), jax.block_until_ready, options.repeats),
        "fwd_bwd_ms": median_ms(lambda: pair(do, *half), jax.block_until_ready, options.repeats),
        "temp_mb": pair.memory_analysis().temp_size_in_bytes / 1e6,
    }
    got = [np.asarray(y[:, :, :COMPARED], np.float32) for y in (o, grads[0])]
    return found, got, [np.asarray(y, np.float32) for y in (want_o, want[0])]


def measure_fla(options, heads):
    """The Triton kernels' figures."""
    import torch
    from fla.ops.kda import chunk_kda

    *x, do = (torch.from_numpy(y).cuda() for y in inputs(options.tokens, heads, options.dim))
    x = [y.bfloat16() for y in x[:5]] + [x[5], x[6].reshape(-1)]
    x, do = [y.requires_grad_() for y in x], do.bfloat16()

    def run():
        q, k, v, g, beta, a_log, bias = x
        return chunk_kda(
            q, k, v, g, beta, A_log=a_log, dt_bias=bias, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            lower_bound=LOWER_BOUND,
        )[0]  # fmt: skip

    def forward():
        with torch.no_grad():
            return run()

    def both():
        o = run()
        return o, torch.autograd.grad(o, x, do)

    def wait(_):
        torch.cuda.synchronize()

    o, grads = both()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    version = importlib.metadata.version("fla-core")
    found = {
        "form": f"fla {version} chunk_kda, torch {torch.__version__}",
        "device": torch.cuda.get_device_name(),
        "fwd_ms": median_ms(forward, wait, options.repeats),
        "fwd_bwd_ms": median_ms(both, wait, options.repeats),
        "temp_mb": (torch.cuda.max_memory_allocated() - held) / 1e6,
    }
    return found, [y[:, :, :COMPARED].detach().float().cpu().numpy() for y in (o, grads[0])], None


SIDES = {"jax": measure_jax, "fla": measure_fla}


def side(options):
    """In a process of its own: figures as JSON, compared heads beside them."""
    found, got, want = SIDES[options.side](options, options.heads)
    np.savez(
        options.output.with_suffix(".npz"), got=got, **({} if want is None else {"want": want})
    )
    options.output.write_text(json.dumps(found))


def compare(options):
    """One row a side, our own first."""
    rows, want = [], None
    with tempfile.TemporaryDirectory() as folder:
        for name in SIDES:
            path = Path(folder, f"{name}.json")
            sizes = ("tokens", "heads", "dim", "repeats")
            flags = [f"--{x}={getattr(options, x)}" for x in sizes]
            command = [sys.executable, "-m", "benchmarks.kda_gpu", f"--side={name}", *flags]
            done = subprocess.run([*command, f"--output={path}"])
            if done.returncode:
                print(f"{name}: no figures (exit {done.returncode}; its message is above)")
                continue
            row, kept = json.loads(path.read_text()), np.load(path.with_suffix(".npz"))
            want = kept["want"] if "want" in kept else want
            if want is not None:
                pairs = zip(kept["got"], want, strict=True)
                row["error"], row["dq_error"] = (
                    float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs
                )
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--side", choices=SIDES, help="measure one side only, for `--output`")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; at least 1 call is needed")
    if options.side:
        if options.output is None:
            parser.error("--side needs --output")
        side(options)
        return
    rows = compare(options)
    print(f"T {options.tokens}, H {options.heads}, d {options.dim}, bfloat16")
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    if options.output:
        sizes = {"tokens": options.tokens, "heads": options.heads, "dim": options.dim}
        options.output.write_text(json.dumps(sizes | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
