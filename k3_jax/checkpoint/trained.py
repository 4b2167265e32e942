"""What a checkpoint's own words say of how it was trained."""

from k3_jax.config import is_quantized
from k3_jax.quant.mxfp4 import TRAINED_RULE


def quantized_rule(meta: dict, step: int) -> str:
    """The rule of `mxfp4.pack` that the experts of this step were trained with; "" for none."""
    return TRAINED_RULE if is_quantized(meta["config"].get("qat_from_step", 0), step) else ""
