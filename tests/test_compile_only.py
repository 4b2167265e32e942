"""Compiling for slices that are not here: what is told, what is refused, and how."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from serve_models import CONFIG as SERVED

from k3_jax import compile_only, hlo
from k3_jax.checks import check_serving
from k3_jax.chips import CHIPS
from k3_jax.compile_only import described_devices, refusal, seconds_on_links, spanned
from k3_jax.config import KdaConfig, MoeConfig
from sharding import AXES, make_mesh

ROOT = Path(__file__).resolve().parent.parent
V5P, V6E = CHIPS["TPU v5p"], CHIPS["TPU v6e"]


def test_an_exchange_belongs_to_mesh_axes_and_torus_dimensions():
    """8 chips, 2 x 4: `expert` goes along the long side, `data` along the short one."""
    places = [SimpleNamespace(coords=(i // 4, i % 4, 0)) for i in range(8)]
    mesh = SimpleNamespace(
        axis_names=AXES, devices=np.array(places).reshape(2, 1, 1, 4, 1, 1), shape={}
    )
    one = (1, False)
    assert spanned((0, 1, 2, 3), mesh, V5P) == (("expert",), [one, (4, True), one])
    assert spanned((0, 4), mesh, V5P) == (("data",), [(2, False), one, one])
    assert spanned((0, 1), mesh, V5P) == (("expert",), [one, (2, False), one])
    both = ("data", "expert")
    assert spanned(tuple(range(8)), mesh, V5P) == (both, [(2, False), (4, True), one])
    assert spanned((0, 1, 2, 3), mesh, V6E) == (("expert",), [one, (4, False)])
    # Of six links of 100 GB/s a gather round a ring has two, and along a line one.
    moved = hlo.Collective("all-gather", 1, 6e9, (0, 1))
    for sides, busy in (
        ([one, (4, True), one], [0, 6 / 200, 0]),
        ([(2, False), (4, True), (4, True)], [6 / 500] * 3),
        ([one, one, one], [0, 0, 0]),
    ):
        assert seconds_on_links(moved, sides, V5P) == pytest.approx(busy)


def test_exchanges_in_different_dimensions_overlap_at_best():
    """The busiest dimension bounds a step; one after another, all of them do."""
    places = [SimpleNamespace(coords=(i // 4, i % 4, 0)) for i in range(16)]
    mesh = SimpleNamespace(
        axis_names=("data", "expert"), devices=np.array(places).reshape(4, 4), shape={}
    )
    line = "  %{0} = f32[{1}]{{0}} all-reduce(%x), replica_groups={2}, to_apply=%add"
    text = "\n".join(
        [
            "ENTRY %main (x: f32[1000000]) -> f32[1000000] {",
            "  %x = f32[1000000]{0} parameter(0)",
            line.format("rows", 1000000, "[4,4]<=[16]"),
            line.format("columns", 1000000, "[4,4]<=[4,4]T(1,0)"),
            line.format("again", 1000000, "[4,4]<=[4,4]T(1,0)"),
            "}",
        ]
    )
    told = compile_only.traffic(text, mesh, V5P)
    one = 2 * 3 / 4 * 4e6 / 200e9
    assert told["links_of_dimension_s"] == pytest.approx([2 * one, one, 0])
    assert told["links_s"] == pytest.approx(3 * one)
    assert {row["axes"]: row["runs"] for row in told["collectives"]} == {"data": 2, "expert": 1}


@pytest.mark.parametrize("n, is_ring", [(4, False), (8, False), (8, True), (16, True)])
def test_the_busiest_link_of_an_all_to_all_is_that_of_a_walk(n, is_ring):
    """Every chip sends 1/n of its rows to every chip, the shorter way round."""
    carried = np.zeros((n, 2))
    for a in range(n):
        for b in range(n):
            steps = b - a
            if is_ring:
                steps = (steps + n // 2) % n - n // 2
            # Half a ring away, half of the rows go each way.
            ways = [steps, -steps] if is_ring and 2 * abs(steps) == n else [steps]
            for way in ways:
                at, step = a, 1 if way > 0 else -1
                for _ in range(abs(way)):
                    link = at if step > 0 else (at - 1) % n
                    carried[link, step > 0] += 1 / n / len(ways)
                    at = (at + step) % n
    routed = hlo.Collective("ragged-all-to-all", 1, 100e9, (0, 1))
    busy = seconds_on_links(routed, [(n, is_ring), (1, False), (1, False)], V5P)
    assert busy == pytest.approx([carried.max(), 0, 0])


def test_what_does_not_fit_is_told_by_kind_and_by_how_much():
    kinds = {"parameters": 90 * 10**9, "optimizer": 30 * 10**9}
    told = refusal(kinds, "", V5P)
    assert "has 102.0 GB and this needs 120.0, 18.0 too much" in told
    assert "parameters 90.0 GB, optimizer 30.0 GB" in told and told.endswith("part: parameters")
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 300.00G of 94.75G hbm."
    told = refusal(kinds, said, V5P)
    assert "202.1 GB of activations" in told and told.endswith("activations and other temporaries")


def test_a_slice_that_cannot_be_described_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="'v5p' is not of the form v6e:8x8 or v5p:4x4x4"):
        described_devices("v5p")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs the TPU compiler: pip install libtpu=="):
        described_devices("v5p:4x4x4")


def test_the_table_says_what_the_file_says(tmp_path, capsys):
    found = {
        "device": "TPU v5p",
        "devices": 64,
        "mesh": {"expert": 64},
        "memory_bytes": {"parameters": 40 * 10**9, "activations and other temporaries": 2 * 10**9},
        "memory_of_device": V5P.memory,
        "trace_and_lower_s": 1.5,
        "compile_s": 2.5,
        "hbm_bytes": 1e9,
        "hbm_s": 0.25,
        "links_s": 0.125,
        "links_of_dimension_s": [0.1, 0.025, 0.0],
        "network_s": 0.0,
        "compute_s": 1.0,
        "collectives": [
            {
                "operation": "all-gather",
                "axes": "expert",
                "runs": 3,
                "sent_bytes": 5e9,
                "seconds": 0.1,
            }
        ],
        "bound": "compute",
        "seconds": [1.0, 1.375],
        "tokens": 6400,
        "tokens_per_second_and_device": [100.0, 72.7],
        "model_flops_utilisation": [0.5, 0.36],
    }
    path = tmp_path / "run" / "plan.json"
    compile_only.tell(str(path), {"step": found})
    assert json.loads(path.read_text()) == {"step": found}
    told = capsys.readouterr().out
    for words in (
        "One step: 64 x TPU v5p (expert 64)",
        "40.000  parameters",
        "42.000  of 102.0",
        "0.125000  links, one exchange after another",
        "0.100000  links of the busiest dimension",
        "1.000000  all overlapping (bound: compute)",
        "1.375000  one after another",
        "utilisation: 36.0% to 50.0%",
        "5.000     0.100000       3  all-gather over expert",
    ):
        assert words in told, words


def started(program, *flags):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, program, *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--compile_only"], "--compile_only, --topology and --config go together"),
        (["--mesh=tensors=2"], "'tensors=2' is not AXIS=SIZE with an axis of its own among data,"),
        (["--mesh=tensor=2,tensor=2"], "'tensor=2' is not AXIS=SIZE with an axis of its own"),
        (["--mesh="], "'' is not AXIS=SIZE"),
    ],
)
def test_serving_flags_that_mean_nothing_are_refused(flags, told):
    done = started("serve.py", "--checkpoint=none", "--prompt=x", *flags)
    assert done.returncode == 1 and told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_mesh_that_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="mesh.seq=2: serving does not split rows in time"):
        check_serving(SERVED, make_mesh(seq=2, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="mesh.tensor=8 does not divide {'kda.n_heads'"):
        check_serving(SERVED, make_mesh(tensor=8))
    three = dataclasses.replace(
        SERVED,
        vocab_size=300,
        dense_width=96,
        kda=KdaConfig(n_heads=3, head_dim=32),
        mla=dataclasses.replace(SERVED.mla, n_heads=3),
        moe=MoeConfig(n_experts=6, n_active=2, latent_width=96, expert_width=96),
    )
    with pytest.raises(ValueError, match="mesh.tensor=3 does not divide a cache of 256 slots"):
        check_serving(three, make_mesh(tensor=3, devices=jax.devices()[:3]))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.slow
@pytest.mark.parametrize("slices, names", [(1, ["s1_256", "s2_512"]), (2, ["s1_256"])])
def test_a_training_step_compiles_for_slices(tmp_path, slices, names):
    done = started(
        "train.py",
        "--config=configs/k3_tiny.py",
        "--compile_only",
        "--topology=v6e:2x2",
        f"--workdir={tmp_path}",
        *("--config.mesh.fsdp=4", f"--config.mesh.data={slices}", f"--config.mesh.slices={slices}"),
        *(["--config.stage=s1_256"] if slices > 1 else []),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stages = json.loads((tmp_path / "compile_only.json").read_text())
    assert [*stages] == [f"step of {name}" for name in names]
    for found in stages.values():
        assert found["devices"] == 4 * slices and found["mesh"]["fsdp"] == 4
        assert found["memory_bytes"]["parameters"] > 0 and found["links_s"] > 0
        # Between slices are sums over `data`, and nothing else names them.
        assert (found["network_s"] > 0) == (slices > 1)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.slow
def test_serving_compiles_for_a_slice(tmp_path):
    flags = ["--config=configs/k3_tiny.py", "--compile_only", "--topology=v6e:2x2"]
    flags += ["--mesh=expert=2,tensor=2", "--max_length=1000", f"--output={tmp_path}/plan.json"]
    done = started("serve.py", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [*found] == ["piece of 256 tokens for 32 rows of 1024", "next token for 32 rows of 1024"]
    for program in found.values():
        assert program["mesh"] == {"expert": 2, "tensor": 2} and program["collectives"]
