"""What quantisation-aware training multiplies: routed experts as they will be served.

Report sections 4.1.1 and 4.1.4: their weights are MXFP4 (groups of 32 inputs, E8M0 scales), their
input activations MXFP8, from the start of post-training on. All else stays as it was, and the
weights that the optimizer changes are not rounded. The report does not say; chosen here:

* the rule of the weights' scales: the smallest power of two that clips nothing (`mxfp4`);
* E4M3 for activations, groups of 32, scales by the OCP rule, which saturates (`to_mxfp8`);
* "input activations" are those of each of the three products: the latent before gate and up, and
  what SiTU-GLU made of them before down;
* rounding to the nearest, ties to even, of weights and activations;
* gradients pass as if nothing was rounded, those of saturated values too.

Modelled on a v5p: to round 4,096 rows of 3,584 takes 127 us, where one pass over them takes 21,
because XLA first turns them, so that groups lie along sublanes. Weights: in `mxfp4`.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from k3_jax.quant import mxfp4
from pallas_kernels.experts import from_mxfp8, to_mxfp8
from sharding.rules import named


def straight_through(fn: Callable) -> Callable:
    """fn(x), of x's shape and dtype, with the gradient of x."""
    run = jax.custom_vjp(fn)
    run.defvjp(lambda x: (fn(x), None), lambda _, dy: (dy,))
    return run


@straight_through
def as_mxfp4(w_ELF):
    """Experts' weights, inputs on the last axis but one, as `mxfp4.pack` would keep them."""
    return mxfp4.rounded(w_ELF)


@straight_through
def as_mxfp8(x_NL):
    """Rows as `to_mxfp8` would keep them: what its pair stands for, in x's dtype."""
    return from_mxfp8(*to_mxfp8(x_NL)).astype(x_NL.dtype)


def with_whole_groups(w_ELF):
    """The weights where no group of inputs is cut: what splits inputs splits outputs instead, or
    where these do not divide, nothing.

    A part then rounds its own groups, and what is gathered afterwards may be narrow.
    """
    *lead, inputs, outputs = jax.typeof(w_ELF).sharding.spec
    sizes = jax.sharding.get_abstract_mesh().shape
    if w_ELF.shape[-2] % (mxfp4.BLOCK * math.prod(sizes[a] for a in named(inputs))) == 0:
        return w_ELF
    both = named(outputs) + named(inputs)
    fits = w_ELF.shape[-1] % math.prod(sizes[a] for a in both) == 0
    return jax.reshard(w_ELF, P(*lead, None, both if fits else outputs))
