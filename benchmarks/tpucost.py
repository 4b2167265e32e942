"""What a program will cost on a TPU, asked of the TPU compiler on a machine without one.

    pip install libtpu==0.0.52

libtpu compiles ahead of time for a described chip. With its static profiler on it walks the final
machine code of every kernel, its own fusions and Pallas calls alike (latencies, issue slots, loop
trip counts, both cores of a v5p), and stores cycles in the compiled text, which `tpu_cost` adds up,
together with the HBM bytes of every operation. The modelled time of an operation is the larger of
cycles / clock and bytes / bandwidth, and the program's is their sum.

These are modelled times, for ratios between programs compiled the same way. Against published
measurements of other people's kernels reality was 0.72 to 1.45 times the model: dense matmuls 1.01
to 1.05, KDA kernels 1.07 to 1.45, and 0.72 where tiny copies bound. So an absolute figure is
optimistic by 5 to 45 %. The model sees no HBM contention, no traffic between chips, no clock
throttling. Copies overlap compute or not as scheduled, but their bandwidth is added by hand, above.

The profiler walks every grid step, so that big grids take minutes and gigabytes: profile two small
sizes, extrapolate, and take the bytes from one unprofiled compile at full size. It ends the process
on some programs (blocks with more than two strides, some matmuls on tpu7x, collectives) and guesses
trip counts that depend on data. libtpu reads its flags once in a process. Hence `ask`: each
question is put to a process of its own.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from k3_jax import chips
from k3_jax.hlo import Op, operations


class Chip(NamedTuple):
    """One JAX device: a chip, or one of the two cores of a tpu7x.

    clock, Hz: the one at which all matrix units together reach the public peak `flops` (bf16, 1/s).
    bandwidth of HBM, B/s. cores that share a grid's parallel axis.
    """

    topology: str
    clock: float
    flops: float
    bandwidth: float
    cores: int


def _chip(topology, clock, of, cores=1):
    return Chip(topology, clock, of.flops, of.bandwidth, cores)


CHIPS = {
    "v6e": _chip("v6e:2x2", 1.75e9, chips.V6E),
    "tpu7x": _chip("tpu7x:2x2x1", 2.20e9, chips.TPU7X),
    "v5p": _chip("v5p:2x2x1", 1.75e9, chips.V5P, cores=2),
    "v5e": _chip("v5e:2x2", 1.50e9, chips.V5E),
}


class NoFigure(Exception):
    """A question that a process could not answer; the text says why."""


def versions() -> dict:
    """Of jax and libtpu. Raises SystemExit with the command that installs a missing libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit(f"the TPU compiler is not installed: pip install {chips.LIBTPU}")
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def check_chips(names: list[str]) -> list[str]:
    """The names, if all are chips that the model knows; else ValueError."""
    for name in names:
        if name not in CHIPS:
            raise ValueError(f"no figures for a chip {name!r}; the chips are {', '.join(CHIPS)}")
    return names


