"""Text in, packed rows of tokens out."""

from k3_jax.data.loader import Loader, heldout_batches

__all__ = ["Loader", "heldout_batches"]
