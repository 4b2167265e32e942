"""Every format read in any order, the split, and the messages for bad files."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from k3_jax.config import SourceConfig
from k3_jax.data import source
from k3_jax.data.split import Split


def opened(form, glob, field="text"):
    return source.open_source(SourceConfig(name="s", format=form, glob=str(glob), field=field))


def write_parquet(path, texts, field="text", **kwargs):
    pq.write_table(pa.table({"id": list(range(len(texts))), field: texts}), path, **kwargs)


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


TEXTS = [f"é {i}\r\n\n" + "z" * i for i in range(25)]


@pytest.mark.parametrize("form", ["text", "jsonl", "parquet", "array_record"])
def test_each_format_gives_back_its_documents_in_any_order(tmp_path, form):
    """Files are taken by name, whatever the order in which they were written."""
    for name, part in (("b", TEXTS[10:]), ("a", TEXTS[:10])):
        if form == "text":
            for i, text in enumerate(part):
                (tmp_path / f"{name}{i:02}.x").write_bytes(text.encode())
        elif form == "jsonl":
            lines = [json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(part)]
            (tmp_path / f"{name}.x").write_text("".join(lines))
        elif form == "parquet":
            write_parquet(tmp_path / f"{name}.x", part, row_group_size=4)
        else:
            write_array_record(tmp_path / f"{name}.x", [t.encode() for t in part])
    got = opened(form, tmp_path / "*.x")
    assert len(got) == 25
    for i in np.random.default_rng(0).permutation(25):
        assert got[i] == TEXTS[i]
    # Of a JSON line the whole line counts.
    lines = [len(json.dumps({"id": i % 10, "text": t})) + 1 for i, t in enumerate(TEXTS)]
    lines = [n + (i >= 20) for i, n in enumerate(lines)]
    sizes = lines if form == "jsonl" else [len(t.encode()) for t in TEXTS]
    assert got.length_D.tolist() == sizes


@pytest.mark.parametrize("line", ["aé😀\n" * 9, "é" * 31 + "\n", "x" + "😀" * 500, "x" * 64 + "\n"])
def test_a_large_text_file_is_cut_at_line_ends_and_never_inside_a_character(
    tmp_path, monkeypatch, line
):
    monkeypatch.setattr(source, "PART_BYTES", 64)
    text = line * 20
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "empty.txt").write_text("")
    parts = list(opened("text", tmp_path / "*.txt"))
    assert "".join(parts) == text
    assert len(parts) > 10
    assert all(0 < len(p.encode()) <= 64 for p in parts)
    if len(line.encode()) < 64:
        assert all(p.endswith("\n") for p in parts)


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_json_lines_may_be_blank_or_end_without_a_newline(tmp_path, monkeypatch, block):
    monkeypatch.setattr(source, "SCAN_BYTES", block)
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text":"a"}\r\n\r\n \n\n{"text":"b"}\n{"text":"c"}')
    assert list(opened("jsonl", tmp_path / "a.jsonl")) == ["a", "b", "c"]


def test_files_reads_source_files_below_folders_and_skips_the_rest(tmp_path):
    kept = {"p/a.py": b"1", "p/sub/b.RS": b"2", "q/c.md": "é".encode()}
    skipped = {
        "p/.git/x.py": b"3",
        "p/__pycache__/y.py": b"4",
        "p/z.bin": b"5",
        "q/latin.c": b"\xe9",
        "q/zero.txt": b"a\0b",
        "loose.py": b"6",
    }
    for name, content in {**kept, **skipped}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "p/loop").symlink_to(tmp_path / "p")
    got = opened("files", tmp_path / "*")
    assert [f.name for f in got.files] == sorted(kept)
    assert list(got) == [kept[name].decode() for name in sorted(kept)]
    assert [f.name for f in opened("files", tmp_path / "p").files] == ["a.py", "sub/b.RS"]


def test_the_standard_library_is_a_source_without_downloads():
    got = opened("stdlib", "")
    names = [f.name for f in got.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} < set(names)
    assert not any("site-packages" in n or "__pycache__" in n or n.startswith("/") for n in names)
    assert "def loads" in got[names.index("json/__init__.py")]


def held(folder):
    whole = opened("text", f"{folder}/**/*.txt")
    part = Split(whole, 0.3, "holdout")
    return {part[i] for i in range(len(part))}


def test_the_split_follows_names_and_not_folders_or_neighbours(tmp_path):
    """Each file holds its own name. A copy elsewhere, or more files, moves none of them."""
    for i in range(60):
        path = tmp_path / f"here/{i % 3}/{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(i))
    first = held(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "far/away")
    assert held(tmp_path / "far/away") == first
    for i in range(60, 120):
        (tmp_path / f"here/{i % 3}/{i}.txt").write_text(str(i))
    assert {d for d in held(tmp_path / "here") if int(d) < 60} == first


def test_hashes_are_the_same_on_every_machine_and_even(tmp_path):
    """The values are pinned: another value would move documents between training and evaluation."""
    write_array_record(tmp_path / "a.array_record", [b"x"] * 20_000)
    hashes = opened("array_record", tmp_path / "*.array_record").hashes()
    assert len(set(hashes.tolist())) == 20_000
    share = np.mean(hashes < np.uint64(2**64 // 50))
    assert abs(share - 0.02) < 4 * np.sqrt(0.02 * 0.98 / 20_000)  # 4 sigma of a fair draw
    assert hashes[:2].tolist() == [13359030465558948514, 18015566283324416635]


@pytest.mark.parametrize(
    ("form", "content", "match"),
    [
        ("text", b"ok\nok\n\xff", r"a.x from byte 0, 2 lines on, is not UTF-8"),
        ("text", b"", "no documents in 1 files"),
        ("jsonl", b"\n\n", "no documents in 1 files"),
        ("jsonl", b'\n{"body": "a"}', r"a.x line 2: no field 'text'"),
        ("jsonl", b'{"text": 5}', "line 1: field 'text' is int, not a string"),
        ("jsonl", b"[1]", "line 1: no field 'text'"),
        ("jsonl", b'{"text": "a"}\n{"text": ', "line 2: not JSON"),
        ("jsonl", b'{"text": "\xff"}', "is not UTF-8"),
        ("parquet", b"PAR1 no", "a.x is not a Parquet file"),
        ("array_record", b"no", "a.x is not an ArrayRecord file"),
        ("csv", b"no", "format 'csv' is not one of stdlib, files, text, jsonl"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path, form, content, match):
    (tmp_path / "a.x").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        list(opened(form, tmp_path / "a.x"))


def test_bad_parquet_fields_and_records_are_named(tmp_path):
    write_parquet(tmp_path / "a.x", ["a", None], "body")
    with pytest.raises(ValueError, match="no field 'text', only id, body"):
        opened("parquet", tmp_path / "a.x")
    with pytest.raises(ValueError, match="field 'id' is int64, not string"):
        opened("parquet", tmp_path / "a.x", "id")
    with pytest.raises(ValueError, match="row 1: field 'body' is null"):
        list(opened("parquet", tmp_path / "a.x", "body"))
    write_array_record(tmp_path / "b.x", [b"a", b"\xff"])
    with pytest.raises(ValueError, match="b.x record 1, 0 lines on, is not UTF-8"):
        list(opened("array_record", tmp_path / "b.x"))


def test_globs_that_match_nothing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file matches"):
        opened("text", tmp_path / "*.txt")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        opened("jsonl", tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="no folder matches"):
        opened("files", tmp_path / "none")
    with pytest.raises(ValueError, match="format 'text' needs a glob"):
        opened("text", "")
