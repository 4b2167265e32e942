"""The released checkpoint by names and shapes, and what conversion takes of memory."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import released

from k3_jax.checkpoint import plan, table, to_orbax
from k3_jax.checkpoint.arrays import ArrayInfo

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """All 96 files with their real headers, and holes for tensors: 1.56 TB that take 0.1 GB."""
    directory = tmp_path_factory.mktemp("release") / "k3"
    return to_orbax.open_source(released.make(directory, released.Sizes(), seed=None))


@pytest.fixture(scope="module")
def whole(source):
    return plan.make_plan(source.tensors, source.config, plan.DEFAULT)


def test_the_index_of_the_release_adds_up(source):
    """k3-facts 2.1: files, tensors and bytes; 2.2: the dtypes."""
    assert len(source.files()) == 96
    assert len(source.tensors) == 497_220
    assert source.n_bytes == 1_560_860_324_864
    dtypes = Counter()
    for t in source.tensors.values():
        dtypes[str(t.dtype)] += math.prod(t.shape)
    assert dtypes["float32"] == 11_122_432 and dtypes["bfloat16"] == 57_179_884_544


def test_every_key_of_the_release_is_read_once_and_every_array_is_filled(source, whole):
    """T24: nothing is left over, nothing is read twice, and no shard is written twice."""
    read, cells, experts = Counter(), Counter(), Counter()
    for job in whole.jobs:
        for name in job.names:
            read.update(job.keys(whole.matched, name))
        for array in job.arrays:
            cells[array.path, job.cell] += 1
            experts[array.path] += len(job.names)
    assert set(read) == set(source.tensors) and set(read.values()) == {1}
    assert set(cells.values()) == {1}
    n_cells = Counter(path for path, _ in cells)
    for path, array in whole.arrays.items():
        grid = [n / s for n, s in zip(array.shape, array.shard, strict=True)]
        assert math.prod(grid) == n_cells[path], path
        assert all(s % c == 0 for s, c in zip(array.shard, array.chunk, strict=True)), path
        if path.endswith((".packed", ".scales")):
            assert experts[path] == math.prod(array.shape[:3]), path
    assert sorted(whole.matched.kept) == sorted(
        name for files in released.vision(released.Sizes()) for name in files
    )
    # All bytes but the padding of A_log: 69 layers of 32 float32 zeros.
    n_bytes = sum(job.n_bytes for job in whole.jobs)
    assert n_bytes == source.n_bytes - 69 * 32 * 4


def test_no_piece_of_the_release_is_large_and_no_host_reads_a_whole_stack(whole):
    """T25: a chunk, the least that a reader holds, is one expert's matrix or less than 17 MiB."""
    for array in whole.arrays.values():
        assert math.prod(array.chunk) * array.dtype.itemsize <= 17 << 20, array
    packed = whole.arrays["model.blocks.1.parts.0.runs.1.ffn.gate_ELF.packed"]
    assert packed.shape[2:] == (896, 3072, 1792) and packed.chunk[2:] == (1, 3072, 1792)
    assert packed.shard[2] == 56
    # Cut along the axis that a mesh splits, too.
    assert whole.arrays["model.blocks.1.parts.0.runs.0.attn.q_DHk"].chunk[2] == 7168 // 8


def test_inspect_knows_the_release(source):
    """k3-facts 8: the report's parameter counts."""
    tensors = {n: ArrayInfo(t.dtype, t.shape) for n, t in source.tensors.items()}
    told = table.lines(SimpleNamespace(tensors=tensors, config=source.config))
    total = next(line for line in told if line.startswith("total"))
    assert "497,220" in total and "1,560,860,324,864" in total and "2,779,931,837,184" in total
    assert "active parameters a token: 104,189,614,848" in told
    assert told[-1] == "complete: the released Kimi K3 by names, shapes and bytes"
    tensors.pop("lm_head.weight", None), tensors.pop("language_model.lm_head.weight")
    told = table.lines(SimpleNamespace(tensors=tensors, config=source.config))
    assert "lacks 1 tensors, such as language_model.lm_head.weight" in told[-1]


MEASURED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000,) * 2)
from k3_jax.checkpoint import plan, to_hf, to_orbax
from k3_jax.checkpoint.hf_config import from_hf
src, ours, back = sys.argv[1:]
plan.abstract_leaves(to_orbax.open_source(src).config)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = [peak()]
to_orbax.convert(src, ours, say=lambda *_: None)
found.append(peak())
to_hf.convert(ours, back, say=lambda *_: None)
found.append(peak())
print(json.dumps(found))
"""


def test_a_checkpoint_larger_than_the_memory_it_may_use_converts_both_ways(tmp_path):
    """T24: 273 MB with stacks of 84 MB, an address space of 1 GB, and 80 MB beside the imports."""
    sizes = released.SMALL._replace(experts=64, latent=512, expert=1024)
    src = released.make(tmp_path / "src", sizes)
    n_bytes = to_orbax.open_source(src).n_bytes
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, src, tmp_path / "a", tmp_path / "b"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    start, there, back = json.loads(out.stdout)
    assert n_bytes > 270e6
    assert there - start < 80e6 and back - start < 80e6, (start, there, back)
    for file in src.iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
