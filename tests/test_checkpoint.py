"""Checkpoints come back bit for bit, on any mesh, and only whole ones come back."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import META, ROWS, abstract, assert_same_bits, bits, make_state, save_steps
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from k3_jax.checkpoint import store as store_module
from k3_jax.checkpoint.store import Store
from k3_jax.checkpoint.tree import StateMismatch

ROOT = Path(__file__).parent.parent


def mesh_of(shape, names):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(AxisType.Explicit,) * len(shape))


# Round trips


def test_every_bit_pattern_comes_back(tmp_path):
    state = make_state()
    with Store(tmp_path) as store:
        store.save(3, state, ROWS, META)
    restored = Store(tmp_path).restore(abstract(state))
    assert_same_bits(restored.state, state)
    assert restored.step == 3 and restored.data_state == ROWS and restored.meta == META


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    want = {"w": np.array(state["w"])}
    bump = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    with Store(tmp_path) as store:
        store.save(1, state, {}, {})
        w = bump(state.pop("w"))
        for _ in range(5):
            w = bump(w)
    assert_same_bits(Store(tmp_path).restore(abstract(want)).state, want)


def test_saved_on_8_devices_restores_on_4_as_2x2_and_on_one(tmp_path):
    """T25: each leaf has the sharding asked for, also where eval_shape gave an abstract mesh."""
    want = make_state()
    specs = {"embed_VD": P("fsdp"), "q_DHk": P(None, None, "fsdp"), "experts_EFL": P("fsdp")}
    mesh = mesh_of((8,), ("fsdp",))

    def on(mesh, specs):
        def put(path, x):
            return jax.device_put(x, NamedSharding(mesh, specs.get(path[-1].key, P())))

        return jax.tree_util.tree_map_with_path(put, want)

    with Store(tmp_path) as store:
        store.save(1, on(mesh, specs), {}, {})
    square = mesh_of((2, 2), ("fsdp", "tensor"))
    specs = {"embed_VD": P("tensor", "fsdp"), "q_DHk": P("fsdp", "tensor"), "ids_V": P("tensor")}
    with jax.set_mesh(square):
        target = jax.eval_shape(lambda x: x, on(square, specs))
        assert isinstance(target["model"]["ids_V"].sharding.mesh, jax.sharding.AbstractMesh)
        got = Store(tmp_path).restore(target).state
    assert_same_bits(got, want)
    for (path, x), t in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(target), strict=True):
        assert x.sharding.mesh == square and x.sharding.spec == t.sharding.spec, path
    single = Store(tmp_path).restore(abstract(want)).state
    assert_same_bits(single, want)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(single))


def test_an_abstract_mesh_without_set_mesh_is_refused_by_name(tmp_path):
    save_steps(tmp_path, 1)
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
    target = abstract(make_state(1))
    target["model"]["ids_V"] = jax.ShapeDtypeStruct(
        (64,), jnp.int32, sharding=NamedSharding(mesh, P("fsdp"))
    )
    with pytest.raises(ValueError, match="fsdp.*set_mesh"):
        Store(tmp_path).restore(target)


def test_a_stack_saved_by_one_device_is_stored_in_pieces(tmp_path, monkeypatch):
    """T25: a host that wants one shard of an expert stack must not have to read all of it."""
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 4096)
    state = {"experts_EFL": bits((8, 16, 32), jnp.float32)}
    with Store(tmp_path) as store:
        store.save(1, state, {}, {})
    stored = ocp.metadata(tmp_path / "1", checkpointable_name="state").metadata["experts_EFL"]
    assert np.prod(stored.storage_metadata.chunk_shape) * 4 <= 4096
    assert_same_bits(Store(tmp_path).restore(abstract(state)).state, state)


def test_a_large_stack_is_stored_matrix_by_matrix(tmp_path, monkeypatch):
    """Who exports reads one expert at a time, and decodes no other for it."""
    monkeypatch.setattr(store_module, "STACK_BYTES", 4096)
    state = {
        "large_EFL": bits((3, 4, 16, 32), jnp.float32),
        "small_EF": bits((8, 4, 16), jnp.float32),
    }
    with Store(tmp_path) as store:
        store.save(1, state, {}, {})
    stored = ocp.metadata(tmp_path / "1", checkpointable_name="state").metadata
    chunks = {name: tuple(x.storage_metadata.chunk_shape) for name, x in stored.items()}
    assert chunks == {"large_EFL": (1, 1, 16, 32), "small_EF": (8, 4, 16)}
    assert_same_bits(Store(tmp_path).restore(abstract(state)).state, state)


def test_part_of_the_state_restores_without_the_rest(tmp_path):
    save_steps(tmp_path, 1)
    target = abstract({"model": make_state(1)["model"]})
    restored = Store(tmp_path).restore(target, only=("model",))
    assert_same_bits(restored.state, {"model": make_state(1)["model"]})
    with pytest.raises(StateMismatch, match="modle.*model"):
        Store(tmp_path).restore(target, only=("modle",))


def test_meta_is_read_without_arrays(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2)

    def refuse(*_, **__):
        raise AssertionError("arrays were touched")

    monkeypatch.setattr(ocp, "load", refuse)
    monkeypatch.setattr(ocp, "metadata", refuse)
    assert Store(tmp_path).read_meta() == META
    assert Store(tmp_path).read_meta(1) == META
    with pytest.raises(FileNotFoundError, match="nothing"):
        Store(tmp_path / "nothing").read_meta()


# Refusals


def test_a_dtype_change_is_refused_unless_asked_for(tmp_path):
    """T25: Orbax alone returned A_log 1.2345678 as 1.234375."""
    with Store(tmp_path) as store:
        store.save(1, {"kda": {"A_log": jnp.float32([1.2345678])}}, {}, {})
        target = {"kda": {"A_log": jax.ShapeDtypeStruct((1,), jnp.bfloat16)}}
        with pytest.raises(StateMismatch, match="kda/A_log: stored float32.*asked for bfloat16"):
            store.restore(target)
        got = store.restore(target, cast=True).state["kda"]["A_log"]
    assert got.dtype == jnp.bfloat16 and float(got[0]) == 1.234375


def test_missing_extra_and_misshapen_leaves_are_named(tmp_path):
    save_steps(tmp_path, 1)
    target = abstract(make_state(1))
    del target["opt"]["count"]
    target["model"]["new"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    target["model"]["ids_V"] = jax.ShapeDtypeStruct((65,), jnp.int32)
    with pytest.raises(StateMismatch) as error:
        Store(tmp_path).restore(target, cast=True)
    assert "opt/count: stored int32 [], asked for nothing" in str(error.value)
    assert "model/new: stored nothing, asked for float32 [2]" in str(error.value)
    assert "model/ids_V: stored int32 [64], asked for int32 [65]" in str(error.value)
    assert "embed_VD" not in str(error.value)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}, "'a.b'"),
        ({"a": {1: jnp.ones(2)}}, "key 1"),
        ({"a": {"n": 3}}, "a/n is int"),
        ({"a": [jnp.ones(2)]}, "a is list"),
        ({"rng": jax.random.key(0)}, "rng is key<fry>.*key_data"),
        ({"a": jnp.zeros((0, 3))}, r"a has shape \(0, 3\)"),
        ({}, "non-empty"),
    ],
    ids=["dots would collide", "number as key", "int", "list", "typed key", "no elements", "empty"],
)
def test_a_state_that_would_not_come_back_is_refused(tmp_path, state, words):
    with Store(tmp_path) as store, pytest.raises((ValueError, TypeError), match=words):
        store.save(1, state, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_loader_state_that_json_would_change_is_refused(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(ValueError, match="data_state"):
            store.save(1, make_state(), {0: "int key"}, {})
        with pytest.raises(ValueError, match="meta"):
            store.save(1, make_state(), {}, {"shape": (1, 2)})


def test_a_step_below_the_newest_whole_one_is_refused(tmp_path):
    """A restart would resume from 20 and forget what was saved as 15."""
    save_steps(tmp_path, 10, 20)
    with Store(tmp_path) as store:
        for step in (15, 20):
            with pytest.raises(ValueError, match=f"step {step} .* 20"):
                store.save(step, make_state(), {}, {})
        with pytest.raises(ValueError, match="-1"):
            store.save(-1, make_state(), {}, {})


def test_a_state_larger_than_the_disk_is_refused_with_numbers(tmp_path):
    n = 1 << 60
    huge = {"w": jax.ShapeDtypeStruct((n,), jnp.float32)}
    with Store(tmp_path) as store, pytest.raises(OSError, match=f"{4 * n:,} bytes.*are free"):
        store.prepare(huge)


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        Store(tmp_path / "file")
    with Store(tmp_path / "file" / "run") as store, pytest.raises(OSError, match="file/run"):
        store.prepare(make_state())


# Several processes

PROCESS = """
import sys, json
import jax
import numpy as np
directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from k3_jax.checkpoint.store import Store
mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    sharding = NamedSharding(mesh, P("fsdp"))
    def state(step):
        full = np.arange(8, dtype=np.float32) + step
        return {"w": jax.make_array_from_callback((8,), sharding, lambda at: full[at])}
    with Store(directory, keep=2) as store:
        store.prepare(state(0))
        for step in (1, 2, 3):
            store.save(step, state(step), {f"row {process}": [process, step]}, {"step": step})
        store.wait()
        assert store.steps() == [2, 3]
        got = store.restore(jax.eval_shape(lambda x: x, state(0)))
        local = np.asarray(got.state["w"].addressable_data(0)).tolist()
        print(json.dumps([got.step, local, got.data_state, store.read_meta()]))
"""


def test_each_process_saves_its_loader_state_and_finds_that_of_all(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, tmp_path, port, str(process)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in enumerate(outputs):
        assert out, err
        half = [3.0 + 4 * process + i for i in range(4)]
        rows = {"row 0": [0, 3], "row 1": [1, 3]}
        assert json.loads(out.splitlines()[-1]) == [3, half, rows, {"step": 3}]
