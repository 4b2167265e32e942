"""Conversion between the released format and ours: nothing is lost, and what comes out is used."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import released
import tiny
from blake3 import blake3
from etils import epath

from k3_jax.checkpoint import convert, hf_config, manifest, plan, to_hf, to_orbax, verify
from k3_jax.checkpoint.arrays import StoredArrays
from k3_jax.checkpoint.load import open_checkpoint, read_leaves
from k3_jax.checkpoint.plan import Options
from k3_jax.checkpoint.safetensors import read_index
from k3_jax.checkpoint.store import Store
from k3_jax.checkpoint.verify import differences
from k3_jax.checkpoint.views import StoredView, find_step, open_view
from k3_jax.config import to_dict
from k3_jax.model import abstract
from k3_jax.quant import mxfp4
from k3_jax.quant.mxfp4 import Mxfp4
from k3_jax.tree import named_leaves, nest
from sharding import make_mesh

GOLDEN = Path(__file__).parent / "golden" / "k3-tiny"


def quiet(*_):
    pass


def tree(directory: Path) -> dict[str, str]:
    """The digest of every file below a directory."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return released.make(tmp_path_factory.mktemp("released") / "source")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    dst = tmp_path_factory.mktemp("converted") / "ours"
    to_orbax.convert(source, dst, say=quiet)
    return dst


def overwrite(file, at: int, data: bytes) -> None:
    with open(file, "r+b") as f:
        f.seek(at)
        f.write(data)


def bits(x) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def assert_same_bits(a, b, what):
    assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b)), what


# Round trips


def test_the_golden_checkpoint_comes_back_file_for_file_byte_for_byte(tmp_path, capsys):
    """Every tensor, both headers, the index, the configuration and all other files; T14 too."""
    assert convert.main(["hf-to-orbax", str(GOLDEN), str(tmp_path / "ours")]) == 0
    assert convert.main(["orbax-to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert tree(tmp_path / "back") == tree(GOLDEN)
    assert "Peak resident memory" in capsys.readouterr().out
    assert convert.main(["verify", str(GOLDEN), str(tmp_path / "ours")]) == 0
    assert "1,026 tensors are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    "how",
    [dict(packed=False), dict(has_vision=False), dict(prefix=""), dict(prefix="", packed=False)],
    ids=["bf16 experts", "no vision", "no prefix", "no prefix, bf16"],
)
def test_sibling_layouts_come_back_byte_for_byte(tmp_path, how):
    src = released.make(tmp_path / "src", **how)
    to_orbax.convert(src, tmp_path / "ours", say=quiet)
    to_hf.convert(tmp_path / "ours", tmp_path / "back", say=quiet)
    assert tree(tmp_path / "back") == tree(src)


def test_large_tensors_go_through_in_pieces_and_come_back(tmp_path, source, monkeypatch):
    """Pieces of 2 KiB cut almost every tensor, and chunks of 256 bytes along a second axis."""
    monkeypatch.setattr(plan, "PIECE_BYTES", 2048)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 256)
    to_orbax.convert(source, tmp_path / "ours", options=Options(shard_bytes=8000), say=quiet)
    arrays = StoredArrays(epath.Path(tmp_path / "ours" / "0" / "state"))
    described = json.loads((tmp_path / "ours/0/state/model.embed_VD/zarr.json").read_text())
    assert described["codecs"][0]["configuration"]["chunk_shape"] == [16, 64]
    assert arrays.info("model")["embed_VD"].shape == (256, 64)
    to_hf.convert(tmp_path / "ours", tmp_path / "back", say=quiet)
    assert tree(tmp_path / "back") == tree(source)
    assert not differences(open_view(source), open_view(tmp_path / "ours"))


def test_one_file_without_an_index_comes_back_without_one(tmp_path):
    files = released.files_of(released.SMALL)
    src = released.make(tmp_path / "src", files=[{k: v for f in files for k, v in f.items()}])
    (src / "model.safetensors.index.json").unlink()
    to_orbax.convert(src, tmp_path / "ours", say=quiet)
    to_hf.convert(tmp_path / "ours", tmp_path / "back", say=quiet)
    assert tree(tmp_path / "back") == tree(src)


