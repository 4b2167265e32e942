"""The benchmark commands' own logic: reading compiled text, extrapolating, saving, refusing."""

import json
import sys

import pytest

from benchmarks import cost_decode, cost_grouped, cost_kda, kernels, tpucost
from k3_jax import hlo

BIG = "f32[256,1024]{1,0:T(8,128)}"  # 1 MiB
TEXT = f"""HloModule jit_f, is_scheduled=true

%sliced (a: f32[256,1024], i: s32[]) -> f32[8,1024] {{
  %a = {BIG} parameter(0)
  %i = s32[]{{:T(128)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  ROOT %s = f32[8,1024]{{1,0:T(8,128)}} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={{8,1024}}
}}

%body (p: (s32[], f32[256,1024])) -> (s32[], f32[256,1024]) {{
  %p = (s32[]{{:T(128)}}, {BIG}) parameter(0)
  %n = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = {BIG} get-tuple-element(%p), index=1
  %k.2 = {BIG} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={{"bundle_analysis_data":{{"estimated_cycles":"100"}}}}
  ROOT %t = (s32[]{{:T(128)}}, {BIG}) tuple(%n, %k.2)
}}

%condition (q: (s32[], f32[256,1024])) -> pred[] {{
  %q = (s32[]{{:T(128)}}, {BIG}) parameter(0)
  %m = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %most = s32[]{{:T(128)}} constant(7)
  ROOT %less = pred[]{{:T(512)}} compare(%m, %most), direction=LT
}}

ENTRY %main (x.1: f32[256,1024]) -> f32[8,1024] {{
  %x.1 = {BIG} parameter(0)
  %zero.1 = s32[]{{:T(128)}} constant(0)
  %start = (s32[]{{:T(128)}}, {BIG}) tuple(%zero.1, %x.1)
  %loop = (s32[]{{:T(128)}}, {BIG}) while(%start), condition=%condition, body=%body
  %y = {BIG} get-tuple-element(%loop), index=1
  %near = f32[256,1024]{{1,0:T(8,128)S(1)}} copy(%y), backend_config={{"a":1}}
  ROOT %f = f32[8,1024]{{1,0:T(8,128)}} fusion(%y, %zero.1), kind=kLoop, calls=%sliced, \
backend_config={{"window_config":{{"b":"1","estimated_cycles":"30"}}}}
}}
"""


def test_loops_are_multiplied_out_and_bytes_are_those_of_hbm():
    """A loop's length from its condition; a copy into VMEM reads only; a sliced operand counts by
    its slice."""
    ops = {op.name: op for op in hlo.operations(TEXT)}
    assert ops["k.2"] == hlo.Op("k.2", "custom-call", 7, 100, 2 << 20)
    assert ops["near"] == hlo.Op("near", "copy", 1, None, 1 << 20)
    # The slice in and out; the index counts with its 4 bytes.
    assert ops["f"] == hlo.Op("f", "fusion", 1, 30, 2 * 8 * 1024 * 4 + 4)
    assert set(ops) == {"k.2", "near", "f"}


def test_a_loop_of_unknown_length_is_reported_and_its_body_counts_once():
    text = TEXT.replace("s32[]{:T(128)} constant(7)", "s32[]{:T(128)} custom-call(%m)")
    ops = {op.name: op for op in hlo.operations(text)}
    assert ops["loop"].opcode == "while" and ops["loop"].cycles is None
    assert ops["k.2"].runs == 1


def test_kernels_are_summed_by_name_without_their_numbers():
    ops = [
        hlo.Op("kda.1", "custom-call", 2, 10, 5),
        hlo.Op("kda.12", "custom-call", 1, 1, 1),
        hlo.Op("fusion.1", "fusion", 1, 9, 9),
    ]
    assert tpucost.kernels(ops) == {"kda": (21, 11)}


def test_a_line_goes_through_both_points_and_needs_two():
    assert tpucost.line_through(1, 30.0, 2, 50.0, 64) == 30 + 63 * 20
    with pytest.raises(ValueError, match="one size, 3"):
        tpucost.line_through(3, 1.0, 3, 1.0, 4)


def test_figures_take_the_larger_of_core_and_memory():
    by_core = tpucost.figures("v6e", 1.75e6, 1638e3, floor=819e3)
    assert by_core["us"] == pytest.approx(1000) and by_core["hbm_us"] == pytest.approx(1)
    assert by_core["over_floor"] == pytest.approx(2000)
    assert tpucost.figures("v6e", 1.0, 1638e6)["us"] == pytest.approx(1000)


