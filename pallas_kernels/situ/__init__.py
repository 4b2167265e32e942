"""SiTU-GLU, the activation of the dense, shared and routed FFNs. Kimi K3 report, Eq. 12."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.situ import fused, reference

FORMS = {"fused": fused, "reference": reference}
IMPLS = ("auto", *FORMS)
DTYPES = (jnp.bfloat16, jnp.float32)

__all__ = ["situ_glu"]


def situ_glu(
    gate_x: jax.Array, up_x: jax.Array, beta: float, linear_beta: float, *, impl: str = "auto"
) -> jax.Array:
    """y = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), elementwise.

    gate and up are bfloat16 or float32 of one shape [..., F]; float32 inside, y in their dtype.
    Saves only its inputs. A NaN stays in its own element. |y| < beta * linear_beta for finite
    inputs: where the nearest value is the bound itself, y is the one before it (for K3's 100 that
    is 99.5 in bfloat16). Gradients ignore this last step and are finite for finite inputs.
    impl: "reference" is the definition and its autodiff, "fused" the short forms of both; "auto"
    is "fused". Their difference: `fused` on bfloat16 gates, 1e-5 in y at most before rounding.

    There is no Pallas kernel for it alone because it would not pay; those of experts' products make
    it themselves (`pallas_kernels.experts`). Modelled on v5p, v6e and tpu7x at K3's
    three widths, both directions, "fused" is at most 1.05 of the HBM floor, a kernel of the same
    arithmetic 1.09 ("reference": 1.5); the kernel led in one case of 18, by 1.5 %. Between matmuls
    XLA computes "fused" inside them, which a kernel forbids: a small FFN with its gradients takes
    154 us on v6e and 182 on v5p, 172 and 193 with the kernel, 177 and 200 with "reference".
    Raises ValueError for shapes, dtypes, betas or an impl that do not fit.
    """
    _check(gate_x, up_x, beta, linear_beta)
    if impl not in IMPLS:
        raise ValueError(f"situ_glu: impl={impl!r} is not one of {IMPLS}")
    form = FORMS["fused" if impl == "auto" else impl]
    return form.situ_glu(gate_x, up_x, float(beta), float(linear_beta))


def _check(gate_x, up_x, beta, linear_beta):
    if gate_x.shape != up_x.shape or gate_x.dtype != up_x.dtype:
        raise ValueError(
            "situ_glu: gate and up must share one shape and dtype; got "
            f"{gate_x.dtype} {gate_x.shape} and {up_x.dtype} {up_x.shape}"
        )
    if gate_x.dtype not in DTYPES:
        raise ValueError(f"situ_glu: inputs must be bfloat16 or float32; got {gate_x.dtype}")
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"situ_glu: {name} must be positive and finite; got {value}")
