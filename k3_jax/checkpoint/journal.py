"""What a conversion has finished, so that the next call goes on from there."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from etils import epath

from k3_jax.checkpoint.manifest import is_local
from k3_jax.checkpoint.zarr import replace_text

FOLDER = "convert.journal"
PLAN = "plan"
SAY_EVERY = 10  # seconds


class Journal:
    """A folder of `target` with one small file per finished job.

    `identity` says what is being converted, and how: a journal of something else is refused.
    """

    def __init__(self, target: epath.Path, identity: dict):
        self.target = target
        self._folder = target / FOLDER
        self._identity = identity

    def open(self) -> dict[str, dict]:
        """Starts the journal or goes on with it; returns the records of finished jobs by id.

        Raises FileExistsError when the target holds something else, OSError when it cannot be
        written.
        """
        target, plan = self.target, self._folder / PLAN
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{target} is a file; give a directory")
        if plan.exists():
            found = json.loads(plan.read_text())
            if changed := sorted(k for k in self._identity if found.get(k) != self._identity[k]):
                raise FileExistsError(
                    f"{target} holds an unfinished conversion that differs from this one in "
                    f"{', '.join(changed)}; finish that one, or give another directory"
                )
            return {
                path.name: json.loads(path.read_text())
                for path in self._folder.iterdir()
                if path.name != PLAN and not path.name.endswith(".draft")
            }
        others = [p.name for p in target.iterdir() if p.name != FOLDER] if target.exists() else []
        if others:
            raise FileExistsError(f"{target} holds {sorted(others)[0]}; give a new directory")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(plan, json.dumps(self._identity))
        except OSError as e:
            raise OSError(e.errno, f"cannot write to {target}: {e.strerror}") from e
        return {}

    def add(self, job_id: str, record: dict) -> None:
        """Notes a job as finished; its files must have their names by then."""
        replace_text(self._folder / job_id, json.dumps(record))

    def remove(self) -> None:
        self._folder.rmtree()


def check_space(target: epath.Path, n_bytes: int) -> None:
    """Raises OSError when `n_bytes` do not fit, where that can be known."""
    if not is_local(target):
        return
    free = shutil.disk_usage(target).free
    if free < n_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{n_bytes:,} bytes are to be written to {target}, where {free:,} are free",
        )


def run_all(jobs: Iterable, run: Callable, journal: Journal, n_workers: int, say: Callable) -> dict:
    """Runs jobs (with `id` and `n_bytes`) in threads, each noted when done; returns the records.

    The largest come first, so that the threads end together.
    At the first error no job is begun any more, those under way are finished, and it is raised.
    """
    jobs = sorted(jobs, key=lambda job: -job.n_bytes)
    total, done, n_done = sum(job.n_bytes for job in jobs), 0, 0
    records, start, told = {}, time.monotonic(), time.monotonic()

    def work(job):
        try:
            record = run(job)
            journal.add(job.id, record)
        except OSError as e:
            # Writing to an open file that runs out of disk does not name it.
            where, why = e.filename or job.id, e.strerror or e
            raise OSError(
                e.errno,
                f"{where}: {why} (what is done in {journal.target} stays: call again to go on)",
            ) from e
        return job, record

    with ThreadPoolExecutor(n_workers) as pool:
        waiting = {pool.submit(work, job) for job in jobs}
        try:
            while waiting:
                finished, waiting = wait(waiting, SAY_EVERY, FIRST_COMPLETED)
                for future in finished:
                    job, records[job.id] = future.result()
                    done, n_done = done + job.n_bytes, n_done + 1
                if time.monotonic() - told > SAY_EVERY:
                    told = time.monotonic()
                    rate = done / (told - start)
                    left = f", {(total - done) / rate / 60:.0f} min left" if rate else ""
                    say(
                        f"{n_done:,} of {len(jobs):,} files, {done / 1e9:,.1f} of "
                        f"{total / 1e9:,.1f} GB, {rate / 1e6:,.0f} MB/s{left}"
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return records
