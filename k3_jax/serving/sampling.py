"""Which token comes next: each row by its own settings and its own random numbers."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding import on_shards

# name: (types, lowest, highest, what the limits mean)
LIMITS = {
    "max_tokens": ((int,), 1, 2**31 - 1, "at least 1"),
    "temperature": ((float, int), 0, 100, "0 (always the likeliest token) to 100"),
    "top_k": ((int,), 0, 2**31 - 1, "at least 1, or 0 for all tokens"),
    "top_p": ((float, int), 1e-6, 1, "above 0 and at most 1"),
    "min_p": ((float, int), 0, 1, "from 0 to 1"),
    "seed": ((int,), 0, 2**32 - 1, "from 0 to 4294967295"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How one row is continued. Raises ValueError naming the field and what is allowed.

    Top-k, then top-p, then min-p exclude tokens from the distribution at `temperature`. A row
    stops at one of `stop_ids`, before one of the texts in `stop`, or after `max_tokens`.
    `ignore_eos` leaves out the ids that the checkpoint and its tokenizer end with, not `stop_ids`.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        for name, (types, low, high, allowed) in LIMITS.items():
            value = getattr(self, name)
            if type(value) not in types or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
        if 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature={self.temperature}: must be 0 or at least 0.0001")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop={list(self.stop)!r}: must be non-empty strings")
        if not all(type(i) is int and i >= 0 for i in self.stop_ids):
            raise ValueError(f"stop_ids={list(self.stop_ids)!r}: must be token ids")
        if type(self.ignore_eos) is not bool:
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: must be true or false")


class Draw(NamedTuple):
    """The settings of all rows as arrays, so that no setting asks for another program.

    `request_B` and `number_B` (how many tokens the row has drawn) select the random numbers with
    `seed_B`: neither a row's neighbours nor its slot matter.
    """

    temperature_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    min_p_B: np.ndarray
    seed_B: np.ndarray
    request_B: np.ndarray
    number_B: np.ndarray


class Drawn(NamedTuple):
    """A token a row, its log-probability before temperature and exclusions, and whether every
    logit was finite. Where one was not, the token means nothing: argmax of NaN is 0 (T10)."""

    token_B: jax.Array
    logprob_B: jax.Array
    is_finite_B: jax.Array


def draw_tokens(logits_BV, draw: Draw) -> Drawn:
    """Greedy where the temperature is 0, else by Gumbel noise: argmax(logits / temperature + G)."""
    return Drawn(*on_shards(_draw, "B." + ",B" * len(draw) + " -> B,B,B")(logits_BV, *draw))


def _draw(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, request_B, number_B):
    def noise_V(seed, request, number):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request), number)
        return jax.random.gumbel(key, logits_BV.shape[1:])

    is_greedy_B1 = (temperature_B == 0)[:, None]
    scaled_BV = logits_BV / jnp.where(is_greedy_B1, 1, temperature_B[:, None])
    # The sorts are worth skipping: most batches exclude nothing.
    excludes = jnp.any((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0))
    kept_BV = jax.lax.cond(
        excludes, exclude, lambda x_BV, *_: x_BV, scaled_BV, top_k_B, top_p_B, min_p_B
    )
    noisy_BV = kept_BV + jax.vmap(noise_V)(seed_B, request_B, number_B)
    token_B = jnp.argmax(jnp.where(is_greedy_B1, logits_BV, noisy_BV), axis=-1)
    logprobs_BV = jax.nn.log_softmax(logits_BV)
    logprob_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, logprob_B, jnp.all(jnp.isfinite(logits_BV), axis=-1)


def exclude(scaled_BV, top_k_B, top_p_B, min_p_B):
    """The logits with -inf for the tokens that top-k, then top-p, then min-p exclude.

    Top-p keeps the fewest tokens that together reach p of what top-k left; min-p keeps those with
    at least min_p times the greatest probability. Between equal logits the lower id comes first.
    """
    V = scaled_BV.shape[1]
    # Made from the logits, so that both operands of the sort vary alike over the mesh.
    ids_BV = jnp.zeros_like(scaled_BV, jnp.int32) + jnp.arange(V)
    falling_BV, id_BV = jax.lax.sort((-scaled_BV, ids_BV), num_keys=1)
    is_kept_BV = ids_BV < jnp.where(top_k_B > 0, top_k_B, V)[:, None]
    p_BV = jax.nn.softmax(jnp.where(is_kept_BV, -falling_BV, -jnp.inf))
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    # Rounded sums may pass 1 before the last token: 1 must keep them all.
    is_kept_BV &= (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    is_kept_BV &= p_BV >= min_p_B[:, None] * p_BV[:, :1]
    _, is_kept_BV = jax.lax.sort((id_BV, is_kept_BV), num_keys=1)
    return jnp.where(is_kept_BV, scaled_BV, -jnp.inf)
