"""The short causal convolution before KDA's delta rule."""

import jax
import jax.numpy as jnp


def short_conv(
    u_BTX: jax.Array, taps_WX: jax.Array, history_BWX: jax.Array, segments_BT: jax.Array
):
    """SiLU of a depthwise causal convolution that stays inside each document. k3-facts 3.4.

    y_t = silu(sum_w taps[w] u_{t - (W-1) + w}); the last tap meets the current token. `history`
    holds the W-1 inputs before the row's first token, oldest first (zeros at a document's start);
    they belong to the row's first document. Tokens of other documents and pads (segment 0) count
    as zeros. Sums in float32, result in u's dtype. X stands for one or more channel axes.

    Returns y and the history for the tokens that follow the row's last real one: rows are padded
    on the right only where the history is used.
    """
    B, T = segments_BT.shape
    W = taps_WX.shape[0]
    channels = (1,) * (u_BTX.ndim - 2)
    # The history's tokens carry the first real token's segment, so they meet its document only.
    real_BT = segments_BT != 0
    first_B1 = jnp.take_along_axis(segments_BT, jnp.argmax(real_BT, 1, keepdims=True), 1)
    before_BW = jnp.broadcast_to(first_B1, (B, W - 1))
    segments = jnp.concatenate([before_BW, segments_BT], axis=1)
    real = real_BT.reshape(B, T, *channels)
    inputs = jnp.concatenate([history_BWX.astype(u_BTX.dtype), jnp.where(real, u_BTX, 0)], axis=1)

    y = jnp.zeros(u_BTX.shape, jnp.float32)
    for w in range(W):
        same = (segments[:, w : w + T] == segments_BT).reshape(B, T, *channels)
        tap = taps_WX[w].astype(jnp.float32)
        y = y + jnp.where(same, inputs[:, w : w + T].astype(jnp.float32), 0) * tap

    n_real_B = jnp.sum(real_BT, axis=1)
    recent_BW = n_real_B[:, None] + jnp.arange(W - 1)
    history = jnp.take_along_axis(inputs, recent_BW.reshape(B, W - 1, *channels), axis=1)
    return jax.nn.silu(y).astype(u_BTX.dtype), history.astype(history_BWX.dtype)
