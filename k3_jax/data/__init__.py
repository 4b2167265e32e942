"""Text in, packed rows of tokens out."""

from k3_jax.data.loader import Loader, heldout_batches
from k3_jax.data.stages import StagedLoader

__all__ = ["Loader", "StagedLoader", "heldout_batches"]
