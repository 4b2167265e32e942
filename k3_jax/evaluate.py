"""The held-out loss."""

import math

import jax
import numpy as np

from k3_jax.config import TrainConfig
from k3_jax.model import K3
from k3_jax.tokenizer import Tokenizer
from k3_jax.train_step import loss_sums
from sharding.hosts import global_rows, row_share


class HeldOut:
    """Mean cross entropy of the same held-out rows every time, per token and per byte of text."""

    def __init__(self, config: TrainConfig, batches, tokenizer: Tokenizer, mesh):
        self._batches = list(batches)
        self._mesh = mesh
        # The bytes are counted on this process's share of the rows, the targets on all.
        own_bytes = sum(_target_bytes(b, tokenizer) for b in self._batches)
        self._bytes = own_bytes * row_share(mesh)[1]
        if not self._bytes:
            raise ValueError(
                f"no document is held out (data.holdout={config.data.holdout}); raise it, or set "
                "eval_every=0"
            )
        self._sums = jax.jit(
            lambda model, rows, quantized: loss_sums(model, config, rows, quantized)[0],
            static_argnames="quantized",
        )

    def __call__(self, model: K3, quantized: bool = False) -> dict[str, float]:
        """{"heldout_loss": nats per token, "heldout_bits_per_byte": ...}.

        `quantized`: of experts as they will be served.
        """
        nats, count = 0.0, 0
        for batch in self._batches:
            rows = {k: global_rows(v, self._mesh) for k, v in batch.items()}
            sums = jax.device_get(self._sums(model, rows, quantized=quantized))
            nats, count = nats + float(sums.nats), count + int(sums.count)
        return {
            "heldout_loss": nats / count,
            "heldout_bits_per_byte": nats / math.log(2) / self._bytes,
        }


def _target_bytes(batch, tokenizer) -> int:
    """Bytes of text that the targets of a batch spell: all that is learned but each document's
    first token."""
    n = 0
    masks = batch.get("mask", np.ones_like(batch["tokens"]))
    for tokens, segments, mask in zip(batch["tokens"], batch["segments"], masks, strict=True):
        for segment in np.unique(segments[segments != 0]):
            is_inside = segments == segment
            targets = tokens[is_inside][1:][mask[is_inside][1:] != 0]
            n += len(tokenizer.decode(targets.tolist()).encode())
    return n