def test_every_fp4_code_and_scale_byte_survives(tmp_path):
    """Codes 0 and 8 are 0 and -0; a re-packer that goes through numbers loses them."""
    src = released.make(tmp_path / "src")
    stored = read_index(src)
    name = next(n for n in stored if n.endswith("w2.weight_packed"))
    scales = stored[name.replace("_packed", "_scale")]
    n_codes, n_scales = stored[name].stop - stored[name].start, scales.stop - scales.start
    overwrite(stored[name].file, stored[name].start, (bytes(range(256)) * 99)[:n_codes])
    overwrite(scales.file, scales.start, bytes(i % 255 for i in range(n_scales)))
    to_orbax.convert(src, tmp_path / "ours", say=quiet)
    to_hf.convert(tmp_path / "ours", tmp_path / "back", say=quiet)
    assert tree(tmp_path / "back") == tree(src)


# What is stored


def test_the_stored_tree_has_the_paths_of_the_model_and_released_bytes(source, converted):
    view, stored = StoredView(find_step(epath.Path(converted))), read_index(source)
    arrays = StoredArrays(epath.Path(converted / "0" / "state"))
    info = arrays.info("model")
    model = plan.abstract_leaves(view.config)
    plain = {name.removesuffix("/packed").removesuffix("/scales") for name in info}
    assert plain == set(model)
    for name, leaf in model.items():
        if name in info:
            assert (info[name].dtype, info[name].shape) == (leaf.dtype, leaf.shape), name
    # Layer 2 is the second layer of the second run of the first group.
    folder = "model/blocks/0/parts/0/runs/1/ffn/expert_down_EFL"
    released_name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight"
    for part, end in (("packed", "_packed"), ("scales", "_scale")):
        got = arrays.start(f"{folder}/{part}", (0, 1, 5))()
        assert_same_bits(got, stored[released_name + end].read(), part)
    kept = arrays.start("vision/mm_projector/post_norm/weight", ())()
    assert_same_bits(kept, stored["mm_projector.post_norm.weight"].read(), "vision")


def test_metadata_tells_model_source_options_and_the_hash_of_every_tensor(source, converted):
    meta = Store(converted).read_meta()
    assert meta["convert"]["source"] == str(source) and meta["convert"]["exact"] is True
    assert (
        meta["convert"]["options"]["quantize"] == ""
        and meta["convert"]["format"] == to_orbax.FORMAT
    )
    assert meta["config"]["model"]["moe"]["n_experts"] == 8
    told = gzip.decompress((converted / "0/source/blake3.gz").read_bytes()).decode()
    want = {
        name: blake3(tensor.read().tobytes()).hexdigest()
        for name, tensor in read_index(source).items()
    }
    assert {line[66:]: line[:64] for line in told.splitlines()} == want


def test_it_loads_on_a_mesh_as_the_released_checkpoint_does(source, converted):
    """T25: every leaf has the sharding of the model; experts are widened without a change."""
    with jax.set_mesh(make_mesh(fsdp=2, expert=2, tensor=2)):
        ours, theirs = (open_checkpoint(str(path), "bfloat16") for path in (converted, source))
        assert ours.config == theirs.config and ours.eos_ids == theirs.eos_ids == {2}
        got, want = named_leaves(ours.load()), named_leaves(theirs.load())
        assert list(got) == list(want)
        for name, leaf in want.items():
            assert got[name].sharding == leaf.sharding, name
            assert_same_bits(np.asarray(got[name]), np.asarray(leaf), name)


def test_packed_leaves_come_packed_and_split_as_the_model_is(source, converted):
    """T25: a device holds its own experts' bytes and no others."""
    with jax.set_mesh(make_mesh(fsdp=2, expert=4)):
        opened = open_checkpoint(str(converted), "bfloat16")
        targets = named_leaves(abstract(opened.config))
        with Store(converted) as store:
            leaves = read_leaves(store, 0, targets)
        packed = {name: x for name, x in leaves.items() if isinstance(x, Mxfp4)}
        assert {name.rsplit("/", 1)[1] for name in packed} == {
            "gate_ELF",
            "expert_up_ELF",
            "expert_down_EFL",
        }
        for name, x in packed.items():
            assert sorted(x.shape) == sorted(targets[name].shape)
            assert x.packed.addressable_data(0).nbytes * 4 == x.packed.nbytes or (
                x.packed.addressable_data(0).nbytes * 8 == x.packed.nbytes
            ), name
        # A pytree: it can be an argument of jit.
        moved = jax.jit(lambda w: jax.tree.map(lambda x: x + 0, w))(packed)
        assert all(isinstance(x, Mxfp4) for x in moved.values())


