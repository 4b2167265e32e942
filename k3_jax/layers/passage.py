"""What can be seen of a layer at work."""

from typing import NamedTuple

import jax

from k3_jax.layers.attn_res import Bank
from k3_jax.state import Rows


class Passage(NamedTuple):
    """The running sum before a layer, between its sub-layers and after it, and the normed mixtures
    that these were given."""

    before_BTD: jax.Array
    is_first: jax.Array
    bank: Bank
    rows: Rows
    attn_in_BTD: jax.Array
    between_BTD: jax.Array
    ffn_in_BTD: jax.Array
    after_BTD: jax.Array


def unseen(layer, at: Passage) -> None:
    """Looks away."""
