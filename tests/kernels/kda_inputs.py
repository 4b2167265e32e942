"""Inputs of KDA as projected, and the float64 recurrence on them, shared by the kernel's tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import gated_kda

BOUND = -5.0
NAMES = ("q", "k", "v", "logit", "beta", "a_log", "bias", "state")


def projected(T, seed=0, B=1, H=1, d=128, dtype=jnp.bfloat16, decay=0.0, V=None):
    """Normal inputs, K = d and V = d if None.

    `decay` shifts the gate's logits: -12 nearly keeps, 12 nearly forgets.
    """
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.standard_normal(shape).astype(np.float32)

    widths = {"q": d, "k": d, "v": V or d}
    x = {name: jnp.asarray(normal(B, T, H, width), dtype) for name, width in widths.items()}
    x["logit"] = jnp.asarray(normal(B, T, H, d) + decay, dtype)
    x["beta"] = jnp.asarray(normal(B, T, H), dtype)
    x["a_log"], x["bias"] = jnp.asarray(0.1 * normal(H)), jnp.asarray(0.1 * normal(H, d))
    x["state"] = jnp.asarray(0.3 * normal(B, H, d, V or d))
    return x


def cotangents(x, seed=1):
    """Gradients to pull back: of o and of the state after."""
    r = np.random.default_rng(seed)
    do, dstate = (r.standard_normal(x[name].shape).astype(np.float32) for name in ("v", "state"))
    return jnp.asarray(do, x["v"].dtype), jnp.asarray(dstate)


def pulled(f, x, grads, segments):
    """o, the state after and the gradients of all inputs, by name."""
    order = [x[name] for name in NAMES]
    (o, state), pull = jax.vjp(lambda *a: f(*a, segments), *order)
    return dict(zip(("o", "after", *NAMES), (o, state, *pull(grads)), strict=True))


@jax.jit
def exact(x, grads, segments):
    """`pulled` of the token recurrence in float64."""
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), (x, grads))
    return pulled(partial(gated_kda, lower_bound=BOUND, impl="reference"), *wide, segments)


def error(got, want):
    """|got - want| / |want|, Frobenius; |got| where want is zero."""
    got, want = (np.asarray(a.astype(jnp.float64)).ravel() for a in (got, want))
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)
