"""Router loads under Quantile Balancing, from a badly skewed start.

    python -m benchmarks.balancing

896 experts, 16 a token, fresh tokens every step, no training: only the bias moves. 5 % of the
experts have a head start in their logits. Prints the largest load over the mean, step by step.
"""

import argparse
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from k3_jax.balancing import next_biases, tally
from k3_jax.config import MoeConfig
from pallas_kernels.top_k import top_k
from sharding import act_spec, make_mesh, on_shards

N_EXPERTS, N_ACTIVE, FAVOURED = 896, 16, 45


class Router(NamedTuple):
    """Logits: normal with this mean and spread, and `ahead` more for 45 experts."""

    mean: float
    ahead: float
    spread: float


ROUTERS = {
    "sparse": Router(-4.0, 6.0, 1.0),
    "narrow": Router(0.0, 4.0, 0.3),
    "saturated": Router(0.0, 4.0, 1.0),
}


def config(balance: str = "quantile") -> MoeConfig:
    sizes = dict(n_experts=N_EXPERTS, n_active=N_ACTIVE, latent_width=1, expert_width=1)
    return MoeConfig(**sizes, balance=balance)


def scores(router: Router, n_tokens: int, seed: int, step: int):
    """[1, T, E] of the step's own tokens."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    noise_BTE = jax.random.normal(key, (1, n_tokens, N_EXPERTS))
    ahead_E = jnp.where(jnp.arange(N_EXPERTS) < FAVOURED, router.ahead, 0)
    return jax.nn.sigmoid(router.mean + router.spread * noise_BTE + ahead_E)


@partial(jax.jit, static_argnames="c")
def balance_step(c: MoeConfig, bias_ZE, scores_aBTE):
    """The next bias of one layer and this step's loads, from its micro-batches' scores."""

    def choose(scores_BTE, bias_E):
        B, T, E = scores_BTE.shape
        chosen = top_k(scores_BTE.reshape(B * T, E), c.n_active + 1, bias_E=bias_E)
        return chosen.reshape(B, T, -1)

    tallied, required = None, []
    for scores_BTE in scores_aBTE:
        scores_BTE = jax.reshard(scores_BTE, act_spec("BTE"))
        chosen_BTA = on_shards(choose, "BTE,E -> BTA")(scores_BTE, bias_ZE[0])
        counted_BT = jnp.ones_like(chosen_BTA[..., 0], bool)
        found, left = tally(c, scores_BTE, bias_ZE[0], chosen_BTA, counted_BT)
        tallied = found if tallied is None else jax.tree.map(jnp.add, tallied, found)
        required.append(left)
    tallied = jax.tree.map(lambda x: x[None], tallied)
    required = None if required[0] is None else jnp.stack(required)[:, None]
    return next_biases(c, bias_ZE, tallied, required), jnp.sum(tallied.load_PE, axis=(0, 1))


def loads(router: Router, n_tokens: int, n_steps: int, c: MoeConfig, seed: int = 0) -> list[float]:
    """Largest load over the mean load in each step, from a bias of zeros."""
    bias_ZE, found = jax.reshard(jnp.zeros((1, N_EXPERTS)), P()), []
    make = jax.jit(partial(scores, router, n_tokens, seed))
    for step in range(n_steps):
        bias_ZE, load_E = balance_step(c, bias_ZE, make(step)[None])
        found.append(float(jnp.max(load_E) / jnp.mean(load_E)))
    return found


def bound(n_tokens: int) -> float:
    """1 + 6 / sqrt(q): what is left to chance, q tokens being an expert's fair share."""
    return 1 + 6 / (n_tokens * N_ACTIVE / N_EXPERTS) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="2048,16384", help="tokens a step, one or more")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--balance", default="quantile,exact")
    options = parser.parse_args()
    jax.set_mesh(make_mesh(devices=jax.devices()[:1]))
    print("max/mean load; step 0 is routed without a bias")
    for n_tokens in map(int, options.tokens.split(",")):
        for name, router in ROUTERS.items():
            for balance in options.balance.split(","):
                found = loads(router, n_tokens, options.steps, config(balance))
                print(
                    f"{n_tokens} tokens, bound {bound(n_tokens):.2f}, {name} router, {balance}: "
                    + " ".join(f"{x:.2f}" for x in found),
                    flush=True,
                )


if __name__ == "__main__":
    main()
