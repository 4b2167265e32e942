"""A program compiled for TPUs that are not here: does it fit, what does it move, how long at best.

libtpu compiles ahead of time for a described slice; no weight is made. Memory is the compiler's
figure for one device, traffic that of the compiled text (`k3_jax.hlo`). Seconds are arithmetic with
public figures (`k3_jax.chips`); nothing is measured. They are told twice: with compute, HBM and the
links of each dimension of the torus (and network, of several slices) all overlapping, where the
longest is the step, and one after another, where their sum is.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.checkpoint.tree import placed
from k3_jax.checkpoint.zarr import replace_text
from k3_jax.checks import check_serving, check_stages
from k3_jax.chips import CHIPS, LIBTPU, LOOK_FOR_NONE, Chip
from k3_jax.config import (
    ModelConfig,
    Stage,
    TrainConfig,
    as_served,
    current,
    from_dict,
    is_quantized,
)
from k3_jax.flops import decode_flops_per_token, forward_flops_per_token, train_flops_per_token
from k3_jax.hlo import collectives, operations
from k3_jax.model import abstract, fresh_cache
from k3_jax.optim import make_optimizer, schedule
from k3_jax.serving import engine
from k3_jax.state import SLOTS
from k3_jax.train_step import init_state, jit_options, train_step
from sharding import act_spec, make_mesh
from sharding.balance import LENT

GB = 1e9


class DoesNotFit(ValueError):
    """The message says which kinds of memory take how much of the device's."""


def described_devices(topology: str, slices: int = 1) -> list:
    """The devices of slices such as "v5p:4x4x4". Raises ValueError where none can be described."""
    if not re.fullmatch(r"\w+:\d+x\d+(x\d+)?", topology):
        raise ValueError(f"--topology={topology!r} is not of the form v6e:8x8 or v5p:4x4x4")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"--compile_only needs the TPU compiler: pip install {LIBTPU}")
    for name, value in LOOK_FOR_NONE.items():
        os.environ.setdefault(name, value)
    several = dict(num_slices=slices) if slices > 1 else {}
    try:
        described = topologies.get_topology_desc(topology, platform="tpu", **several)
    except (RuntimeError, ValueError) as e:
        raise ValueError(f"--topology={topology!r}: {str(e).splitlines()[0]}") from None
    chip = CHIPS.get(kind := described.devices[0].device_kind)
    if chip is None or (several and chip.network is None):
        of = "the network of " if chip else ""
        raise ValueError(f"no figures for {of}{kind!r} in k3_jax/chips.py")
    return list(described.devices)


