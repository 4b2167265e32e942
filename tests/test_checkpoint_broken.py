"""A checkpoint that is broken, or whose save died, is never taken for a whole one."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging as absl_logging
from checkpoint_states import META, abstract, assert_same_bits, bits, make_state, save_steps

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.store import CheckpointError, Store

ROOT = Path(__file__).parent.parent


def array_file(step_path):
    """The file that holds most of the array bytes."""
    return max((step_path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)


@pytest.fixture
def warnings(monkeypatch):
    """What the store tells through absl's warnings, one string each."""
    told = []
    monkeypatch.setattr(absl_logging, "warning", lambda text, *args: told.append(text % args))
    return told


def cut(n_bytes):
    def damage(path):
        file = array_file(path)
        os.truncate(file, min(n_bytes, file.stat().st_size - 1))

    return damage


def fill_with_zeros(path):
    file = array_file(path)
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = {
    "array file one byte short": (cut(1 << 40), "bytes"),
    "array file empty": (cut(0), "0 bytes"),
    "array file missing": (lambda path: array_file(path).unlink(), "missing"),
    "commit marker missing": (lambda path: (path / "commit_success.txt").unlink(), "commit"),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "manifest of zeros": (lambda path: (path / "manifest.json").write_bytes(bytes(9)), "damaged"),
    "array file of zeros": (fill_with_zeros, "other content"),
    "metadata empty": (lambda path: (path / "state" / "_METADATA").write_text(""), "_METADATA"),
    "data state missing": (lambda path: (path / "data" / "0.json").unlink(), "0.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_step_is_skipped_and_later_saves_happen(tmp_path, warnings, damage):
    """T28: step 20 is broken; 10 is used, and 15 and 20 are saved again and found."""
    save_steps(tmp_path, 10, 20)
    break_step, word = DAMAGES[damage]
    break_step(tmp_path / "20")
    target = abstract(make_state())
    with Store(tmp_path, keep=1) as store:
        restored = store.restore(target)
        assert restored.step == 10 and restored.data_state == {"row 0": 10}
        assert_same_bits(restored.state, make_state(10))
        assert len(warnings) == 1 and "/20" in warnings[0] and word in warnings[0]
        with pytest.raises(CheckpointError, match="20"):
            store.restore(target, step=20)
        store.save(15, make_state(115), {}, META)
        store.wait()
        assert store.steps() == [15]
        assert_same_bits(store.restore(target).state, make_state(115))
        store.save(20, make_state(120), {}, META)
    assert "replaced" in warnings[-1]
    assert_same_bits(Store(tmp_path).restore(target).state, make_state(120))
    assert [path.name for path in tmp_path.iterdir()] == ["20"]


# Orbax leaves its other reads unawaited when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_large_array_file_of_zeros_is_noticed_by_the_reader(tmp_path, warnings, monkeypatch):
    """T28: same length, no checksum in the manifest, as for array files on a pod."""
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
    save_steps(tmp_path, 10, 20)
    fill_with_zeros(tmp_path / "20")
    target = abstract(make_state())
    with Store(tmp_path) as store:
        store.prepare(target)
        assert store.steps() == [10, 20]
        assert store.restore(target).step == 10
        assert len(warnings) == 1 and "/20" in warnings[0] and "DATA_LOSS" in warnings[0]
        with pytest.raises(CheckpointError, match="20.*DATA_LOSS"):
            store.restore(target, step=20)
        store.save(20, make_state(120), {}, META)
        store.wait()
        assert_same_bits(store.restore(target).state, make_state(120))


def test_rows_saved_by_two_processes_are_refused(tmp_path):
    save_steps(tmp_path, 10)
    (tmp_path / "10" / "data" / "1.json").write_text('{"row 0": 9}')
    with pytest.raises(CheckpointError, match="row 0.*two processes"):
        Store(tmp_path).restore(abstract(make_state()))


def test_when_all_steps_are_broken_each_is_listed(tmp_path):
    """T28: the marker of step 20 is gone and step 10 is truncated."""
    save_steps(tmp_path, 10, 20)
    cut(100)(tmp_path / "10")
    (tmp_path / "20" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)20: manifest.json.*10: file state/.*100 bytes"):
        Store(tmp_path).restore(abstract(make_state()))
    with pytest.raises(CheckpointError, match="10"):
        Store(tmp_path).read_meta()


def test_a_step_asked_for_is_never_replaced_by_another(tmp_path):
    save_steps(tmp_path, 10, 20)
    cut(0)(tmp_path / "20")
    target = abstract(make_state())
    with Store(tmp_path) as store:
        with pytest.raises(FileNotFoundError, match=r"no step 15 .*\[10, 20\]"):
            store.restore(target, step=15)
        with pytest.raises(CheckpointError, match="20.*0 bytes"):
            store.restore(target, step=20)
        assert store.restore(target, step=10).step == 10
    assert Store(tmp_path / "new").restore(target) is None


def test_the_newest_whole_steps_stay_and_broken_ones_do_not_count(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    cut(0)(tmp_path / "4")
    save_steps(tmp_path, 5, keep=2)
    assert Store(tmp_path).steps() == [3, 5]
    save_steps(tmp_path, 6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]
    with pytest.raises(ValueError, match="keep=0"):
        Store(tmp_path, keep=0)


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from k3_jax.checkpoint import manifest, store as store_module
import numpy as np, jax.numpy as jnp
directory, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def written():
    files = directory.glob("20.*/state/*/d/*")
    return sum(file.stat().st_size for file in files)
def watch():
    while not (list(directory.glob("20.*")) if moment == "first save" else written() > 1 << 20):
        time.sleep(0.0005)
    die()
def state(seed):
    return {"w": jnp.asarray(np.random.default_rng(seed).random((32, 1 << 18), np.float32))}
store = store_module.Store(directory)
if moment != "first save":
    store.save(10, state(10), {"row": 10}, {})
    store.wait()
if moment == "committed, not yet whole":
    manifest.write = die
else:
    threading.Thread(target=watch, daemon=True).start()
store.save(20, state(20), {"row": 20}, {})
store.wait()
"""


@pytest.mark.parametrize("moment", ["first save", "half written", "committed, not yet whole"])
def test_a_save_killed_half_way_is_never_taken_for_a_checkpoint(tmp_path, warnings, moment):
    """T28: kill -9 during the save of step 20, at several moments."""
    command = [sys.executable, "-c", KILLED, tmp_path, moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {path.name for path in tmp_path.iterdir()}
    is_committed = moment.startswith("committed")
    assert ("20" if is_committed else "20.orbax-checkpoint-tmp") in left
    want = {"w": np.random.default_rng(10).random((32, 1 << 18), np.float32)}
    with Store(tmp_path) as store:
        restored = store.restore(abstract(want))
        assert len(warnings) == 1 and "/20" in warnings[0] and "cut off" in warnings[0]
        if moment == "first save":
            assert restored is None
        else:
            assert restored.step == 10 and restored.data_state == {"row": 10}
            assert_same_bits(restored.state, want)
        store.save(20, {"w": jnp.ones(3)}, {}, {})
        store.wait()
        assert store.steps()[-1] == 20
    assert not list(tmp_path.glob("*tmp*"))


def test_only_a_writer_sweeps_up_what_a_killed_save_left(tmp_path, warnings):
    """A reader beside a running trainer must leave the save under way alone."""
    save_steps(tmp_path, 10)
    left = tmp_path / "17.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    with Store(tmp_path) as store:
        assert store.restore(abstract(make_state())).step == 10 and left.exists()
        store.prepare(make_state())
        assert [path.name for path in tmp_path.iterdir()] == ["10"]


@pytest.mark.parametrize("where", ["wait", "close", "save"])
def test_an_error_in_the_background_surfaces(tmp_path, where):
    """The system refuses files above 64 KiB, as a full disk would refuse more bytes."""
    state = {"w": bits((1 << 18,), jnp.uint8)}
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Store(tmp_path)
    store.save(1, state, {}, {})
    store.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        store.save(2, state, {}, {})
        with pytest.raises(CheckpointError, match=f"step 2 was not saved to {tmp_path}"):
            store.save(3, state, {}, {}) if where == "save" else getattr(store, where)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Store(tmp_path) as store:
        assert store.steps() == [1]
        store.save(2, state, {}, {})
    assert_same_bits(Store(tmp_path).restore(abstract(state)).state, state)


def test_a_save_without_async_is_whole_when_it_returns(tmp_path):
    with Store(tmp_path, async_save=False) as store:
        store.save(1, make_state(), {}, META)
        assert Store(tmp_path).steps() == [1]
