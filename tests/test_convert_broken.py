"""Conversion of what is damaged, and under what goes wrong: refused by name, or resumed."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import released

from k3_jax.checkpoint import convert, to_hf, to_orbax
from k3_jax.checkpoint.plan import DEFAULT, Options, make_plan
from k3_jax.checkpoint.safetensors import INDEX, FormatError, read_index

ROOT = Path(__file__).parent.parent
FILE = "model-00002-of-000009.safetensors"  # layer 1: KDA and MoE
LAYER = "language_model.model.layers.1."


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return released.make(tmp_path_factory.mktemp("released") / "source")


@pytest.fixture
def source(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "source")


def header_of(file: Path) -> dict:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(file: Path, header: dict | bytes) -> None:
    """Puts another header before the same tensors."""
    data = file.read_bytes()
    body = data[8 + int.from_bytes(data[:8], "little") :]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def edit_index(source: Path, change) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index)
    (source / INDEX).write_text(json.dumps(index))


def refused(source, words, options=DEFAULT):
    """Refused before anything is written."""
    dst = source.parent / "refused"
    with pytest.raises((FormatError, OSError), match=words):
        to_orbax.convert(source, dst, options=options, say=quiet)
    assert not dst.exists()


# Files and headers


def test_a_truncated_file_and_one_with_more_bytes_are_named(source):
    data = (source / FILE).read_bytes()
    (source / FILE).write_bytes(data[:-1])
    refused(source, f"{FILE} is truncated")
    (source / FILE).write_bytes(data + b"\0")
    refused(source, f"{FILE} has 1 bytes more")
    (source / FILE).write_bytes(b"")
    refused(source, f"{FILE} is no safetensors file")
    (source / FILE).unlink()
    refused(source, f"{FILE} is missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(data_offsets=[t["data_offsets"][0] + 2, t["data_offsets"][1] + 2]),
         "leaves a gap|overlaps"),
        (lambda t: t.update(data_offsets=[0, 2]), "is not at"),
        (lambda t: t.update(data_offsets=[-2, -2]), "whole numbers"),
        (lambda t: t.update(dtype="F16"), "has dtype 'F16'"),
        (lambda t: t.update(dtype=["BF16"]), "has dtype"),
        (lambda t: t.update(shape=[*t["shape"], 1.0]), "whole numbers"),
        (lambda t: t.pop("dtype"), "is not described"),
    ],
    ids=["shifted", "elsewhere", "negative", "half", "list", "fraction", "no dtype"],
)  # fmt: skip
def test_a_header_that_lies_is_refused_by_file_and_tensor(source, change, words):
    header = header_of(source / FILE)
    change(header[LAYER + "self_attn.q_proj.weight"])
    with_header(source / FILE, header)
    refused(source, f"{FILE}.*({words})")


def test_a_tensor_twice_in_a_header_or_in_two_files_is_refused(source):
    text = json.dumps(header_of(source / FILE))
    twice = text.replace("self_attn.k_proj.weight", "self_attn.q_proj.weight")
    with_header(source / FILE, twice.encode())
    refused(source, "self_attn.q_proj.weight' is there twice")
    name = LAYER + "self_attn.q_proj.weight"
    renamed = text.replace("layers.1.self_attn.k_proj", "layers.2.self_attn.k_proj")
    with_header(source / FILE, renamed.encode())
    refused(source, "layers.2.self_attn.k_proj.weight' is in .*00002-of.* and in .*00003-of")
    assert name in renamed


def test_an_index_that_points_nowhere_or_elsewhere_is_refused(source):
    edit_index(source, lambda i: i["weight_map"].update({"ghost": FILE}))
    refused(source, "names 1 tensors that no file holds, such as 'ghost'")
    edit_index(source, lambda i: i["weight_map"].pop("ghost"))
    name = LAYER + "self_attn.q_proj.weight"
    edit_index(source, lambda i: i["weight_map"].update({name: FILE.replace("00002-", "00003-")}))
    refused(source, "q_proj.weight' is said to be in .*00003-of.*, and is in .*00002-of")
    edit_index(source, lambda i: i["weight_map"].pop(name))
    refused(source, "lacks 1 tensors that are in the files, such as .*q_proj.weight")
    edit_index(source, lambda i: i["weight_map"].update({name: "../" + FILE}))
    refused(source, "which is no file name")
    edit_index(source, lambda i: i["weight_map"].update({name: FILE}))
    edit_index(source, lambda i: i["metadata"].update(total_size=5))
    refused(source, "total_size is 5")


# Tensors that are not the model's


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAYER + "self_attn.dt_bias"), "lacks 1 tensors, such as .*dt_bias"),
        (lambda t: t.update({LAYER + "extra": ("F32", (3,))}), "of no use, such as .*extra"),
        (lambda t: t.update({LAYER + "self_attn.A_log": ("BF16", (128,))}),
         "A_log is bfloat16; expected float32"),
        (lambda t: t.update({LAYER + "self_attn.q_proj.weight": ("BF16", (64, 128))}),
         r"q_proj.weight has shape \(64, 128\); expected \(128, 64\)"),
        (lambda t: t.update({LAYER + "self_attn.q_proj.weight": ("F32", (128, 64))}),
         "q_proj.weight is float32; expected bfloat16"),
        (lambda t: t.pop(LAYER + "block_sparse_moe.experts.3.w2.weight_scale"),
         "lacks 1 tensors, such as .*experts.3.w2.weight_scale"),
        (lambda t: t.update({LAYER + "block_sparse_moe.experts.3.w2.weight": ("BF16", (64, 96))}),
         "both .*experts.3.w2.weight and"),
        (lambda t: t.update({"model.norm.weight": ("BF16", (64,))}), "with and without"),
    ],
    ids="missing extra rounded turned wide scale both prefix".split(),
)  # fmt: skip
def test_a_tensor_that_is_not_as_expected_is_named(tmp_path, change, words):
    files = released.files_of(released.SMALL)
    change(files[1])
    # The first of its kind tells what the others are.
    refused(released.make(tmp_path / "source", files=files), words)


def test_rounded_parameters_are_taken_as_they_are_when_asked_for(tmp_path):
    files = released.files_of(released.SMALL)
    for tensors in files:
        for name, (_, shape) in tensors.items():
            if name.endswith("A_log"):
                tensors[name] = "BF16", shape
    src = released.make(tmp_path / "source", files=files)
    for name, tensor in read_index(src).items():
        if name.endswith("A_log"):
            data = bytearray(Path(tensor.file).read_bytes())
            data[tensor.start + 8 : tensor.stop] = bytes(tensor.stop - tensor.start - 8)
            Path(tensor.file).write_bytes(data)
    refused(src, "--allow-rounded")
    to_orbax.convert(src, tmp_path / "ours", options=Options(allow_rounded=True), say=quiet)
    to_hf.convert(tmp_path / "ours", tmp_path / "back", say=quiet)
    for name, tensor in read_index(src).items():
        assert read_index(tmp_path / "back")[name].read().tobytes() == tensor.read().tobytes()


def test_padding_of_a_log_that_is_not_zero_is_refused(source):
    """T14: also a -0, which would come back as 0."""
    tensor = read_index(source)[LAYER + "self_attn.A_log"]
    data = bytearray(Path(tensor.file).read_bytes())
    data[tensor.stop - 1] = 0x80
    Path(tensor.file).write_bytes(data)
    with pytest.raises(FormatError, match="layers.1.self_attn.A_log of 128 entries is not 4 heads"):
        to_orbax.convert(source, source.parent / "ours", say=quiet)


def test_two_thousand_mutated_headers_and_indices_are_refused_or_harmless(whole, tmp_path):
    """Nothing but FormatError (or a file that is not there) comes out, and what is accepted has
    every tensor where it was."""
    rng = random.Random(5)
    keep = [n for n in released.layer(released.SMALL, 1) if "experts." not in n or ".0." in n]
    everything = released.layer(released.SMALL, 1)
    src = released.make(tmp_path / "source", files=[{n: everything[n] for n in keep}])
    file, index = next(src.glob("*.safetensors")), src / INDEX
    contents = {file: file.read_bytes(), index: index.read_bytes()}
    n_header = 8 + int.from_bytes(contents[file][:8], "little")
    want = {n: t[1:] for n, t in read_index(src).items()}
    accepted = 0
    for i in range(2400):
        path = (file, index)[i % 3 == 2]
        data = bytearray(contents[path])
        length = n_header if path == file else len(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate(rng, data, length)
        path.write_bytes(data)
        try:
            got = {n: t[1:] for n, t in read_index(src).items()}
        except (FormatError, FileNotFoundError):
            got = None
        path.write_bytes(contents[path])
        if got is not None:
            accepted += 1
            assert renamed(got, want), (i, path)
    assert 20 < accepted < 1200


def mutate(rng, data: bytearray, length: int) -> None:
    """One change within the first `length` bytes, of a kind that JSON may survive."""
    length = min(length, len(data))
    at = rng.randrange(length)
    kind = rng.randrange(6)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        digits = [i for i in range(8, length) if data[i] in b"0123456789"]
        data[rng.choice(digits)] = rng.choice(b"0123456789-.e")
    elif kind == 2:
        del data[at : at + rng.randrange(1, 40)]
    elif kind == 3:
        data[at:at] = data[at : at + rng.randrange(1, 40)]
    elif kind == 4:
        data[at:at] = rng.choice([b"[" * 3000, b"9" * 5000, b"null", b'"', b"\\ud800", b"1e999"])
    else:
        data[rng.randrange(8)] = rng.randrange(256)


def renamed(got: dict, want: dict) -> bool:
    """Whether the places are the same; a changed name is a missing tensor to the plan."""
    return list(got.values()) == list(want.values()) or got == want


def test_a_changed_name_or_swapped_shape_does_not_pass_the_plan(whole):
    tensors, config = read_index(whole), to_orbax.open_source(whole).config
    make_plan(tensors, config, DEFAULT)
    rng = random.Random(2)
    for name in rng.sample(sorted(tensors), 60):
        if name.startswith(("vision", "mm_")):
            continue
        t = tensors[name]
        others = {n: t for n, t in tensors.items() if n != name}
        for changed in ({name + "x": t}, {name: t._replace(shape=(*t.shape, 1))}):
            with pytest.raises(FormatError):
                make_plan(others | changed, config, DEFAULT)


# The program


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["hf-to-orbx", "a", "b"], "invalid choice: 'hf-to-orbx'"),
        (["hf-to-orbax", "{tmp}/gone", "{tmp}/b"], "gone does not exist"),
        (["hf-to-orbax", "{tmp}", "{tmp}/b"], "neither model.safetensors.index.json nor"),
        (["hf-to-orbax", "{src}", "{src}"], "holds .*; give a new directory"),
        (["hf-to-orbax", "{src}", "{tmp}/b", "--quantize", "mxfp4"], "go together"),
        (["hf-to-orbax", "{src}", "{tmp}/b", "--quantize", "mxfp4", "--rule", "floor"],
         "packed already"),
        (["hf-to-orbax", "{src}", "{tmp}/b", "--config", "{tmp}/c.json"], "c.json is missing"),
        (["hf-to-orbax", "{src}", "{src}/config.json"], "config.json is a file"),
        (["hf-to-orbax", "{src}", "/proc/k3/b"], "cannot write to /proc/k3/b"),
        (["orbax-to-hf", "{src}", "{tmp}/b"], "holds no checkpoint of ours"),
        (["inspect", "{tmp}/gone"], "gone does not exist"),
        (["verify", "{src}", "{src}", "--logits", "a"], "'a' is not a list of ids"),
        (["hf-to-orbax", "{src}", "{tmp}/b", "--workers", "0"], "'0' is not a positive"),
    ],
    ids=range(13),
)  # fmt: skip
def test_mistakes_are_answered_in_one_line(whole, tmp_path, capsys, argv, words):
    argv = [a.format(src=whole, tmp=tmp_path) for a in argv]
    try:
        code = convert.main(argv)
    except SystemExit as e:
        code = e.code
    assert code == 2
    err = capsys.readouterr().err
    assert re.search(words, err), err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) in ([], ["b"])