def shard_bytes(tree) -> int:
    """Bytes on one device of a tree of placed arrays."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )


def report(jitted, args: tuple, kinds: dict, flops: float, tokens: int, again: float = 1) -> dict:
    """Compile jitted(*args), abstract and placed, and say what a device would need.

    kinds: what stands in memory before the call, by names for people. flops: what the model needs
    for a call of `tokens`, all devices together; `again` times that is spent. Bytes and seconds
    are of one device. Raises DoesNotFit.
    """
    mesh = jax.sharding.get_mesh()
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    kinds = {name: shard_bytes(tree) for name, tree in kinds.items()}
    start = time.monotonic()
    lowered = jitted.lower(*args)
    traced = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise DoesNotFit(refusal(kinds, str(e), chip)) from None
    done = time.monotonic()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kinds["results beside what they replace"] = (
        memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    kinds["activations and other temporaries"] = memory.temp_size_in_bytes
    if sum(kinds.values()) > chip.memory:
        raise DoesNotFit(refusal(kinds, "", chip))
    found = traffic(text, mesh, chip)
    found["compute_s"] = again * flops / mesh.size / chip.flops
    bounds = {name: found[f"{name.lower()}_s"] for name in ("compute", "HBM", "network")}
    one_by_one = sum(bounds.values()) + found["links_s"]
    bounds["links"] = max(found["links_of_dimension_s"])
    seconds = [max(bounds.values()), one_by_one]
    return {
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "mesh": {a: n for a, n in mesh.shape.items() if n > 1},
        "memory_bytes": kinds,
        "memory_of_device": chip.memory,
        "trace_and_lower_s": round(traced - start, 1),
        "compile_s": round(done - traced, 1),
        **found,
        "bound": max(bounds, key=bounds.get),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second_and_device": [tokens / mesh.size / s for s in seconds],
        "model_flops_utilisation": [flops / mesh.size / chip.flops / s for s in seconds],
    }


def refusal(kinds: dict[str, int], said: str, chip: Chip) -> str:
    """Which kinds of memory are too much, and by how much."""
    needs = re.search(r"Used ([\d.]+)([KMGT]) of ([\d.]+)[KMGT] hbm", said)
    held = ", ".join(f"{name} {n / GB:.1f} GB" for name, n in kinds.items())
    largest = max(kinds, key=kinds.get)
    if needs:
        used = float(needs.group(1)) * 1024 ** ("KMGT".index(needs.group(2)) + 1)
        more = f"{(used - sum(kinds.values())) / GB:.1f} GB of activations and other temporaries"
        if used - sum(kinds.values()) > kinds[largest]:
            largest = "activations and other temporaries"
    else:
        used, more = sum(kinds.values()), "nothing else counted"
    return (
        f"does not fit: a device has {chip.memory / GB:.1f} GB and this needs {used / GB:.1f}, "
        f"{(used - chip.memory) / GB:.1f} too much: {held}, {more}. The largest part: {largest}"
    )


def traffic(text: str, mesh: jax.sharding.Mesh, chip: Chip) -> dict:
    """HBM bytes of the program, and its exchanges by operation and mesh axes.

    Those of lent experts' weights are apart: they are counted full, but the more even the router's
    choices, the fewer are lent.
    """
    moved = sum(op.runs * op.bytes for op in operations(text))
    rows: dict[tuple, dict] = {}
    of_dimension = np.zeros(chip.torus)
    for op in collectives(text):
        if op.slices > 1:
            axes, seconds = ("slices",), op.sent / chip.network
        elif len(op.group) > 1:
            axes, sides = spanned(op.group, mesh, chip)
            busy = seconds_on_links(op, sides, chip)
            of_dimension += op.runs * busy
            seconds = float(busy.max())
        else:
            continue
        what = f"{op.opcode} of lent experts" if LENT in op.scopes else op.opcode
        row = rows.setdefault((what, axes), {"runs": 0, "sent_bytes": 0.0, "seconds": 0.0})
        row["runs"] += op.runs
        row["sent_bytes"] += op.runs * op.sent
        row["seconds"] += op.runs * seconds
    listed = [{"operation": o, "axes": "*".join(a), **row} for (o, a), row in rows.items()]
    listed.sort(key=lambda row: -row["seconds"])
    network = sum(row["seconds"] for row in listed if row["axes"] == "slices")
    return {
        "hbm_bytes": moved,
        "hbm_s": moved / chip.bandwidth,
        "links_s": sum(row["seconds"] for row in listed) - network,
        "links_of_dimension_s": of_dimension.tolist(),
        "network_s": network,
        "collectives": listed,
    }


def spanned(
    group: tuple[int, ...], mesh: jax.sharding.Mesh, chip: Chip
) -> tuple[tuple[str, ...], list[tuple[int, bool]]]:
    """The mesh axes along which a group's devices differ; and for each dimension of the torus how
    many chips it spans, and whether these close a ring."""
    at = np.array(np.unravel_index(group, mesh.devices.shape))
    axes = tuple(a for a, x in zip(mesh.axis_names, at, strict=True) if len(set(x)) > 1)
    sizes = 1 + np.max([d.coords for d in mesh.devices.flat], axis=0)
    places = np.array([mesh.devices.flat[i].coords for i in group])
    spans = [len(set(column)) for column in places.T][: chip.torus]
    sides = zip(spans, sizes, strict=False)
    return axes, [(n, n == size and chip.closes_ring(size)) for n, size in sides]


def seconds_on_links(op, sides: list[tuple[int, bool]], chip: Chip) -> np.ndarray:
    """How long one run keeps the links of each dimension of the torus busy.

    All dimensions that a group spans are at work at once. Sums and gathers pass both ways round a
    ring, and one way along a line. In an all-to-all along n chips a link carries n/8 of what a
    device sends in a ring, and n/4 in the middle of a line. The two devices of a TPU7x chip alone:
    no link is passed, and none is counted.
    """
    one_way = chip.links / (2 * chip.torus)
    if "all-to-all" in op.opcode:
        share = np.array([n / (8 if ring else 4) if n > 1 else 0 for n, ring in sides])
        return op.sent * share / one_way
    ways = np.array([(2 if ring else 1) if n > 1 else 0 for n, ring in sides])
    return op.sent * (ways > 0) / (one_way * max(ways.sum(), 1))


def tell(path: str | None, reports: dict[str, dict]) -> None:
    """Print reports by their titles as tables; with a path save them as JSON, whole or not."""
    for title, found in reports.items():
        print("\n".join(lines(f"One {title}", found)), end="\n\n")
    if path:
        epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(epath.Path(path), json.dumps(reports, indent=1) + "\n")
        print(f"saved as {path}")


def lines(title: str, found: dict) -> list[str]:
    """The report as a table for people."""
    total = sum(found["memory_bytes"].values())
    mesh = " x ".join(f"{a} {n}" for a, n in found["mesh"].items()) or "one device"
    out = [f"{title}: {found['devices']} x {found['device']} ({mesh})", "", "GB of HBM a device"]
    out += [f"  {n / GB:9.3f}  {name}" for name, n in found["memory_bytes"].items()]
    out += [f"  {total / GB:9.3f}  of {found['memory_of_device'] / GB:.1f}", ""]
    out += ["seconds a call, modelled from public figures, not measured"]
    parts = {"FLOPs": found["compute_s"], "HBM traffic": found["hbm_s"]}
    parts["links, one exchange after another"] = found["links_s"]
    parts["links of the busiest dimension"] = max(found["links_of_dimension_s"])
    if found["network_s"]:
        parts["network between slices"] = found["network_s"]
    out += [f"  {n:11.6f}  {name}" for name, n in parts.items()]
    best, worst = found["seconds"]
    out += [f"  {best:11.6f}  all overlapping (bound: {found['bound']})"]
    out += [f"  {worst:11.6f}  one after another"]
    rates, used = found["tokens_per_second_and_device"], found["model_flops_utilisation"]
    out += ["", f"tokens a second and device: {rates[1]:,.1f} to {rates[0]:,.1f}"]
    out += [f"model FLOPs utilisation: {used[1]:.1%} to {used[0]:.1%}"]
    out += ["", "GB sent, seconds, runs of each exchange"]
    for row in found["collectives"]:
        out.append(
            f"  {row['sent_bytes'] / GB:9.3f}  {row['seconds']:11.6f}  {row['runs']:6d}  "
            f"{row['operation']} over {row['axes']}"
        )
    out += ["", f"traced in {found['trace_and_lower_s']} s, compiled in {found['compile_s']} s"]
    return out


def train_reports(config: TrainConfig, topology: str) -> dict[str, dict]:
    """`report` of a training step of each stage of a run on a described slice, or of
    `config.stage`. Raises ValueError."""
    devices = described_devices(topology, config.mesh.slices)
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    check_stages(config, mesh, vocab_size=0, n_processes=1)
    return {f"step of {s.name or 'training'}": _step_report(s, mesh) for s in current(config)}


def _step_report(stage: Stage, mesh: jax.sharding.Mesh) -> dict:
    config = stage.config
    data, rows = config.data, config.data.batch // config.accumulate
    is_remat = config.model.remat in ("layer", "group")
    with jax.set_mesh(mesh):
        tx = make_optimizer(config.optim, config.steps)
        state = jax.tree.map(placed, jax.eval_shape(functools.partial(init_state, config, tx)))
        shape = (config.accumulate, rows, data.seq_len)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, act_spec(".B")))
        batch = {"tokens": ids, "segments": ids}
        rate = schedule(config.optim, config.steps)
        quantized = is_quantized(config.qat_from_step, stage.last)
        base, kinds = None, {"parameters": state.model}
        if is_frozen := bool(config.lora.base):
            base = jax.tree.map(placed, abstract(config.model))
            kinds = {"parameters, frozen": base, "adapters": state.model}
        step = functools.partial(
            train_step, config=config, tx=tx, learning_rate=rate, quantized=quantized
        )
        tokens = data.batch * data.seq_len
        return report(
            jax.jit(step, **jit_options(mesh)),
            (state, batch, base),
            {**kinds, "optimizer": state.opt, "batch": batch},
            tokens * train_flops_per_token(config.model, data.seq_len, is_frozen),
            tokens,
            again=(3 / 2 if is_frozen else 4 / 3) if is_remat else 1,
        )


def serve_reports(
    model: dict,
    dtype: str,
    is_packed: bool,
    activations: str | None,
    topology: str,
    sizes: dict[str, int],
    rows_a_device: int,
    *,
    piece: int,
    max_length: int,
) -> dict[str, dict]:
    """`report` of a piece of a prompt and of a next token, for full rows of `max_length` tokens.

    model: a `ModelConfig` as a mapping; sizes: of the mesh axes. Raises ValueError.
    """
    config = from_dict(ModelConfig, model, "config.model")
    config = as_served(config, dtype, is_packed, activations)
    mesh = make_mesh(**sizes, devices=described_devices(topology))
    check_serving(config, mesh)
    B, S = rows_a_device * mesh.size, engine.bucket(max_length, SLOTS, 4, max_length)
    with jax.set_mesh(mesh):
        k3 = jax.tree.map(placed, abstract(config))
        cache = jax.tree.map(placed, jax.eval_shape(functools.partial(fresh_cache, config, B, S)))
        whole = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
        rows = (
            whole((B,), jnp.int32),
            jax.tree.map(lambda x: whole(x.shape, x.dtype), engine.fresh_draw(B)),
        )

        def compiled(n, flops):
            args = (k3, cache, whole((B, n), jnp.int32), *rows)
            return report(
                engine.step, args, {"parameters": k3, "cache": cache}, B * n * flops, B * n
            )

        return {
            f"piece of {piece} tokens for {B} rows of {S}": compiled(
                piece, forward_flops_per_token(config, S)
            ),
            f"next token for {B} rows of {S}": compiled(1, decode_flops_per_token(config, S)),
        }
