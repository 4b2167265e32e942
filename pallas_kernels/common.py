"""What every kernel room needs."""

import logging
from functools import cache

import jax
import jax.numpy as jnp


def dot32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` with float32 sums and result; float32 operands are not rounded on the way."""
    if a.dtype == b.dtype == jnp.float32:
        return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)

    def narrow(a, b):
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    def wide(a, b):
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))

    # XLA:CPU fails at run time on some bfloat16 products with a float32 result (jaxlib 0.12.0.1:
    # "Unsupported element type for DotThunk"). Widening is exact. Chosen by the platform that is
    # compiled for, so that compiling for a TPU on a CPU machine gets the TPU's program.
    return jax.lax.platform_dependent(a, b, cpu=wide, default=narrow)


def varying(x) -> frozenset:
    """The manual mesh axes over which x differs; none outside `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x, axes: frozenset):
    """x as one that differs over `axes` too."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def platform() -> str:
    """What is compiled for: the devices of the context's mesh, else the default ones here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def automatic(what: str, elsewhere: str, *, tpu="pallas", gpu="", obstacle="") -> str:
    """What impl="auto" is: `tpu` on a TPU unless there is an obstacle, `gpu` on a GPU if given.

    Each choice is told in the log once, with the obstacle where that decided.
    """
    here = platform()
    impl = {"tpu": "" if obstacle else tpu, "gpu": gpu}.get(here) or elsewhere
    _tell(what, here, impl, f": {obstacle}" if here == "tpu" and obstacle else "")
    return impl


@cache
def _tell(what, platform, impl, reason):
    logging.getLogger(__name__).info("%s on %s: %s%s", what, platform, impl, reason)
