"""What the text of a compiled program is read to say: exchanges, kernels, fusions, loops."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax import compile_only, hlo
from k3_jax.chips import CHIPS
from sharding import make_mesh

V6E = CHIPS["TPU v6e"]
TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %kernel = bf16[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={
 "of": "a kernel"
}}, metadata={op_name="and more"}, \
backend_config={"bundle_analysis_data":{"estimated_cycles":"1210"}}
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


def test_a_kernels_line_goes_on_after_its_metadata():
    assert [op.cycles for op in hlo.operations(TEXT) if op.name == "kernel"] == [1210]


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


def test_an_exchange_beside_products_counts_once():
    """XLA begins it in one fusion, hands it on through those that compute meanwhile, and ends it in
    another; each has the operation and what it needs."""
    gather = (
        "all-gather(%shard), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, "
        "use_global_device_ids=true"
    )
    small, whole = "bf16[256,1024]{1,0}", "bf16[1024,1024]{1,0}"
    text = f"""%begin (shard: bf16[256,1024]) -> (bf16[256,1024], bf16[1024,1024]) {{
  %shard = {small} parameter(0)
  %all-gather.1 = {whole} {gather}
  ROOT %start = ({small}, {whole}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}}
%async_collective_fusion.2 (shard: bf16[256,1024], room: bf16[1024,1024], x: bf16[512,1024]) -> \
(bf16[512,1024], bf16[256,1024], bf16[1024,1024], bf16[1024,1024]) {{
  %shard.2 = {small} parameter(0)
  %room.2 = {whole} parameter(1)
  %x = bf16[512,1024]{{1,0}} parameter(2)
  %all-gather.2 = {whole} {gather.replace("%shard", "%shard.2")}
  %y = bf16[512,1024]{{1,0}} multiply(%x, %x)
  ROOT %on = (bf16[512,1024]{{1,0}}, {small}, {whole}, {whole}) \
tuple(%y, %shard.2, %room.2, %all-gather.2)
}}
%end (shard: bf16[256,1024], room: bf16[1024,1024]) -> bf16[1024,1024] {{
  %shard.3 = {small} parameter(0)
  %room.3 = {whole} parameter(1)
  %all-gather.3 = {whole} {gather.replace("%shard", "%shard.3")}
  ROOT %done = {whole} custom-call(%shard.3, %room.3, %all-gather.3), \
custom_call_target="AsyncCollectiveDone"
}}
ENTRY %main (w: bf16[256,1024], x: bf16[512,1024]) -> bf16[1024,1024] {{
  %w = {small} parameter(0)
  %v = bf16[512,1024]{{1,0}} parameter(1)
  %started = ({small}, {whole}) fusion(%w), kind=kCustom, calls=%begin
  %a = {small} get-tuple-element(%started), index=0
  %b = {whole} get-tuple-element(%started), index=1
  %f = (bf16[512,1024]{{1,0}}, {small}, {whole}, {whole}) fusion(%a, %b, %v), kind=kOutput, \
calls=%async_collective_fusion.2
  %c = {small} get-tuple-element(%f), index=1
  %d = {whole} get-tuple-element(%f), index=2
  ROOT %e = {whole} fusion(%c, %d), kind=kCustom, calls=%end
}}
"""
    (found,) = hlo.collectives(text)
    assert (found.opcode, found.runs, found.sent) == ("all-gather", 1, 3 * 256 * 1024 * 2)
    shard, full, rows = 256 * 2048, 1024 * 2048, 512 * 2048
    moved = {op.name: op.bytes for op in hlo.operations(text)}
    assert moved == {"started": 2 * shard + full, "f": 2 * rows}


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
