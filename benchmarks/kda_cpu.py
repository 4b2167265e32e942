"""CPU time and memory of the KDA op against the recurrence under `jax.lax.scan`.

    OMP_NUM_THREADS=2 python -m benchmarks.kda_cpu --output kda_cpu.json

Float32, B = 1, T = 2048, H = 4 unless told otherwise. Times are medians over `--repeats` runs in
milliseconds; the forms take turns, so that a busy machine slows all of them alike. "x" columns are
speeds relative to the scan. `temp` is the compiler's own plan for temporaries of forward+backward,
in MB. The public tokamax op in its XLA chunk form joins in when tokamax can be imported. The norms
of q and k and the gate are part of that op, so they are inside every timed function.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pallas_kernels import kda  # noqa: E402


def inputs(t, h, d):
    """Raw q, k, v and gate, and beta."""
    keys = jax.random.split(jax.random.key(0), 5)
    raw = [jax.random.normal(key, (1, t, h, d)) for key in keys[:4]]
    return (*raw, jax.nn.sigmoid(jax.random.normal(keys[4], (1, t, h))))


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def ours(impl):
    def run(q_BTHk, k_BTHk, v_BTHv, gate_BTHk, beta_BTH):
        b, t, h, d = q_BTHk.shape
        q_BTHk, k_BTHk = unit(q_BTHk) * d**-0.5, unit(k_BTHk)
        g_BTHk = -5 * jax.nn.sigmoid(gate_BTHk)
        state_BHkv = jnp.zeros((b, h, d, v_BTHv.shape[-1]))
        segments_BT = jnp.ones((b, t), jnp.int32)
        return kda(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT, impl=impl)[0]

    return run


def tokamax_chunked():
    """The tokamax op as a function of raw inputs, or None where tokamax is missing."""
    try:
        from tokamax._src.ops.kda.api import kimi_delta_attention
    except ImportError:
        return None

    def run(q_BTHk, k_BTHk, v_BTHv, gate_BTHk, beta_BTH):
        heads, d = q_BTHk.shape[2], q_BTHk.shape[3]
        heads_first = [jnp.moveaxis(x, 2, 0) for x in (q_BTHk, k_BTHk, v_BTHv, gate_BTHk, beta_BTH)]
        o_HBTv, _ = kimi_delta_attention(
            *heads_first,
            a_log=jnp.zeros(heads),
            delta_time_bias=jnp.zeros(heads * d),
            use_qk_l2norm=True,
            use_gate_in_kernel=True,
            lower_bound=-5.0,
            implementation="xla_chunked",
        )
        return jnp.moveaxis(o_HBTv, 0, 2)

    return run


def forward_and_backward(run):
    def both(x, do_BTHv):
        out, pull = jax.vjp(run, *x)
        return out, pull(do_BTHv)

    return both


def compare(t, h, d, repeats):
    """One result row a form; the scan comes first."""
    x = inputs(t, h, d)
    forms = {"recurrence under scan": ours("reference"), "k3_jax chunked": ours("chunked")}
    if (peer := tokamax_chunked()) is not None:
        version = importlib.metadata.version("tokamax")
        forms[f"tokamax {version} xla_chunked"] = peer
    calls = {}
    for name, run in forms.items():
        forward = jax.jit(run).lower(*x).compile()
        both = jax.jit(forward_and_backward(run)).lower(x, x[2]).compile()
        calls[name] = (forward, both, both.memory_analysis().temp_size_in_bytes)
    times = {name: ([], []) for name in forms}
    for _ in range(repeats):
        for name, (forward, both, _) in calls.items():
            work = ((times[name][0], forward, x), (times[name][1], both, (x, x[2])))
            for kept, call, args in work:
                jax.block_until_ready(call(*args))  # takes caches and pages back from the others
                start = time.perf_counter()
                jax.block_until_ready(call(*args))
                kept.append(1e3 * (time.perf_counter() - start))
    want = calls["recurrence under scan"][0](*x)
    rows = []
    for name, (forward, _, temp) in calls.items():
        error = float(jnp.linalg.norm(forward(*x) - want) / jnp.linalg.norm(want))
        fwd, bwd = (statistics.median(kept) for kept in times[name])
        rows.append(
            {
                "form": name,
                "d": d,
                "fwd_ms": fwd,
                "fwd_bwd_ms": bwd,
                "fwd_min_ms": min(times[name][0]),
                "fwd_bwd_min_ms": min(times[name][1]),
                "temp_mb": temp / 1e6,
                "error": error,
            }
        )
        rows[-1]["fwd_x"] = rows[0]["fwd_ms"] / fwd
        rows[-1]["fwd_bwd_x"] = rows[0]["fwd_bwd_ms"] / bwd
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head sizes")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", help="file for the figures as JSON")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; at least 1 run is needed")
    machine = {
        "jax": jax.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "tokens": args.tokens,
        "heads": args.heads,
        "repeats": args.repeats,
    }
    print("  ".join(f"{k} {v}" for k, v in machine.items()))
    head = f"{'form':32}{'d':>5}{'fwd ms':>10}{'x':>7}{'fwd+bwd ms':>12}{'x':>7}"
    print(f"{head}{'temp MB':>9}{'error':>9}")
    rows = []
    for d in args.dims:
        for r in compare(args.tokens, args.heads, d, args.repeats):
            print(
                f"{r['form']:32}{d:5}{r['fwd_ms']:10.1f}{r['fwd_x']:7.2f}{r['fwd_bwd_ms']:12.1f}"
                f"{r['fwd_bwd_x']:7.2f}{r['temp_mb']:9.1f}{r['error']:9.1e}",
                flush=True,
            )
            rows.append(r)
    machine["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"largest resident set of this process: {machine['max_rss_mb']:.0f} MB")
    if args.output:
        with open(args.output, "w") as f:
            json.dump({"machine": machine, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
