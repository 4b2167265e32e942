"""MXFP4: blocks of 32 four-bit floats (E2M1) with one power-of-two scale (E8M0). k3-facts 2.5.

A byte holds two values along the last axis, the even one in the low nibble. A scale byte e means
2^(e - 127); 255 is NaN. Widening is exact in bfloat16 and float32.
"""

import ml_dtypes
import numpy as np

BLOCK = 32
# The eight magnitudes of E2M1; bit 3 of a code is the sign, so code 8 is -0.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def unpack(packed: np.ndarray, scales: np.ndarray, dtype=np.float32) -> np.ndarray:
    """uint8 [..., n/2] and uint8 [..., n/32] -> [..., n]. Raises ValueError on a NaN scale."""
    if packed.shape[-1] * 2 != scales.shape[-1] * BLOCK:
        raise ValueError(
            f"packed {packed.shape} and scales {scales.shape} do not belong together: "
            f"{packed.shape[-1] * 2} values are not {scales.shape[-1]} blocks of {BLOCK}"
        )
    if np.any(scales == 255):
        raise ValueError(f"{np.sum(scales == 255)} scale bytes are 255, which is NaN in E8M0")
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    # ldexp on float32 keeps subnormal results, which a product with 2^(e-127) could flush.
    values = np.ldexp(CODES[nibbles], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*packed.shape[:-1], -1).astype(dtype)


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
    largest = np.max(np.abs(x), axis=-1)
    # frexp gives largest = m 2^e with m in [0.5, 1): the exact floor of the logarithm is e - 1.
    mantissa, exponent = np.frexp(largest)
    exponent = exponent - 3 + ((mantissa > 0.75) if rule == "ceil" else 0)
    scales = np.where(largest == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
    units = np.ldexp(x, 127 - scales[..., None].astype(np.int32))
    codes = units.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = codes.reshape(*values.shape[:-1], -1, 2)
    return codes[..., 0] | codes[..., 1] << 4, scales
