"""The picture of the rooms, kept true: who may import whom, how long things get, what is banned.

Every rule takes the root of a tree and returns its violations, one readable line each. It is run on
this repository, and on a small tree with a fault planted in it that it has to find.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("k3_jax", "pallas_kernels", "sharding")
CODE = (*PACKAGES, "configs", "benchmarks", "tests", "train.py", "serve.py", "setup.py")
PROGRAMS = {"train", "serve", "benchmarks", "tests"}

# Where a package may look, besides the standard library and itself. None: any library.
LOOKS_AT = {
    "pallas_kernels": {"jax", "numpy"},
    "sharding": {"jax", "numpy"},
    "configs": {"k3_jax.config", "ml_collections"},
}
# A module of k3_jax imports none that stands on a later line.
ORDER = (
    {"config", "tokenizer"},
    {"axes", "state", "quant"},
    {"layers"},
    {"vision", "model"},
    {"loss"},
    {"train_step"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# They stand beside that order, never see each other, and are not seen by it, with one exception:
# the train step applies the optimizer.
BESIDE = {"optim", "data", "checkpoint", "serving"}
MAY_SEE_BESIDE = {("train_step", "optim")}

FILE_LINES = {"pallas_kernels": 600, "train.py": 200, "serve.py": 120}
# A configuration is one flat table of values.
FUNCTION_LINES = {"pallas_kernels": 120, "configs": 100}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "misc", "manager", "managers", "base"}
NNX_TRANSFORMS = {
    *("jit", "scan", "vmap", "pmap", "shard_map", "grad", "value_and_grad", "vjp", "jvp"),
    *("remat", "checkpoint", "cond", "switch", "while_loop", "fori_loop", "custom_vjp"),
    *("eval_shape", "Optimizer", "ModelAndOptimizer"),
}


def files(root, top=None):
    """Every Python file of the project below root, or of one top-level name."""
    for name in CODE if top is None else (top,):
        path = root / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(root, path):
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root, path):
    """(line, full dotted name) of everything the file imports, at any depth, relative or not.

    `from a.b import c` gives a.b.c, whether c is a module or a name in one: rules compare prefixes.
    """
    package = path.relative_to(root).parent.parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def all_imports(root, top=None):
    for path in files(root, top):
        for line, name in imports(root, path):
            yield path, f"{path.relative_to(root)}:{line}", name


def dotted(node):
    """'jax.lax.scan' of such an expression; the last part alone where it starts with a call."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def names_used(root):
    """(file:line, dotted name) of every name read or imported."""
    for path in files(root):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute | ast.Name):
                yield f"{path.relative_to(root)}:{node.lineno}", dotted(node)
    for _, where, name in all_imports(root):
        yield where, name


def within(name, allowed):
    return any(name == a or name.startswith(a + ".") for a in allowed)


def packages_look_only_down(root):
    for top, allowed in LOOKS_AT.items():
        for _, where, name in all_imports(root, top):
            if name.split(".")[0] not in sys.stdlib_module_names and not within(
                name, allowed | {top}
            ):
                yield f"{where}: {top} imports {name}; it may import {sorted(allowed)} and itself"


def k3_jax_knows_no_program(root):
    for _, where, name in all_imports(root, "k3_jax"):
        if within(name, PROGRAMS | {"configs"}):
            yield f"{where}: k3_jax imports {name}, which stands above it"


def k3_jax_keeps_its_order(root):
    for path, where, name in all_imports(root, "k3_jax"):
        if not name.startswith("k3_jax."):
            continue
        importer = (*module_name(root, path).split("."), "")[1]
        imported = name.split(".")[1]
        upward = RANK.get(imported, -1) > RANK.get(importer, len(ORDER))
        sideways = (
            imported in BESIDE
            and importer in RANK.keys() | BESIDE
            and imported != importer
            and (importer, imported) not in MAY_SEE_BESIDE
        )
        if upward or sideways:
            yield f"{where}: k3_jax.{importer} imports {name}, which stands above or beside it"


