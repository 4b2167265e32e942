"""Compiling for slices that are not here: what is read of the text, what is refused, and how."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from serve_models import CONFIG as SERVED

from k3_jax import compile_only, hlo
from k3_jax.checks import check_serving
from k3_jax.chips import CHIPS
from k3_jax.compile_only import described_devices, refusal, seconds_on_links, spanned
from k3_jax.config import KdaConfig, MoeConfig
from sharding import AXES, make_mesh

ROOT = Path(__file__).resolve().parent.parent
V5P, V6E = CHIPS["TPU v5p"], CHIPS["TPU v6e"]
TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %kernel = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={
 "of": "a kernel"
}}, metadata={op_name="and more"}
  %wide = bf16[32,128]{1,0} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %sum = bf16[8,128]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %next = bf16[8,128]{1,0} collective-permute(%x), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  ROOT %y = bf16[8,128]{1,0} add(%sum, %next)
}
"""


def test_exchanges_have_the_bytes_that_leave_a_device_and_their_group():
    rows = 8 * 128 * 2
    assert hlo.collectives(TEXT) == [
        hlo.Collective("all-gather", 1, 3 * rows, (0, 2, 4, 6)),
        hlo.Collective("all-reduce", 1, rows, (0, 1)),
        hlo.Collective("collective-permute", 1, rows, (0, 2)),
    ]


def test_what_slices_exchange_goes_over_the_network():
    """The text of XLA for two slices of four chips, and a list of three."""
    line = """  %send = (f32[128,8,128]{2,1,0}, u32[], token[]) send(%x, %token), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}"""
    head = (
        "ENTRY %main (x: f32[128,8,128]) -> f32[8] {\n  %x = f32[128,8,128]{2,1,0} parameter(0)\n"
    )
    n_bytes = 128 * 8 * 128 * 4
    for target, kind, want in (
        ("{1,2}x{0:3}", "ALL_REDUCE", ("all-reduce", n_bytes, 2)),
        ("{1:2,4}x{0:3}", "ALL_GATHER", ("all-gather", 2 * n_bytes, 3)),
    ):
        text = head + line.replace("{1,2}x{0:3}", target).replace("ALL_REDUCE", kind) + "\n}\n"
        (found,) = hlo.collectives(text)
        assert (found.opcode, found.sent, found.slices) == want
        told = compile_only.traffic(text, make_mesh(data=8), V6E)
        assert told["links_s"] == 0 and told["network_s"] == pytest.approx(want[1] / 12.5e9)


def test_a_kernel_moves_what_it_says_and_an_allocation_nothing():
    text = """ENTRY %main (x: bf16[8,1024,128]) -> bf16[8,128] {
  %x = bf16[8,1024,128]{2,1,0} parameter(0)
  %room = bf16[8,1024,128]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %one = bf16[1024,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"524288"}}
}
"""
    assert [(op.name, op.bytes) for op in hlo.operations(text)] == [("one", 524288)]


