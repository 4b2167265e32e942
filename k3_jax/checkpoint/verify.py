"""Whether two checkpoints, of either format, hold the same tensors, and answer alike."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3

from k3_jax.checkpoint.load import open_checkpoint
from k3_jax.checkpoint.safetensors import Buffer
from k3_jax.checkpoint.views import View, open_view
from k3_jax.model import K3
from sharding import make_mesh

BATCH = 256  # tensors that a thread takes at once


def differences(a: View, b: View, workers: int = 2) -> dict[str, str]:
    """What differs, by tensor: presence, dtype, shape, or BLAKE3 of the bytes.

    Also a tensor whose bytes are not those that it had when it was converted.
    """
    found = {key: "only in the first" for key in a.tensors.keys() - b.tensors.keys()}
    found |= {key: "only in the second" for key in b.tensors.keys() - a.tensors.keys()}
    same = []
    for key, info in a.tensors.items():
        if key not in b.tensors:
            continue
        other = b.tensors[key]
        if info == other:
            same.append(key)
        else:
            found[key] = f"{info.dtype} {info.shape} and {other.dtype} {other.shape}"
    with ThreadPoolExecutor(workers) as pool:
        batches = itertools.batched(same, BATCH)
        for part in pool.map(lambda keys: _differences_of(keys, a, b), batches):
            found |= {key: why for key, why in part if why}
    return found


def _differences_of(keys, a: View, b: View) -> list[tuple[str, str]]:
    buffer = Buffer()
    return [_difference(key, a, b, buffer) for key in keys]


def _difference(key: str, a: View, b: View, buffer: Buffer) -> tuple[str, str]:
    sums = []
    for view, which in ((a, "first"), (b, "second")):
        total = blake3()
        for piece in view.pieces(key, buffer):
            total.update(piece.reshape(-1).view(np.uint8))
        sums.append(total.hexdigest())
        if view.recorded.get(key, sums[-1]) != sums[-1]:
            return key, f"the {which} has other bytes than were converted"
    return key, "" if sums[0] == sums[1] else f"BLAKE3 {sums[0][:16]} and {sums[1][:16]}"


def verify(path_a, path_b, workers: int = 2, say: Callable = print) -> bool:
    """Prints what differs; True when nothing does."""
    views = [open_view(path) for path in (path_a, path_b)]
    for path, view in zip((path_a, path_b), views, strict=True):
        say(f"{path}: {len(view.tensors):,} tensors")
    found = differences(*views, workers)
    for key, why in itertools.islice(sorted(found.items()), 20):
        say(f"  {key}: {why}")
    if len(found) > 20:
        say(f"  and {len(found) - 20:,} more")
    n = len(views[0].tensors.keys() & views[1].tensors.keys() - found.keys())
    say(f"{n:,} tensors are equal in name, dtype, shape and BLAKE3, {len(found):,} are not")
    return not found


class Answers(NamedTuple):
    """Of one prompt: logits [T, V] in float32, and the experts [Z, T, A] of each MoE layer."""

    logits_TV: np.ndarray
    experts_ZTA: np.ndarray


def compare_logits(path_a, path_b, prompt: list[int], dtype: str, say: Callable = print) -> bool:
    """Runs the prompt through both checkpoints; True when the logits are equal, bit for bit.

    Where experts are nearly tied, the smallest error sends a token another way and makes parity
    look bad (T32). So the second checkpoint is also run with the first one's choices forced: what
    differs then is an error, what differed before was a tie. What goes into its experts is rounded
    as in the first one: a released checkpoint does not tell.
    """
    mesh = make_mesh(fsdp=-1)
    with jax.set_mesh(mesh):
        model = open_checkpoint(str(path_a), dtype).load()
        _check_prompt(prompt, model.config.vocab_size)
        activations = model.config.moe.activations
        first = _run(model, prompt, mesh.size)
        del model  # two at once may not fit
        model = open_checkpoint(str(path_b), dtype, activations=activations).load()
        free = _run(model, prompt, mesh.size)
        forced = _run(model, prompt, mesh.size, first.experts_ZTA)
    for z, (a, b) in enumerate(zip(first.experts_ZTA, free.experts_ZTA, strict=True)):
        same = np.mean([len({*x} & {*y}) / len(x) for x, y in zip(a, b, strict=True)])
        say(f"  MoE layer {z}: {same:.2%} of the chosen experts agree")
    for name, other in (("own routing", free), ("forced routing", forced)):
        error = np.max(np.abs(first.logits_TV - other.logits_TV))
        kl = _kl(first, other)
        say(f"  {name}: logits differ by at most {error:.3g}, KL {kl:.3g} nats a token")
    return np.array_equal(first.logits_TV, free.logits_TV)


def _check_prompt(prompt, vocab_size):
    if wrong := [t for t in prompt if not 0 <= t < vocab_size]:
        raise ValueError(f"prompt id {wrong[0]} is not in 0..{vocab_size - 1}")


@jax.jit
def _forward(model: K3, tokens_BT, forced_ZBTA):
    out = model(model.embed(tokens_BT), jnp.ones_like(tokens_BT), forced_ZBTA=forced_ZBTA)
    return model.logits(out.hidden_BTD), out.routing.experts_BTA


def _run(model: K3, prompt: list[int], n_rows: int, forced_ZTA=None) -> Answers:
    """Every device gets the same row, for rows are what the mesh splits."""
    tokens_BT = np.tile(np.array(prompt, np.int32), (n_rows, 1))
    if forced_ZTA is not None:
        forced_ZTA = np.repeat(forced_ZTA[:, None], n_rows, axis=1)
    logits_BTV, experts_ZBTA = _forward(model, tokens_BT, forced_ZTA)
    return Answers(np.asarray(logits_BTV)[0], np.asarray(experts_ZBTA)[:, 0])


def _kl(a: Answers, b: Answers) -> float:
    p, q = (jax.nn.log_softmax(np.float32(x.logits_TV)) for x in (a, b))
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))