def orbax_and_grain_have_one_door(root):
    for path, where, name in all_imports(root):
        inside = path.relative_to(root).as_posix()
        if inside.startswith("tests/"):
            continue
        if within(name, {"orbax"}) and inside != "k3_jax/checkpoint/store.py":
            yield f"{where}: imports {name}; only k3_jax/checkpoint/store.py does"
        if within(name, {"grain"}) and not inside.startswith("k3_jax/data/"):
            yield f"{where}: imports {name}; only k3_jax/data/ does"


def torch_is_nowhere(root):
    for path, where, name in all_imports(root):
        # It runs the GPU kernels to compare with, where torch is installed, in their own process.
        if path.relative_to(root).as_posix() == "benchmarks/kda_gpu.py":
            continue
        if within(name, {"torch", "torch_xla", "torchvision"}):
            yield f"{where}: imports {name}; PyTorch is no dependency"


def files_are_short(root):
    for path in files(root):
        most = FILE_LINES.get(path.relative_to(root).parts[0], 400)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > most:
            yield f"{path.relative_to(root)}: {lines} lines; at most {most}: split it by idea"


def functions_are_short(root):
    for path in files(root):
        most = FUNCTION_LINES.get(path.relative_to(root).parts[0], 60)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > most:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{where}: {node.name} has {lines} lines; at most {most}"


def names_say_what_is_inside(root):
    for path in files(root):
        for part in path.relative_to(root).with_suffix("").parts:
            if EMPTY_NAMES.intersection(part.lower().split("_")):
                yield f"{path.relative_to(root)}: '{part}' does not say what it holds"


def no_sharding_constraints(root):
    for where, name in names_used(root):
        if name.split(".")[-1] == "with_sharding_constraint":
            yield f"{where}: {name}; explicit axes carry shardings in the types"


def shard_map_is_not_the_old_one(root):
    for where, name in names_used(root):
        if within(name, {"jax.experimental.shard_map"}):
            yield f"{where}: {name}; use jax.shard_map"


def transforms_are_those_of_jax(root):
    for where, name in names_used(root):
        parts = name.split(".")
        if "nnx" in parts[:-1] and parts[parts.index("nnx") + 1] in NNX_TRANSFORMS:
            yield f"{where}: {name}; modules are plain pytrees, transforms are jax's own"


RULES = [
    packages_look_only_down,
    k3_jax_knows_no_program,
    k3_jax_keeps_its_order,
    orbax_and_grain_have_one_door,
    torch_is_nowhere,
    files_are_short,
    functions_are_short,
    names_say_what_is_inside,
    no_sharding_constraints,
    shard_map_is_not_the_old_one,
    transforms_are_those_of_jax,
]

