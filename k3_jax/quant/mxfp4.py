"""MXFP4: blocks of 32 four-bit floats (E2M1) with one power-of-two scale (E8M0). k3-facts 2.5.

A byte holds two values along the last axis, the even one in the low nibble. A scale byte e means
2^(e - 127); 255 is NaN. Widening is exact in bfloat16 and float32.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BLOCK = 32
# Of `pack`: what quantisation-aware training rounds by, and so what its models are packed by. The
# report does not say; chosen here, because only this rule leaves blocks whose largest is 3 units,
# and the release seems to have some (k3-facts 4.4).
TRAINED_RULE = "ceil"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """A weight as it is stored: `packed` uint8 [..., n/2] and `scales` uint8 [..., n/32].

    Both numpy or both jax arrays. Checkpoints store it as a folder of these two names.
    """

    packed: np.ndarray | jax.Array
    scales: np.ndarray | jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that it holds."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


def unpack(packed, scales, dtype=np.float32):
    """uint8 [..., n/2] and uint8 [..., n/32] -> [..., n] of numpy, or of jax where they are.

    Raises ValueError on a NaN scale; under jit, where bytes are not known, it becomes infinity.
    """
    check_shapes(packed.shape, scales.shape)
    is_jax = isinstance(packed, jax.Array)
    if not isinstance(scales, jax.core.Tracer) and (n := int((scales == 255).sum())):
        raise ValueError(f"{n} scale bytes are 255, which is NaN in E8M0")
    blocks = packed.reshape(*scales.shape, BLOCK // 2)
    if is_jax:
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
        bits = bfloat16_bits(jnp, codes, scales[..., None, None].astype(jnp.int16))
        bits = bits.reshape(*packed.shape[:-1], -1)
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)
    pairs = _pairs()[scales[..., None].astype(np.uint16) << 8 | blocks]
    values = pairs.view(np.dtype("bfloat16")).reshape(*packed.shape[:-1], -1)
    return values.astype(dtype, copy=False)


@functools.cache
def _pairs() -> np.ndarray:
    """For each scale and each byte the two bfloat16 numbers, as one uint32."""
    byte = np.arange(256, dtype=np.uint8)
    codes = np.stack([byte & 15, byte >> 4], axis=-1)
    bits = bfloat16_bits(np, codes, np.arange(256, dtype=np.int16)[:, None, None])
    return bits.view(np.uint32).ravel()


def bfloat16_bits(xp, codes, exponents):
    """uint16 bits of code * 2^(exponent - 127), by integers alone.

    Vector units flush subnormal floats to zero; integers keep them.
    """
    magnitude = codes & 7
    # Of 1.m * 2^x: x grows from -1 (0.5) every second code from 1 (code 2) on; code 1 has m = 0.
    field = exponents + (magnitude >> 1).astype(xp.int16) - (magnitude != 0) * xp.int16(1)
    field = xp.where(magnitude == 1, exponents - xp.int16(1), field)
    half = (magnitude & 1) & (magnitude > 1)
    fraction = xp.uint16(0x80) | half.astype(xp.uint16) << xp.uint16(6)
    normal = (field.astype(xp.uint16) << xp.uint16(7)) + (fraction & xp.uint16(0x7F))
    small = fraction >> xp.clip(1 - field, 0, 15).astype(xp.uint16)
    bits = xp.where(field > 0, xp.where(field > 254, xp.uint16(0x7F80), normal), small)
    bits = xp.where(magnitude == 0, xp.uint16(0), bits)
    return bits | (codes >> 3).astype(xp.uint16) << xp.uint16(15)


def check_shapes(packed: tuple[int, ...], scales: tuple[int, ...]):
    """Raises ValueError unless these are the shapes of one weight."""
    if packed[-1] * 2 != scales[-1] * BLOCK or packed[:-1] != scales[:-1]:
        raise ValueError(
            f"packed {packed} and scales {scales} do not belong together: "
            f"{packed[-1] * 2} values are not {scales[-1]} blocks of {BLOCK}"
        )


def pack(values: np.ndarray, rule: str = "floor") -> tuple[np.ndarray, np.ndarray]:
    """[..., n] -> uint8 [..., n/2] and uint8 [..., n/32], rounding ties to even codes.

    rule "floor" takes the exponent floor(log2 amax) - 2 (the OCP rule: values above 6 units
    saturate); "ceil" takes the smallest exponent at which nothing saturates. A block of zeros gets
    scale byte 0. Raises ValueError on non-finite values, an unknown rule or n not of 32.
    """
    if rule not in ("floor", "ceil"):
        raise ValueError(f"rule={rule!r} is not one of floor, ceil")
    if values.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {values.shape} is not a multiple of {BLOCK}")
    x = values.astype(np.float64).reshape(*values.shape[:-1], -1, BLOCK)
    if not np.all(np.isfinite(x)):
        raise ValueError(f"{np.sum(~np.isfinite(x))} values are not finite")
    scales = _scale_bytes(np, np.max(np.abs(x), axis=-1), rule).astype(np.uint8)
    units = np.ldexp(x, 127 - scales[..., None].astype(np.int32))
    codes = units.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = codes.reshape(*values.shape[:-1], -1, 2)
    return codes[..., 0] | codes[..., 1] << 4, scales


def rounded(w):
    """jax [..., n, F] -> what `pack` by TRAINED_RULE would keep of it, in its dtype. Blocks lie
    along the last axis but one, where our experts have their inputs.

    Equal to what is packed to the bit, but for blocks whose largest magnitude is below 2^-122:
    there vector units flush subnormal floats to zero. What is not finite stays so.
    """
    units, scales = _units(w)
    return (units * _power(scales)).reshape(w.shape).astype(w.dtype)


def pack_rounded(w):
    """jax [..., n, F] -> the codes and scales of `rounded`, as `pack` gives them: uint8
    [..., F, n/2] and [..., F, n/32]."""
    units, scales = _units(w)
    # Codes from 2 on are the last bit of the exponent field and the first of the fraction, and up.
    field = jax.lax.bitcast_convert_type(jnp.abs(units), jnp.int32) >> 22
    codes = jnp.maximum(field - 2 * 126, 0) + (jnp.abs(units) == 0.5) + 8 * jnp.signbit(units)
    codes = jnp.swapaxes(codes.astype(jnp.uint8).reshape(w.shape), -1, -2)
    scales = jnp.swapaxes(jnp.squeeze(scales, -2), -1, -2).astype(jnp.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def _units(w):
    """[..., n/32, 32, F], each a number of E2M1, and its blocks' scale bytes [..., n/32, 1, F]."""
    x = w.astype(jnp.float32).reshape(*w.shape[:-2], -1, BLOCK, w.shape[-1])
    # Not of magnitudes, which XLA would write to memory first. Modelled for 22 million numbers on a
    # v5p, us: 88 so, 149 of magnitudes, 48 for the cast to bfloat16 alone.
    high, low = (f(x, axis=-2, keepdims=True) for f in (jnp.max, jnp.min))
    scales = _scale_bytes(jnp, jnp.maximum(high, -low), TRAINED_RULE)
    x *= _power(254 - scales)
    # Steps between E2M1's numbers are 0.5 below 2, 1 below 4, then 2. `round` has ties to even.
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.round(x / step) * step, scales


def _scale_bytes(xp, largest, rule: str):
    """The scale byte of blocks with these largest magnitudes, int32."""
    # frexp gives largest = m 2^e with m in [0.5, 1): the exact floor of the logarithm is e - 1.
    mantissa, exponent = xp.frexp(largest)
    exponent = exponent - 3 + ((mantissa > 0.75) if rule == "ceil" else 0)
    return xp.where(largest == 0, 0, xp.clip(exponent + 127, 0, 254))


def _power(bytes):
    """2^(e - 127) in float32, for e of 1..254; 0 for 0."""
    return jax.lax.bitcast_convert_type(bytes.astype(jnp.int32) << 23, jnp.float32)
