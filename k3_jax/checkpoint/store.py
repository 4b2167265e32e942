"""Checkpoints of a sharded state, and only whole ones. The only file that imports Orbax.

directory/<step>/state/...             arrays of one tree of plain dicts (Orbax, OCDBT)
directory/<step>/data/<process>.json   where the data loader of each process stood
directory/<step>/manifest.json         written last: each file with its size, the run's meta
"""

import asyncio
import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.tree import check_match, check_state, placed, selected

CHUNK_BYTES = 256 << 20  # largest piece that a reader must hold to get at any part of an array
# Above it stacks of matrices are cut into matrices: an export reads them one by one.
STACK_BYTES = 1 << 20
# Status words by which TensorStore says that stored bytes are not what was written.
DAMAGE = re.compile("DATA_LOSS|OUT_OF_RANGE|NOT_FOUND")
NO_STEP, FAILED = -1, -2
# Orbax looks for a database, and a conversion writes a folder per array. The manifest tells what is
# whole, so its warning that a checkpoint may be malformed would only alarm.
logging.get_absl_logger().addFilter(
    lambda record: "TensorStore data files not found" not in str(record.msg)
)
_barriers = itertools.count()  # equal in every process, since saves are made in the same order


class CheckpointError(RuntimeError):
    """A checkpoint exists and cannot be used; the message says which and why."""


class Restored(NamedTuple):
    """What `Store.restore` found: `data_state` is the union over the processes that saved."""

    step: int
    state: dict[str, Any]
    data_state: dict[str, Any]
    meta: dict[str, Any]