def test_orbax_restores_only_what_is_asked_for_and_refuses_another_dtype(converted):
    arrays = StoredArrays(epath.Path(converted / "0" / "state")).info("vision")
    target = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in arrays.items()}
    with Store(converted) as store:
        got = store.restore({"vision": nest(target)}, only=("vision",)).state
        assert got["vision"]["mm_projector"]["post_norm"]["weight"].dtype == jnp.bfloat16
        first = next(iter(target))
        target[first] = jax.ShapeDtypeStruct(target[first].shape, jnp.float32)
        with pytest.raises(ValueError, match="stored bfloat16.*asked for float32"):
            store.restore({"vision": nest(target)}, only=("vision",))


# Options by name


def test_dequantized_experts_are_the_packed_ones_as_numbers(tmp_path, source, converted):
    options = Options(dequantize=True)
    to_orbax.convert(source, tmp_path / "wide", options=options, say=quiet)
    to_hf.convert(tmp_path / "wide", tmp_path / "one", say=quiet)
    to_hf.convert(converted, tmp_path / "two", options, say=quiet)
    one, two, packed = (read_index(d) for d in (tmp_path / "one", tmp_path / "two", source))
    assert set(one) == set(two)
    for name, tensor in one.items():
        if name in packed:
            want = packed[name].read()
        else:
            codes, scales = packed[name + "_packed"].read(), packed[name + "_scale"].read()
            want = mxfp4.unpack(codes, scales, ml_dtypes.bfloat16)
        assert_same_bits(tensor.read(), want, name)
        assert_same_bits(two[name].read(), want, name)
    told = json.loads((tmp_path / "one" / "config.json").read_text())
    assert "quantization_config" not in told["text_config"]


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_a_bf16_model_is_packed_by_the_rule_that_was_named(tmp_path, rule):
    src = released.make(tmp_path / "src", packed=False)
    options = Options(quantize=rule)
    to_orbax.convert(src, tmp_path / "packed", options=options, say=quiet)
    to_hf.convert(tmp_path / "packed", tmp_path / "one", say=quiet)
    to_orbax.convert(src, tmp_path / "wide", say=quiet)
    to_hf.convert(tmp_path / "wide", tmp_path / "two", options, say=quiet)
    one, two, wide = (read_index(d) for d in (tmp_path / "one", tmp_path / "two", src))
    n = 0
    for name, tensor in wide.items():
        if ".experts." not in name:
            assert_same_bits(one[name].read(), tensor.read(), name)
            continue
        for end, want in zip(("_packed", "_scale"), mxfp4.pack(tensor.read(), rule), strict=True):
            assert_same_bits(one[name + end].read(), want, name)
            assert_same_bits(two[name + end].read(), want, name)
            n += 1
    assert n == 5 * 8 * 6
    told = json.loads((tmp_path / "one" / "config.json").read_text())
    groups = told["text_config"]["quantization_config"]["config_groups"]
    assert groups["group_0"]["weights"]["num_bits"] == 4


def test_packing_what_was_unpacked_gives_the_same_numbers(tmp_path, source):
    """decode(encode(x)) = x on the grid, by the rule that clips nothing (T19)."""
    to_orbax.convert(source, tmp_path / "wide", options=Options(dequantize=True), say=quiet)
    to_hf.convert(tmp_path / "wide", tmp_path / "again", Options(quantize="ceil"), say=quiet)
    before, after = read_index(source), read_index(tmp_path / "again")
    for name in (n for n in before if n.endswith("_packed")):
        values = [
            mxfp4.unpack(x[name].read(), x[name.replace("_packed", "_scale")].read())
            for x in (before, after)
        ]
        assert np.array_equal(*values), name


# A trained checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What train.py leaves: float32 masters and optimizer state, in Orbax's own layout."""
    run = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    leaves = {
        name: rng.standard_normal(leaf.shape, np.float32)
        for name, leaf in plan.abstract_leaves(tiny.CONFIG).items()
    }
    state = {"model": nest(jax.tree.map(jnp.asarray, leaves)), "count": jnp.zeros((), jnp.int32)}
    with Store(run / "checkpoints") as store:
        config = {"model": to_dict(tiny.CONFIG), "data": {"tokenizer": "bytes"}}
        store.save(7, state, {}, {"config": config})
    return run, leaves


