"""The short causal convolution before KDA's delta rule: the door that every caller uses."""

import jax

from pallas_kernels.common import automatic
from pallas_kernels.conv import reference
from pallas_kernels.conv.mosaic import conv_mosaic, obstacle
from pallas_kernels.conv.sequence import short_conv_sharded

IMPLS = ("auto", "pallas", "reference")

__all__ = ["short_conv", "short_conv_sharded"]


def short_conv(
    u_BTX: jax.Array,
    taps_WX: jax.Array,
    history_BWX: jax.Array,
    segments_BT: jax.Array,
    *,
    impl: str = "auto",
):
    """SiLU of a depthwise causal convolution that stays inside each document. k3-facts 3.4.

    y_t = silu(sum_w taps[w] u_{t - (W-1) + w}); the last tap meets the current token. `history`
    holds the W-1 inputs before the row's first token, oldest first (zeros at a document's start);
    they belong to the row's first document. Tokens of other documents and pads (segment 0) count
    as zeros, whatever stands there, and y at pads is zero. Sums in float32, result in u's dtype.
    X stands for one or more channel axes.

    impl: "reference" (jnp and its autodiff), "pallas" (TPU kernels for both directions, which save
    their inputs only and sum the taps' gradient in float32: bfloat16 u [B, T, X], X a multiple of
    128, up to four taps), or "auto": "pallas" on a TPU for more than one token; else, and told in
    the log on a TPU for what the kernel cannot take, "reference".
    Returns y and the history for the tokens that follow the row's last real one: rows are padded
    on the right only where the history is used.
    Raises ValueError for an unknown impl and for shapes that do not fit together.
    """
    _check(u_BTX, taps_WX, history_BWX, segments_BT)
    if impl not in IMPLS:
        raise ValueError(f"short_conv: impl={impl!r} is unknown; allowed are {IMPLS}")
    if impl == "auto":
        why_not = obstacle(u_BTX.shape, u_BTX.dtype, len(taps_WX))
        one = u_BTX.shape[1] == 1
        impl = "reference" if one else automatic("Short convolution", "reference", obstacle=why_not)
    if impl == "reference":
        return reference.short_conv(u_BTX, taps_WX, history_BWX, segments_BT)
    y_BTX = conv_mosaic((None, False), u_BTX, taps_WX, history_BWX, segments_BT)
    return y_BTX, reference.history_after(u_BTX, history_BWX, segments_BT)


def _check(u_BTX, taps_WX, history_BWX, segments_BT):
    if u_BTX.ndim < 3 or 0 in u_BTX.shape:
        raise ValueError(f"short_conv: u must be [B, T, X] with no empty axis, got {u_BTX.shape}")
    (B, T, *X), W = u_BTX.shape, len(taps_WX)
    wants = {
        "taps": (taps_WX.shape, (W, *X)),
        "history": (history_BWX.shape, (B, W - 1, *X)),
        "segments": (segments_BT.shape, (B, T)),
    }
    for name, (got, want) in wants.items():
        if got != want:
            raise ValueError(
                f"short_conv: {name} has shape {got}; u {u_BTX.shape} and {W} taps want {want}"
            )
