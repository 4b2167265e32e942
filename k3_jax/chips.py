"""Public peak figures of accelerators, by JAX's `device_kind`."""

import jax

# Dense bfloat16 FLOP/s per JAX device: Google's TPU system architecture pages (a tpu7x device is
# one of a chip's two TensorCores) and NVIDIA's data sheets (SXM, without sparsity).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops() -> float | None:
    """Peak bfloat16 FLOP/s of one device here, or None where it is not known (such as a CPU)."""
    return PEAK_FLOPS.get(jax.devices()[0].device_kind)
