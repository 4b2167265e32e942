"""How fast checkpoints convert, in how little memory, and that kills do not matter.

    python -m benchmarks.convert [--gigabytes 2] [--directory /tmp]

makes a released-format checkpoint of random packed experts in 64 files, converts it both ways in
processes whose address space is limited to 1 GB, kills a third conversion three times, compares all
bytes, and times `cp` of the same bytes in between. Prints the figures and saves them as
benchmarks/results/convert.json. Needs four times the checkpoint's size on disk.
"""

import argparse
import filecmp
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from k3_jax.checkpoint.plan import DEFAULT, make_plan
from k3_jax.checkpoint.to_orbax import open_source
from tests import released

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "convert.json"
N_FILES = 64
LATENT, EXPERT = 3584, 3072  # an expert as the release has it
LIMIT = 1_000_000_000
ROUNDS = 5  # of which the middle one counts
# One malloc arena: each thread's own would reserve 64 MiB of address space that nobody uses.
ENVIRONMENT = os.environ | {"MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"}
CHILD = f"""
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT},) * 2)
from benchmarks.convert import settle
from k3_jax.checkpoint import to_hf, to_orbax
way, src, dst = sys.argv[1:]
if way == "imports":
    from k3_jax.checkpoint.plan import abstract_leaves
    abstract_leaves(to_orbax.open_source(src).config)
else:
    settle(Path(src), Path(dst + ".copy"))
start = time.perf_counter()
if way == "there":
    to_orbax.convert(src, dst, say=lambda *_: None)
if way == "back":
    to_hf.convert(src, dst, say=lambda *_: None)
seconds = time.perf_counter() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def make_source(directory: Path, n_bytes: float) -> int:
    """About `n_bytes` of mostly packed experts in 64 files of equal size; returns their bytes."""
    sizes = released.SMALL._replace(latent=LATENT, expert=EXPERT)
    each = 5 * 3 * LATENT * EXPERT * (1 / 2 + 1 / 32)
    sizes = sizes._replace(experts=max(int(n_bytes / each), 2))
    tensors = {n: value for file in released.files_of(sizes) for n, value in file.items()}
    total = sum(bytes_of(value) for value in tensors.values())
    files, at = [{} for _ in range(N_FILES)], 0
    for name, value in tensors.items():
        files[min(at * N_FILES // total, N_FILES - 1)][name] = value
        at += bytes_of(value)
    released.make(directory, sizes, files=[file for file in files if file])
    return total


def bytes_of(tensor) -> int:
    dtype, shape = tensor
    return math.prod(shape) * released.WIDTHS[dtype]


def child(way: str, src: Path, dst: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, way, str(src), str(dst)],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen) -> tuple[float, int]:
    """(seconds of the conversion without imports, peak resident bytes)"""
    out, _ = process.communicate()
    if process.returncode:
        sys.exit(f"a conversion failed with {process.returncode}")
    return tuple(json.loads(out.splitlines()[-1]))


def copy_seconds(src: Path, dst: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", src, dst], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(dst)
    return seconds


def settle(src: Path, dst: Path) -> None:
    """Right before each timed part: nothing waits to be written, and as many pages as it will fill
    were in use a moment ago. To find others may take the host of a virtual machine longer than the
    copying.
    """
    os.sync()
    copy_seconds(src, dst)


def kill_three_times(src: Path, dst: Path) -> list[int]:
    """Shards that were finished when each kill came; the last call then ends the conversion."""
    journal, found = dst / "convert.journal", []
    source = open_source(src)
    n_jobs = len(make_plan(source.tensors, source.config, DEFAULT).jobs)
    for share in (0.2, 0.5, 0.8):
        process = child("there", src, dst)
        while process.poll() is None:
            if journal.exists() and len(list(journal.iterdir())) > share * n_jobs:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        process.communicate()
        found.append(len(list(journal.iterdir())) if journal.exists() else -1)
    finished(child("there", src, dst))
    return found


def same_bytes(a: Path, b: Path) -> bool:
    names = [p.relative_to(a) for p in sorted(a.rglob("*")) if p.is_file()]
    others = [p.relative_to(b) for p in sorted(b.rglob("*")) if p.is_file()]
    return names == others and all(filecmp.cmp(a / n, b / n, shallow=False) for n in names)


def measure(directory: Path, gigabytes: float) -> dict:
    src, ours, back = directory / "src", directory / "ours", directory / "back"
    n_bytes = make_source(src, gigabytes * 1e9)
    os.sync()
    _, imports = finished(child("imports", src, ours))
    copies, there, returned, peaks = [], [], [], []
    for _ in range(ROUNDS):
        settle(src, directory / "copy")
        copies.append(copy_seconds(src, directory / "copy"))
        seconds, peak = finished(child("there", src, ours))
        there.append(seconds)
        seconds, peak_back = finished(child("back", ours, back))
        returned.append(seconds)
        peaks.append((peak, peak_back))
        if len(there) < ROUNDS:
            shutil.rmtree(ours)
            shutil.rmtree(back)
    is_same = same_bytes(src, back)
    killed_at = kill_three_times(src, directory / "killed")
    is_killed_same = same_bytes(ours, directory / "killed")
    best = {
        name: n_bytes / statistics.median(x) / 1e6
        for name, x in (("cp", copies), ("to_orbax", there), ("to_hf", returned))
    }
    return {
        "bytes": n_bytes,
        "files": N_FILES,
        "address_space_limit": LIMIT,
        "MB_per_s": {name: round(value) for name, value in best.items()},
        "share_of_cp": {name: round(best[name] / best["cp"], 2) for name in ("to_orbax", "to_hf")},
        "peak_resident_MB": {
            "after imports": round(imports / 1e6),
            "to_orbax": round(max(a for a, _ in peaks) / 1e6),
            "to_hf": round(max(b for _, b in peaks) / 1e6),
        },
        "back is byte for byte the source": is_same,
        "files finished at each of three kills": killed_at,
        "killed and resumed is byte for byte the same": is_killed_same,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, files in the page cache",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--directory", help="where the files go; the system's own by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        found = measure(Path(directory), args.gigabytes)
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