FAULTS = [
    (packages_look_only_down, "pallas_kernels/kda/step.py", "import flax"),
    (packages_look_only_down, "pallas_kernels/step.py", "from sharding import rules"),
    (packages_look_only_down, "pallas_kernels/step.py", "def f():\n    import numpyro"),
    (packages_look_only_down, "sharding/rules.py", "from pallas_kernels.kda import kda"),
    (packages_look_only_down, "configs/k3.py", "from k3_jax.model import K3"),
    (k3_jax_knows_no_program, "k3_jax/model.py", "from configs import k3"),
    (k3_jax_keeps_its_order, "k3_jax/layers/kda.py", "from k3_jax.model import K3"),
    (k3_jax_keeps_its_order, "k3_jax/layers/kda.py", "from ..train_step import step"),
    (k3_jax_keeps_its_order, "k3_jax/config.py", "from . import axes"),
    (k3_jax_keeps_its_order, "k3_jax/model.py", "from k3_jax import checkpoint"),
    (k3_jax_keeps_its_order, "k3_jax/train_step.py", "import k3_jax.data.pack"),
    (k3_jax_keeps_its_order, "k3_jax/serving/engine.py", "from k3_jax.data.pack import pack_rows"),
    (k3_jax_keeps_its_order, "k3_jax/optim/__init__.py", "from ..checkpoint import store"),
    (orbax_and_grain_have_one_door, "k3_jax/data/loader.py", "from orbax.checkpoint import v1"),
    (orbax_and_grain_have_one_door, "train.py", "import grain"),
    (torch_is_nowhere, "tests/test_x.py", "def f():\n    import torch.nn"),
    (torch_is_nowhere, "benchmarks/kda_cpu.py", "import torch"),
    (files_are_short, "k3_jax/loss.py", "x = 1\n" * 401),
    (files_are_short, "pallas_kernels/mla/step.py", "x = 1\n" * 601),
    (files_are_short, "train.py", "x = 1\n" * 201),
    (files_are_short, "serve.py", "x = 1\n" * 121),
    (functions_are_short, "k3_jax/loss.py", "def f():\n" + "    x = 1\n" * 60),
    (functions_are_short, "pallas_kernels/mla/step.py", "def f():\n" + "    x = 1\n" * 120),
    (names_say_what_is_inside, "k3_jax/data/pack_utils.py", ""),
    (names_say_what_is_inside, "k3_jax/misc/pack.py", ""),
    (no_sharding_constraints, "k3_jax/model.py", "y = jax.lax.with_sharding_constraint(x, s)"),
    (no_sharding_constraints, "train.py", "from jax.lax import with_sharding_constraint as c"),
    (shard_map_is_not_the_old_one, "sharding/a.py", "from jax.experimental.shard_map import x"),
    (shard_map_is_not_the_old_one, "sharding/a.py", "from jax.experimental import shard_map"),
    (transforms_are_those_of_jax, "k3_jax/model.py", "@nnx.jit\ndef f(): pass"),
    (transforms_are_those_of_jax, "k3_jax/model.py", "opt = flax.nnx.Optimizer(m, t)"),
    (transforms_are_those_of_jax, "k3_jax/model.py", "from flax.nnx import scan"),
]
SOUND = {
    "pallas_kernels/kda/step.py": "import functools\nimport jax.numpy\nfrom . import blocks\n",
    "sharding/rules.py": "import numpy as np\nfrom jax.sharding import PartitionSpec\n",
    "k3_jax/__init__.py": "from k3_jax.serving.engine import Engine\n",
    "k3_jax/model.py": "from flax import nnx\nfrom .layers.kda import Kda\nx = nnx.Param(1)\n",
    "k3_jax/train_step.py": "from k3_jax.optim import muon\nfrom k3_jax.loss import loss\n",
    "k3_jax/serving/engine.py": "from k3_jax import model, tokenizer\nfrom . import sampling\n",
    "k3_jax/checkpoint/store.py": "from orbax.checkpoint import v1 as ocp\n",
    "k3_jax/data/loader.py": "import grain\nfrom k3_jax.tokenizer import Tokenizer\n",
    "configs/k3.py": "from k3_jax.config import Config\nimport ml_collections\n",
    "train.py": "x = 1\n" * 200,
}


def plant(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_repository_keeps_the_rule(rule):
    """Style note, section 5.2 and the budgets of its first page."""
    found = list(dict.fromkeys(rule(ROOT)))
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_fault_is_found_once_and_named(tmp_path, rule, path, text):
    plant(tmp_path, path, text)
    found = list(dict.fromkeys(rule(tmp_path)))
    assert len(found) == 1 and found[0].startswith(path), found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_breaks_no_rule(tmp_path, rule):
    for path, text in SOUND.items():
        plant(tmp_path, path, text)
    assert list(rule(tmp_path)) == []


def test_every_package_is_looked_at():
    """A tree that was moved would keep every rule by having no files."""
    for package in PACKAGES:
        assert list(files(ROOT, package)), f"no Python file in {package}"
