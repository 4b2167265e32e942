"""QK-Clip: heads of MLA whose attention logits grow too large get smaller weights after a step."""

import jax.numpy as jnp

from k3_jax.tree import named_leaves, with_leaves

F32 = jnp.float32


def clip_logits(model, largest, most: float):
    """The model whose heads had logits of at most `most`, were the step's batch run again.

    Where a head's largest logit S exceeds `most`, with g = most / S, its content query and content
    key weights (the k part of q_b, and k_b) shrink by sqrt(g) each, and its query weights for the
    key part that all heads share (the r part of q_b) by g, as that key is not the head's own. Both
    parts of the logit shrink by g. Report section 3.3 keeps Kimi K2's clip (arXiv 2507.20534),
    whose rotated parts are K3's shared part; the threshold is not published, 100 is K2's. KDA has
    no such logits: its queries and keys are normalised.

    largest: as `k3_jax.model.Output` has it, of the weights before the step; a run of KDA layers
    has None.
    """
    leaves = named_leaves(model)
    for path, largest_H in named_leaves(largest).items():
        block, part, run = path.split("/")
        where = f"blocks/{block}/parts/{part}/runs/{run}/attn"
        q_b, k_b = leaves[f"{where}/q_b_QHq"], leaves[f"{where}/k_b_CHk"]
        g_1H1 = (most / jnp.maximum(largest_H, most))[..., None, :, None]
        is_content_q = jnp.arange(q_b.shape[-1]) < k_b.shape[-1]
        leaves[f"{where}/q_b_QHq"] = _scaled(q_b, jnp.where(is_content_q, jnp.sqrt(g_1H1), g_1H1))
        leaves[f"{where}/k_b_CHk"] = _scaled(k_b, jnp.sqrt(g_1H1))
    return with_leaves(model, leaves)


def largest_of_all(largest):
    """The largest logit of any head, a scalar."""
    return jnp.max(jnp.stack([jnp.max(x) for x in named_leaves(largest).values()]))


def _scaled(w, factor):
    return (w.astype(F32) * factor).astype(w.dtype)
