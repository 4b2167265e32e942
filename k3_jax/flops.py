"""Model FLOPs by arithmetic: what the network needs, whatever an implementation spends."""

from k3_jax.config import ModelConfig


def forward_flops_per_token(c: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward pass in rows of `seq_len` tokens (2 per multiply-add).

    Matrix products with active weights, MLA's causal scores and sums (seq_len / 2 keys on
    average), and KDA's recurrence (three products of k x v per head: error, write, read).
    """
    m = c.mla
    key = m.key_dim + m.shared_key_dim + m.value_dim
    return _flops_per_token(c, key * seq_len / 2)


def decode_flops_per_token(c: ModelConfig, n_keys: int) -> float:
    """The same of a token that attends to `n_keys` latents as they are in the cache."""
    return _flops_per_token(c, (2 * c.mla.kv_latent + c.mla.shared_key_dim) * n_keys)


def _flops_per_token(c: ModelConfig, attention: float) -> float:
    """`attention`: multiply-adds of one MLA head with its keys."""
    D, n_mla = c.width, len(c.mla_layers)
    n_kda, n_moe = c.n_layers - n_mla, c.n_layers - c.n_dense
    P = c.kda.n_heads * c.kda.head_dim
    kda = 5 * D * P + c.kda.head_dim * (D + P) + D * c.kda.n_heads + 3 * P * c.kda.conv_width
    kda += 3 * P * c.kda.head_dim
    m, H = c.mla, c.mla.n_heads
    q = m.key_dim + m.shared_key_dim
    mla = m.query_latent * (D + H * q) + D * (m.kv_latent + m.shared_key_dim)
    mla += m.kv_latent * H * (m.key_dim + m.value_dim) + 2 * D * H * m.value_dim
    mla += H * attention
    e = c.moe
    moe = D * e.n_experts + 2 * D * e.latent_width + 3 * D * e.n_shared * e.expert_width
    moe += e.n_active * 3 * e.latent_width * e.expert_width
    total = n_kda * kda + n_mla * mla + n_moe * moe + c.n_dense * 3 * D * c.dense_width
    return 2.0 * (total + D * c.vocab_size)


def train_flops_per_token(c: ModelConfig, seq_len: int, is_frozen: bool = False) -> float:
    """Forward and backward, 3 times the forward; recomputation does not count.

    is_frozen: weights have no gradient and their products 2 of the 3 (KDA's recurrence is counted
    as one of them); adapters' own products are left out.
    """
    forward = forward_flops_per_token(c, seq_len)
    return 3 * forward - is_frozen * forward_flops_per_token(c, 0)