def test_a_trained_checkpoint_becomes_a_directory_that_loads(tmp_path, trained):
    """No source names, no prefix: the text model's own names, and a config.json with its sizes."""
    run, leaves = trained
    to_hf.convert(run, tmp_path / "out", file_bytes=40_000, say=quiet)
    names = set(read_index(tmp_path / "out"))
    assert "model.layers.0.self_attn.A_log" in names and "lm_head.weight" in names
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert read_index(tmp_path / "out")["model.layers.0.self_attn.A_log"].shape == (128,)
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        opened = open_checkpoint(str(tmp_path / "out"), "float32")
        for name, leaf in named_leaves(opened.load()).items():
            assert_same_bits(np.asarray(leaf), np.asarray(leaves[name]), name)
    assert not differences(open_view(run), open_view(tmp_path / "out"))


def test_narrow_rounds_what_the_release_has_in_bf16_and_nothing_else(tmp_path, trained):
    run, leaves = trained
    to_hf.convert(run, tmp_path / "out", narrow=True, say=quiet)
    found = read_index(tmp_path / "out")
    assert found["lm_head.weight"].dtype == ml_dtypes.bfloat16
    want = np.asarray(leaves["head_DV"]).T.astype(ml_dtypes.bfloat16)
    assert_same_bits(found["lm_head.weight"].read(), want, "head")
    assert found["model.layers.0.self_attn.dt_bias"].dtype == np.float32


@pytest.mark.parametrize("packed", [True, False])
def test_a_written_configuration_is_read_back_as_the_same_model(tmp_path, packed):
    config = hf_config.from_hf(GOLDEN / "config.json")
    for old in (None, json.loads((GOLDEN / "config.json").read_text())):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(hf_config.to_hf(config, packed, old)))
        assert hf_config.from_hf(path) == config
        assert ("quantization_config" in path.read_text()) == packed


# Looking and comparing


def test_verify_names_the_tensor_whose_byte_was_flipped(tmp_path, source, converted, capsys):
    copy = shutil.copytree(source, tmp_path / "copy")
    tensor = read_index(copy)["language_model.model.layers.3.self_attn.kv_b_proj.weight"]
    last = Path(tensor.file).read_bytes()[tensor.stop - 1]
    overwrite(tensor.file, tensor.stop - 1, bytes([last ^ 1]))
    assert convert.main(["verify", str(copy), str(converted)]) == 1
    out = capsys.readouterr().out
    assert "layers.3.self_attn.kv_b_proj.weight: BLAKE3" in out and "1 are not" in out


def test_stored_bytes_that_changed_are_not_released(tmp_path, source, monkeypatch):
    """By the hash of conversion: a flipped bit in a file too large for the manifest to hash it."""
    copy = tmp_path / "copy"
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
    to_orbax.convert(source, copy, say=quiet)
    file = copy / "0/state/model.head_DV/c/0/0"
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match="lm_head.weight is not what was converted"):
        to_hf.convert(copy, tmp_path / "out", say=quiet)
    assert differences(open_view(copy), open_view(source)) == {
        "language_model.lm_head.weight": "the first has other bytes than were converted"
    }


def test_logits_through_both_formats_agree_and_routing_is_reported(
    source, converted, capsys, monkeypatch
):
    """T32: choices by layer, with own and with forced routing."""
    monkeypatch.setattr(verify, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
    argv = ["verify", str(source), str(converted), "--logits", "5,7,11,2"]
    assert convert.main(argv) == 0
    out = capsys.readouterr().out
    assert "MoE layer 4: 100.00% of the chosen experts agree" in out
    assert "forced routing: logits differ by at most 0" in out


def test_inspect_counts_what_is_there(source, converted, capsys):
    for path in (source, converted):
        assert convert.main(["inspect", str(path)]) == 0
    one, two = (x for x in capsys.readouterr().out.split("group   ") if x.strip())
    assert one == two
    assert "complete K3 of its configuration, with vision tensors" in one
    experts = 5 * 8 * 3 * 64 * 96
    row = next(line for line in one.splitlines() if line.startswith("routed experts"))
    assert row.split()[2:5] == ["240", f"{experts // 2 + experts // 32:,}", f"{experts:,}"]