def test_a_fusion_reads_of_a_stack_what_it_slices_and_writes_what_it_changes():
    text = """%slice (p0: bf16[54,1024,128], p1: s32[]) -> bf16[1024,128] {
  %p0 = bf16[54,1024,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %cut = bf16[1,1024,128]{2,1,0} dynamic-slice(%p0, %p1)
  ROOT %flat = bf16[1024,128]{1,0} bitcast(%cut)
}
%fetch (f0: bf16[54,1024,128], f1: s32[]) -> bf16[1024,128] {
  %f0 = bf16[54,1024,128]{2,1,0} parameter(0)
  %f1 = s32[] parameter(1)
  %piece = bf16[1,1024,128]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%f0, %f1)
  ROOT %there = bf16[1024,128]{1,0:T(8,128)(2,1)S(1)} bitcast(%piece)
}
%dot (q0: bf16[54,1024,128], q1: s32[], q2: bf16[1024,1024]) -> bf16[1024,128] {
  %q0 = bf16[54,1024,128]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %q2 = bf16[1024,1024]{1,0} parameter(2)
  %t = bf16[54,1024,128]{2,1,0:T(8,128)} fusion(%q0), output_to_operand_aliasing={{}: (0, {})}
  %w = bf16[1024,128]{1,0} fusion(%t, %q1), kind=kLoop, calls=%slice
  ROOT %y = bf16[1024,128]{1,0} convolution(%q2, %w)
}
%put (r0: bf16[54,1024,128], r1: s32[54], r2: bf16[54,128]) -> bf16[54,1024,128] {
  %r0 = bf16[54,1024,128]{2,1,0} parameter(0)
  %r1 = s32[54]{0} parameter(1)
  %r2 = bf16[54,128]{1,0} parameter(2)
  ROOT %changed = bf16[54,1024,128]{2,1,0} scatter(%r0, %r1, %r2), to_apply=%copy
}
ENTRY %main (a: bf16[54,1024,128], i: s32[], x: bf16[1024,1024]) -> bf16[54,1024,128] {
  %a = bf16[54,1024,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[1024,1024]{1,0} parameter(2)
  %y = bf16[1024,128]{1,0} fusion(%a, %i, %x), kind=kOutput, calls=%dot
  %near = bf16[1024,128]{1,0:T(8,128)(2,1)S(1)} fusion(%a, %i), kind=kLoop, calls=%fetch
  %at = s32[54]{0} iota()
  %new = bf16[54,128]{1,0} broadcast(%i)
  ROOT %z = bf16[54,1024,128]{2,1,0} fusion(%a, %at, %new), kind=kCustom, calls=%put
}
"""
    moved = {op.name: op.bytes for op in hlo.operations(text)}
    layer = 1024 * 128 * 2
    assert moved == {"y": layer + 1024 * 1024 * 2 + layer + 4, "near": layer + 4}, (
        "the scatter is too small to be told"
    )


def test_a_loops_exchanges_count_as_often_as_it_runs():
    """The text that XLA itself writes, here for 8 CPU devices."""
    mesh = make_mesh(data=2, expert=4)

    def local(x):
        step = lambda x, _: (jax.lax.psum(x, "expert") / 4, None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=5)[0]

    with jax.set_mesh(mesh):
        fn = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        rows = jax.reshard(jnp.zeros((2, 1024)), P("data"))
        text = jax.jit(fn).lower(rows).compile().as_text()
    (found,) = hlo.collectives(text)
    assert (found.opcode, found.runs, found.group) == ("all-reduce", 5, (0, 1, 2, 3))
    assert "psum" in found.scopes
    assert found.sent == 1024 * 4 * 2 * 3 / 4


def test_an_exchange_belongs_to_mesh_axes_and_torus_dimensions():
    """8 chips, 2 x 4: `expert` goes along the long side, `data` along the short one."""
    places = [SimpleNamespace(coords=(i // 4, i % 4, 0)) for i in range(8)]
    mesh = SimpleNamespace(
        axis_names=AXES, devices=np.array(places).reshape(2, 1, 1, 4, 1, 1), shape={}
    )
    assert spanned((0, 1, 2, 3), mesh, V5P) == (("expert",), [(4, True)])
    assert spanned((0, 4), mesh, V5P) == (("data",), [(2, False)])
    assert spanned((0, 1), mesh, V5P) == (("expert",), [(2, False)])
    assert spanned(tuple(range(8)), mesh, V5P) == (("data", "expert"), [(2, False), (4, True)])
    assert spanned((0, 1, 2, 3), mesh, V6E) == (("expert",), [(4, False)])
    # Of six links of 100 GB/s a gather round a ring has two, and along a line one.
    moved = hlo.Collective("all-gather", 1, 6e9, (0, 1))
    assert seconds_on_links(moved, [(4, True)], V5P) == pytest.approx(6 / 200)
    assert seconds_on_links(moved, [(2, False), (4, True), (4, True)], V5P) == pytest.approx(
        6 / 500
    )
    assert seconds_on_links(moved, [], V5P) == 0


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
    assert seconds_on_links(routed, [(n, is_ring)], V5P) == pytest.approx(carried.max())


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
