"""The short causal convolution before KDA's delta rule, in jnp."""

import jax
import jax.numpy as jnp

TAPS = 4  # as many as the kernel takes; K3 has them


def short_conv(u_BTX, taps_WX, history_BWX, segments_BT):
    """y and the history after, as at the door. X stands for one or more channel axes."""
    first_B1 = first_segment(segments_BT)
    y_BTX = convolve(u_BTX, taps_WX, history_BWX, segments_BT, first_B1)
    return y_BTX, history_after(u_BTX, history_BWX, segments_BT)


def first_segment(segments_BT):
    """The document that each row's history belongs to: that of its first real token."""
    at_B1 = jnp.argmax(segments_BT != 0, 1, keepdims=True)
    return jnp.take_along_axis(segments_BT, at_B1, 1)


def convolve(u_BTX, taps_WX, history_BWX, segments_BT, first_B1):
    """SiLU of the sums, in u's dtype; zero at pads."""
    B, T = segments_BT.shape
    W = len(taps_WX)
    channels = (1,) * (u_BTX.ndim - 2)
    real_BT = segments_BT != 0
    segments = jnp.concatenate([jnp.broadcast_to(first_B1, (B, W - 1)), segments_BT], axis=1)
    real = real_BT.reshape(B, T, *channels)
    inputs = jnp.concatenate([history_BWX.astype(u_BTX.dtype), jnp.where(real, u_BTX, 0)], axis=1)

    y = jnp.zeros(u_BTX.shape, jnp.float32)
    for w in range(W):
        same = ((segments[:, w : w + T] == segments_BT) & real_BT).reshape(B, T, *channels)
        tap = taps_WX[w].astype(jnp.float32)
        y = y + jnp.where(same, inputs[:, w : w + T].astype(jnp.float32), 0) * tap
    return jax.nn.silu(y).astype(u_BTX.dtype)


def history_after(u_BTX, history_BWX, segments_BT):
    """The W - 1 inputs before the token that would follow the row's last real one."""
    B, T = segments_BT.shape
    n = history_BWX.shape[1]
    channels = (1,) * (u_BTX.ndim - 2)
    real_BT = segments_BT != 0
    at_Bn = jnp.sum(real_BT, 1, keepdims=True) + jnp.arange(n) - n

    def rows(x_BTX, at_Bn):
        at = jnp.clip(at_Bn, 0, x_BTX.shape[1] - 1)
        return jnp.take_along_axis(x_BTX, at.reshape(B, n, *(1,) * (x_BTX.ndim - 2)), axis=1)

    real = rows(real_BT, at_Bn).reshape(B, n, *channels)
    late = jnp.where(real, rows(u_BTX, at_Bn), 0).astype(history_BWX.dtype)
    early = rows(history_BWX, at_Bn + n)
    return jnp.where((at_Bn < 0).reshape(B, n, *channels), early, late)