def test_decode_cycles_at_the_profiled_sizes_are_the_profiled_ones():
    cycles = {2: 30, 4: 50, 8: 100, 16: 180, 24: 260}
    assert [cost_decode.cycles_of(cycles, B) for B in (1, 8, 16, 24)] == [20, 100, 180, 260]


def test_visits_with_the_same_expert_cost_their_own_slope():
    """Six cycles before, 10 for each new expert, 3 for each further visit."""
    visits = {"new": [26, 46], "same": [12, 18]}
    assert cost_grouped.cycles_of(visits, visits=20, new=14) == 6 + 14 * 10 + 6 * 3


def test_a_program_is_its_kernels_and_what_lies_around_them():
    """v5p has 1.75 GHz, 2765 B/ns. Cycles bind the first kernel and bytes the second."""
    full = {"kernels": {"a": [0, 2765], "b": [0, 27650e3]}, "around_bytes": 2765e3}
    found = cost_kda.whole("v5p", {"a": 35e3, "b": 1750}, full)
    assert found == {"us": pytest.approx(20 + 10 + 1), "core_us": 21, "around_us": 1}


def test_the_decode_kernel_still_has_the_lines_that_profiling_replaces():
    assert callable(cost_decode.static_kernel())


def test_an_unknown_chip_or_section_is_refused_before_any_work(monkeypatch, capsys):
    for options, words in (
        (["--chips", "v6e,v9z"], "no figures for a chip 'v9z'; the chips are v6e, tpu7x, v5p"),
        (["--sections", "kda,moe"], "no section 'moe'; there are kda, mla, decode"),
    ):
        monkeypatch.setattr(sys, "argv", ["kernels", *options])
        with pytest.raises(SystemExit) as stop:
            kernels.main()
        assert stop.value.code == 2 and words in capsys.readouterr().err


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(tpucost.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install libtpu==0.0.52"):
        tpucost.versions()


def test_a_question_is_answered_by_another_process_and_its_death_is_a_note(tmp_path, monkeypatch):
    """libtpu ends the process that it cannot serve; the run goes on and the row says why."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "answers.py").write_text(
        "import os, sys\n"
        "print('noise')\n"
        "print('ANSWER {\"flags\": \"' + os.environ['LIBTPU_INIT_ARGS'] + '\"}')\n"
    )
    (tmp_path / "dies.py").write_text(
        "import os, sys\n"
        "print('F0101 00:00:00.5 1 a.cc:7] no DMA issue node === Source ===', file=sys.stderr)\n"
        "print('  an address', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    flags = tpucost.ask("answers", profile=True)["flags"]
    assert "static_llo_profile" in flags and "msa_enable=false" in flags
    flags = tpucost.ask("answers", profile=False, in_hbm=False)["flags"]
    assert "static_llo_profile" not in flags and "msa_enable" not in flags
    row = tpucost.row({"chip": "v6e"}, lambda: tpucost.ask("dies", profile=True))
    assert row == {
        "chip": "v6e",
        "note": "no figure: exit -6: no DMA issue node",
    }


def test_what_takes_too_long_is_left_out_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    with pytest.raises(tpucost.NoFigure, match="more than 0.2 s"):
        tpucost.ask("sleeps", profile=False, seconds=0.2)


def test_saving_a_section_leaves_the_others(tmp_path):
    path = tmp_path / "kernels.json"
    kernels.save(path, "kda", "v6e", {"rows": [1]})
    kernels.save(path, "kda", "v5p", {"rows": [2]})
    kernels.save(path, "kda", "v6e", {"rows": [3]})
    assert json.loads(path.read_text()) == {"kda": {"v6e": {"rows": [3]}, "v5p": {"rows": [2]}}}


def test_a_table_begins_anew_where_other_columns_come_and_notes_stand_behind_their_rows():
    rows = [
        {"chip": "v6e", "us": 223.04, "hbm_bytes": 1_500_000, "top": [["a", 1]]},
        {"chip": "v6e", "note": "no figure"},
        {"chip": "v6e", "us": 2.5, "hbm_bytes": 20_000_000, "top": [], "note": "small"},
        {"chip": "v5p", "tokens": 8},
    ]
    assert kernels.table(rows).splitlines() == [
        "chip     us  hbm MB",
        " v6e  223.0    1.50",
        " v6e                 no figure",
        " v6e    2.5   20.00  small",
        "chip  tokens",
        " v5p       8",
    ]
