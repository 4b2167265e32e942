"""Conversion that is killed, runs out of disk or is started twice: it goes on where it was."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import released
from fsspec.implementations.memory import MemoryFileSystem

from k3_jax.checkpoint import to_hf, to_orbax
from k3_jax.checkpoint.plan import Options
from k3_jax.checkpoint.safetensors import FormatError

ROOT = Path(__file__).parent.parent


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return released.make(tmp_path_factory.mktemp("released") / "source")


KILLED = """
import itertools, json, os, random, signal, sys
from k3_jax.checkpoint import journal, to_hf, to_orbax, views, zarr
from k3_jax.checkpoint.safetensors import Stored
src, ours, back, log = sys.argv[1:]
quiet = lambda *_: None

def dies(work, patch, n, before):
    # Runs `work` in a child that is killed when `patch` is called for the n-th time.
    pid = os.fork()
    if pid == 0:
        owner, name = patch
        # Two threads call it: each call has its own number.
        real, count = getattr(owner, name), itertools.count(1)
        def counted(*args, **kwargs):
            i = next(count)
            if i == n and before:
                os.kill(os.getpid(), signal.SIGKILL)
            out = real(*args, **kwargs)
            if i == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return out
        setattr(owner, name, counted)
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it was not killed"

def logged(self, *args, _real=Stored.pieces):
    with open(log, "a") as f:
        f.write(f"{os.getpid()} {self.file.name} {self.start}\\n")
    return _real(self, *args)

Stored.pieces = logged
one = lambda: to_orbax.convert(src, ours, say=quiet)
two = lambda: to_hf.convert(ours, back, say=quiet)
done = []
add, manifest = (journal.Journal, "add"), (to_orbax.manifest, "write")
for patch, n, before in [
    ((zarr.Shard, "write"), 3, False), (add, 40, True), (add, 60, False),
    ((to_orbax, "write_tree"), 1, False), (manifest, 1, True), (manifest, 1, False),
]:
    dies(one, patch, n, before)
    done.append(len(os.listdir(ours + "/convert.journal")))
one()
for patch, n, before in [((views.StoredView, "pieces"), 5, True), (add, 2, True), (add, 3, False)]:
    dies(two, patch, n, before)
two()
print(json.dumps(done))
"""


def digest(directory: Path) -> dict:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def test_killed_nine_times_it_goes_on_and_ends_in_the_same_bytes(whole, tmp_path):
    """kill -9 in the middle of a shard, before and after records, while the end is written: no
    finished shard is read again, and what comes out is what comes out at once (T24)."""
    log = tmp_path / "log"
    argv = [whole, tmp_path / "ours", tmp_path / "back", log]
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, *map(str, argv)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    records = json.loads(out.stdout)
    assert records == sorted(records) and 40 <= records[1] < records[2] < records[3]
    to_orbax.convert(whole, tmp_path / "at once", say=quiet)
    assert digest(tmp_path / "ours") == digest(tmp_path / "at once")
    assert digest(tmp_path / "back") == digest(whole)
    reads = [line.split(" ", 1) for line in log.read_text().splitlines()]
    # Read again at most what was under way in two threads when the first three kills came.
    assert len(reads) - len({what for _, what in reads}) <= 3 * 2 * 8


def test_an_unfinished_conversion_is_no_checkpoint_and_goes_on_with_its_source_alone(
    whole, tmp_path
):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_orbax, "write_tree", stop)
        with pytest.raises(Stop):
            to_orbax.convert(whole, tmp_path / "ours", say=quiet)
    with pytest.raises(FormatError, match="no whole checkpoint .*manifest.json is missing"):
        to_hf.convert(tmp_path / "ours", tmp_path / "out", say=quiet)
    with pytest.raises(FileExistsError, match="differs from this one in options"):
        to_orbax.convert(whole, tmp_path / "ours", options=Options(dequantize=True), say=quiet)
    other = released.make(tmp_path / "other", released.SMALL._replace(vocab=512))
    with pytest.raises(FileExistsError, match="differs from this one in configuration, tensors"):
        to_orbax.convert(other, tmp_path / "ours", say=quiet)
    to_orbax.convert(whole, tmp_path / "ours", say=quiet)
    with pytest.raises(FileExistsError, match="holds a whole checkpoint"):
        to_orbax.convert(whole, tmp_path / "ours", say=quiet)


def test_a_disk_that_runs_full_is_told_with_the_file_and_what_is_done_stays(whole, tmp_path):
    """RLIMIT_FSIZE fails a write as a full disk does, in a file that is longer than it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for way, src, dst in (
        (to_orbax.convert, whole, tmp_path / "ours"),
        (to_hf.convert, tmp_path / "ours", tmp_path / "back"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        try:
            with pytest.raises(
                OSError, match=r"((model|vision)\.|\.safetensors).*too large.*what is done"
            ):
                way(src, dst, say=quiet)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        way(src, dst, say=quiet)
    assert digest(tmp_path / "back") == digest(whole)


def test_too_little_space_is_told_before_the_first_byte(whole, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match="bytes are to be written to .*ours, where 1,000 are free"):
        to_orbax.convert(whole, tmp_path / "ours", say=quiet)
    assert not (tmp_path / "ours" / "0").exists()


class Objects(MemoryFileSystem):
    """Stands for an object store: no rename in place, an object is there when it is closed."""

    protocol = ("gcs", "gs")
    store: dict = {}
    pseudo_dirs = [""]

    def __init__(self, finalize_on_close=True, **others):
        super().__init__(**others)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("gs://", "/").replace("gcs://", "/"))


def test_an_object_store_gets_the_same_objects_as_a_disk(whole, tmp_path):
    fsspec.register_implementation("gcs", Objects, clobber=True)
    try:
        to_orbax.convert(whole, "gs://bucket/ours", say=quiet)
    finally:
        fsspec.register_implementation("gcs", "gcsfs.GCSFileSystem", clobber=True)
    to_orbax.convert(whole, tmp_path / "ours", say=quiet)
    found = {name.removeprefix("/bucket/ours/"): x.getvalue() for name, x in Objects.store.items()}
    assert found == digest(tmp_path / "ours")