def environment(folder, profile: bool, in_hbm: bool) -> dict:
    """Variables for a process that compiles; they must be set before it first asks for a chip.

    profile: count cycles; the profiler writes its files to `folder`. in_hbm: operands stay in HBM,
    as they must at full size, instead of moving into a VMEM that is large beside a small problem.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    if profile:
        # The profiler reads finished code again and would stop at packed types.
        flags += [f"--xla_jf_dump_static_llo_profile_to={folder}"]
        flags += ["--xla_tpu_check_llo_types=false"]
    if in_hbm:
        flags += ["--xla_msa_enable=false"]
    return {
        "JAX_PLATFORMS": "cpu",
        **chips.LOOK_FOR_NONE,
        "LIBTPU_INIT_ARGS": " ".join(flags),
    }


def ask(module: str, *, profile, in_hbm=True, python=sys.executable, seconds=600, **question):
    """What `python -m module` answers (see `answer`). Raises NoFigure if it ends without a word."""
    with tempfile.TemporaryDirectory(prefix="tpucost-") as folder:
        command = [python, "-m", module, json.dumps(question)]
        variables = os.environ | environment(folder, profile, in_hbm)
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise NoFigure(f"left out: more than {seconds} s to compile") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if not lines:
        raise NoFigure(f"no figure: {last_words(done.stderr, done.returncode)}")
    return json.loads(lines[-1].removeprefix("ANSWER "))


def answer(function):
    """Print function(**question) for `ask`; for the end of a module that is asked."""
    print("ANSWER", json.dumps(function(**json.loads(sys.argv[1]))))


def last_words(errors: str, code: int) -> str:
    """What a dead process' errors say, from its fatal line or else from its last error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no message"]
    fatal = [n for n, x in enumerate(lines) if re.match(r"F\d{4} ", x)]
    telling = fatal or [n for n, x in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", x)]
    start = telling[-1] if telling else len(lines) - 1
    words = re.sub(r"^F\d{4} .*?\] ", "", " ".join(lines[start:])).partition(" === ")[0]
    return f"exit {code}: {words[:300]}"


def row(labels: dict, figures) -> dict:
    """A row of a table: labels, then figures() or, where there are none, a note."""
    try:
        return labels | figures()
    except NoFigure as error:
        return labels | {"note": str(error)}


def target(chip: str):
    """The context in which traced code takes `chip` for its device, as pallas_call asks."""
    mesh = Mesh(np.array([_device(chip)]), ("chip",))
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def tpu_cost(function, shapes, chip: str, **jit_options) -> dict:
    """Compile function(*shapes) for a chip.

    Returns ops (a list of Op), cycles, us (modelled), us_core, us_hbm, hbm_bytes, temp_bytes (HBM
    beside arguments and results), flops (XLA's count; loop bodies once, Pallas calls not), and
    compile_s. Without the profiler's flag (`environment`) cycles are XLA's own guesses.
    """
    start, sharding = time.time(), SingleDeviceSharding(_device(chip))
    jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding, **jit_options)
    with target(chip):
        compiled = jitted.lower(*shapes).compile()
    seconds, ops = time.time() - start, operations(compiled.as_text())
    _, clock, _, bandwidth, _ = CHIPS[chip]
    cycles = sum(op.runs * (op.cycles or 0) for op in ops)
    moved = sum(op.runs * op.bytes for op in ops)
    us = sum(op.runs * max((op.cycles or 0) / clock, op.bytes / bandwidth) for op in ops) * 1e6
    return {
        "ops": ops,
        "cycles": cycles,
        "us": us,
        "us_core": cycles / clock * 1e6,
        "us_hbm": moved / bandwidth * 1e6,
        "hbm_bytes": moved,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "compile_s": round(seconds, 1),
    }


def kernels(ops: list[Op]) -> dict:
    """{name: (cycles, bytes)} of the Pallas calls, by their names without the numbers behind."""
    sums = {}
    for op in ops:
        if op.opcode == "custom-call":
            name = re.sub(r"\.\d+$", "", op.name)
            cycles, moved = sums.get(name, (0, 0))
            sums[name] = (cycles + op.runs * (op.cycles or 0), moved + op.runs * op.bytes)
    return sums


def figures(chip: str, cycles: float, moved: float, floor: float | None = None) -> dict:
    """Modelled microseconds of one kernel, beside those of moving `floor` bytes of HBM, if any."""
    core_us = cycles / CHIPS[chip].clock * 1e6
    hbm_us = moved / CHIPS[chip].bandwidth * 1e6
    us = max(core_us, hbm_us)
    found = {"us": us, "core_us": core_us, "hbm_us": hbm_us, "hbm_bytes": round(moved)}
    if floor is not None:
        floor_us = floor / CHIPS[chip].bandwidth * 1e6
        found |= {"floor_us": floor_us, "over_floor": us / floor_us}
    return found


def line_through(x1, y1, x2, y2, x):
    """y at x on the line through two points: cost is linear in the number of grid steps."""
    if x1 == x2:
        raise ValueError(f"two measurements at one size, {x1}, give no slope")
    return y1 + (y2 - y1) * (x - x1) / (x2 - x1)


def _device(chip):
    versions()
    topology = CHIPS[check_chips([chip])[0]].topology
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