class Store:
    """A directory of numbered checkpoints, one writer at a time.

    Every method is called by every process, in the same order; process 0 decides which step is
    used and writes manifests. Local paths and what etils.epath opens (gs://...) are accepted.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 3, async_save: bool = True):
        """keep: whole steps that stay, at least 1. Space for keep + 1 is needed while saving."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must stay")
        is_local = manifest.is_local(directory)
        self.directory = epath.Path(os.path.abspath(directory) if is_local else directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(f"checkpoint directory {self.directory} is a file")
        self._is_local = is_local
        self._keep = keep
        self._async_save = async_save
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = None  # (step, future) of the save under way
        self._newest = None  # newest whole step, once known to this writer
        self._damaged: dict[str, str] = {}  # whole by size, but not readable; by directory name
        self._reported: set[tuple[str, str]] = set()  # each fault is told once

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save under way; its error is raised here if nobody has seen it yet."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def wait(self) -> None:
        """Returns when the save under way is whole on disk; raises what went wrong with it."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            raise CheckpointError(
                f"step {step} was not saved to {self.directory}: {error}"
            ) from error

    def prepare(self, state: Any) -> None:
        """Refuses before the first step what the first save would refuse: bad leaves, no space or
        no permission. Takes arrays or their shapes, and sweeps up what a killed save left behind.
        """
        self.wait()
        n_bytes = check_state(state)
        _on_first_process(lambda: self._make_ready(n_bytes))

    def save(self, step: int, state: dict, data_state: dict, meta: dict) -> None:
        """Starts writing `state` as `step`; returns when the arrays may be changed or donated.

        Waits for the save before it, and raises that save's error. Steps grow: a step that is
        not above the newest whole one is refused, because a restart would not resume from it.
        A broken step of the same number is removed, with a warning.

        state: nested dicts, string keys without "." and "/", jax.Arrays.
        data_state: JSON, keys distinct over processes. meta: JSON, equal on all processes.
        """
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        self.wait()
        n_bytes = check_state(state)
        barrier = str(next(_barriers))
        data_state, meta = _plain_json("data_state", data_state), _plain_json("meta", meta)
        newest = _on_first_process(lambda: self._make_ready(n_bytes, step))
        if step <= newest:
            raise ValueError(
                f"step {step} is not above the newest whole checkpoint, {newest}, in "
                f"{self.directory}: remove the later steps or use another directory"
            )
        context = ocp.Context()
        context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
        context.array.saving.scoped_storage_options_creator = _cut_as_matrices
        with context:
            response = ocp.save_async(
                self.directory / str(step), state, checkpointable_name="state"
            )
        future = self._writer.submit(self._finish, step, response, data_state, meta, barrier)
        self._pending = (step, future)
        if not self._async_save:
            self.wait()

    def steps(self) -> list[int]:
        """Whole steps, newest last. Lists files, reads no array."""
        return [
            step for step, path in manifest.numbered(self.directory) if self._fault(path) is None
        ]

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The `meta` of a whole step, of the newest by default. Reads no array, needs no mesh."""
        chosen = _on_first_process(lambda: self._choose(step))
        if chosen == NO_STEP:
            raise FileNotFoundError(f"no finished checkpoint in {self.directory}")
        return manifest.read(self.directory / str(chosen))["meta"]

    def restore(
        self,
        abstract_state: dict,
        step: int | None = None,
        *,
        only: Iterable[str] | None = None,
        cast: bool = False,
    ) -> Restored | None:
        """Loads a step, by default the newest whole one; None when no save ever finished.

        A broken step is skipped with a warning that names it; when every step is broken,
        CheckpointError lists them. A step that was asked for is never replaced by another.

        abstract_state: nested dicts of jax.ShapeDtypeStruct; each leaf comes back with the
        struct's sharding, on a single device where it has none. Shardings over an abstract mesh,
        as jax.eval_shape makes them, mean the mesh of jax.set_mesh.
        only: top-level names to load; the rest is neither compared nor read.
        cast: lets stored values be converted to the dtype asked for; refused otherwise, since
        Orbax would narrow float32 to bfloat16 without a word.

        Raises StateMismatch with paths for missing and extra leaves, other shapes, other dtypes.
        """
        self.wait()
        names = None if only is None else tuple(only)
        target = jax.tree.map(placed, selected(abstract_state, names))
        while True:
            chosen = _on_first_process(lambda: self._choose(step))
            if chosen == NO_STEP:
                return None
            if restored := self._load(chosen, target, names, cast):
                return restored

    def _load(self, step: int, target: dict, only: tuple | None, cast: bool) -> Restored | None:
        """None when stored bytes are damaged: on every process when on one."""
        path = self.directory / str(step)
        state, damage = None, None
        try:
            stored = ocp.metadata(path, checkpointable_name="state").metadata
            check_match(str(path), selected(stored, only), target, cast)
            context = ocp.Context()
            context.pytree.loading.partial_load = only is not None
            with context:
                state = ocp.load(path, target, checkpointable_name="state")
        except Exception as error:
            damage = _damage(error)
            if damage is None:
                raise
        if np.all(multihost_utils.process_allgather(np.int32(damage is None))):
            return Restored(step, state, _read_rows(path / "data"), manifest.read(path)["meta"])
        self._damaged[path.name] = damage or "another process could not read it, see its log"
        self._newest = None
        return None

    def _finish(self, step: int, response: Any, data_state: dict, meta: dict, barrier: str) -> None:
        """Runs beside training: waits for Orbax's commit, then makes the step whole."""

        def wait_for_all(what: str) -> None:
            asyncio.run(ocp.multihost.sync_global_processes(what, operation_id=barrier))

        response.result()
        path = self.directory / str(step)
        (path / "data").mkdir(exist_ok=True)
        (path / "data" / f"{jax.process_index()}.json").write_text(json.dumps(data_state))
        wait_for_all("k3_data")
        if jax.process_index() == 0:
            manifest.write(path, meta)
            self._damaged.pop(path.name, None)
            self._remove_old()
        # Others may ask what is whole as soon as they have waited.
        wait_for_all("k3_whole")
        self._newest = step

    def _remove_old(self) -> None:
        """Removes all that is older than the `keep` newest whole steps; broken ones don't count."""
        kept = self.steps()[-self._keep :]
        for step, path in manifest.numbered(self.directory) if len(kept) == self._keep else ():
            if step < kept[0]:
                try:
                    manifest.remove(path)
                except OSError as error:
                    logging.warning("old checkpoint %s stays: %s", path, error)

    def _make_ready(self, n_bytes: int, step: int | None = None) -> int:
        """Clears the place for `step`, checks space; returns the newest whole step."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._newest is None:
                self._newest = max(self.steps(), default=NO_STEP)
            for number, path in manifest.numbered(self.directory):
                if path.name.endswith(manifest.UNFINISHED):
                    path.rmtree()
                elif number == step and step > self._newest:
                    logging.warning("broken checkpoint %s is replaced: %s", path, self._fault(path))
                    manifest.remove(path)
            probe = self.directory / ".writable"
            probe.write_text("")
            probe.unlink()
            free = shutil.disk_usage(self.directory).free if self._is_local else n_bytes
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write checkpoints to {self.directory}: {error}"
            ) from error
        if free < n_bytes:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint of {n_bytes:,} bytes does not fit into {self.directory}, where "
                f"{free:,} bytes are free",
            )
        return self._newest

    def _choose(self, step: int | None) -> int:
        """The step to read: the one asked for if it is whole, else the newest whole one."""
        found = manifest.numbered(self.directory)
        if step is not None:
            if step not in dict(found):
                there = [number for number, _ in found]
                raise FileNotFoundError(f"no step {step} in {self.directory}; there are {there}")
            found = [(step, self.directory / str(step))]
        faults = {}
        for number, path in reversed(found):
            faults[path] = self._fault(path)
            if faults[path] is None:
                return number
            if step is None and (path.name, faults[path]) not in self._reported:
                self._reported.add((path.name, faults[path]))
                logging.warning("checkpoint %s is skipped: %s", path, faults[path])
        # A run killed in its first save has lost nothing and may start anew by itself.
        if step is None and all(map(manifest.is_unfinished, faults)):
            return NO_STEP
        listed = "".join(f"\n  {path.name}: {fault}" for path, fault in faults.items())
        raise CheckpointError(f"no checkpoint to read in {self.directory}, broken:{listed}")

    def _fault(self, path: epath.Path) -> str | None:
        return self._damaged.get(path.name) or manifest.fault(path)


def _cut_as_matrices(_, x: jax.Array):
    """Storage options by which a piece is one index of x's first axes, as far as it is large."""
    shape = x.sharding.shard_shape(x.shape)
    n_bytes, axes = math.prod(shape) * x.dtype.itemsize, []
    for axis, size in enumerate(shape[:-2]):
        if n_bytes > STACK_BYTES:
            axes.append(axis)
            n_bytes //= size
    return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=tuple(axes))


def _on_first_process(work: Callable[[], int]) -> int:
    """Runs `work` on process 0 and returns its result everywhere; fails everywhere if it fails."""
    result, error = FAILED, None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
    if error is not None:
        raise error
    if result == FAILED:
        raise CheckpointError("process 0 gave up on the checkpoint directory; its log says why")
    return result


def _read_rows(folder: epath.Path) -> dict[str, Any]:
    """The loader states of all processes that saved."""
    rows = {}
    for path in sorted(folder.iterdir()):
        part = json.loads(path.read_text())
        if shared := sorted(rows.keys() & part.keys()):
            raise CheckpointError(f"{path}: rows {shared} were saved by two processes")
        rows |= part
    return rows


def _plain_json(name: str, value: Any) -> Any:
    copy = json.loads(json.dumps(value))
    if copy != value or not isinstance(value, dict):
        raise ValueError(f"{name} must be a dict that JSON gives back unchanged: {value}")
    return copy


def _damage(error: BaseException) -> str | None:
    """What `error` says about damaged bytes; None when it is about anything else."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        text = str(error)
        if DAMAGE.search(text):
            return f"{type(error).__name__}: {text[:200]}"
        error = error.__cause__ or error.__context__
    return None
