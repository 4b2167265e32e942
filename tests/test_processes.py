"""Several processes on one machine make one run (jax.distributed over loopback)."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharding.hosts import SILENCE, join

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds for any run here


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


PLAIN = ("train", "--config.eval_every=0", "--config.save_every=2")
STAGED = ("stages", "--config.stages.s2_long.batch=4")  # a row for each device and micro-batch


def start(workdir, n, n_devices, *, kind=PLAIN, steps=None, **mesh):
    """`train.py` as n processes with n_devices each."""
    port, here = free_port(), Path(workdir).parent
    sizes = dict(data=1, fsdp=1) | mesh
    config, *flags = kind
    command = [
        *(sys.executable, "train.py", "--config", f"tests/{config}_config.py"),
        *("--workdir", workdir, "--config.data.sources.text.glob=k3_jax/*.py", *flags),
        *([f"--config.steps={steps}"] if steps else []),
        *(f"--config.mesh.{axis}={size}" for axis, size in sizes.items()),
    ]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": "tests",  # one configuration there begins with another
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # half the compile time
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}",
    }
    started = []
    for i in range(n):
        more = [f"--processes=localhost:{port},{n},{i}"] if n > 1 else []
        log = (here / f"{Path(workdir).name}.{i}.log").open("w")
        started.append(
            subprocess.Popen(
                [*map(str, command), *more], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        )
    return started


def losses(workdir) -> dict[int, float]:
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return {x["step"]: x["loss"] for x in map(json.loads, lines) if "loss" in x}


def finish(processes, workdir):
    for i, p in enumerate(processes):
        assert p.wait(LIMIT) == 0, Path(f"{workdir}.{i}.log").read_text()[-2000:]


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_make_the_run_of_one_and_another_number_goes_on(tmp_path, n):
    """T25, T26: n processes, and from their step 2 on one process with another mesh."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(whole, 1, 4, steps=4, data=2, fsdp=2), whole)
    finish(start(parts, n, 4 // n, steps=4, data=2, fsdp=2), parts)
    # Sums over devices come in another order: 1e-7 in the first three losses. By the fourth a token
    # may have gone to another expert for it, 3e-6 where it was seen.
    same = pytest.approx(losses(whole), rel=1e-5)
    first = {step: pytest.approx(losses(whole)[step], rel=1e-6) for step in (1, 2, 3)}
    assert losses(parts) == same and all(losses(parts)[step] == x for step, x in first.items())
    shutil.rmtree(parts / "checkpoints" / "4")
    finish(start(parts, 1, 4, steps=4, fsdp=2, expert=2), parts)
    assert "going on from step 2" in Path(f"{parts}.0.log").read_text()
    assert losses(parts) == same and losses(parts)[3] == first[3]


@pytest.mark.slow
def test_processes_cross_a_stages_border_as_one_does(tmp_path):
    """Two make the run of one, border after step 6 and held-out losses included; begun by two and
    ended by one, or the other way, with the border in between, it is the same run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(whole, 1, 2, kind=STAGED, data=2), whole)
    finish(start(parts, 2, 1, kind=STAGED, data=2), parts)
    same = pytest.approx(losses(whole), rel=1e-6)
    assert losses(parts) == same and max(losses(parts)) > 6 + 1
    for n, step in ((1, 5), (2, 6)):
        for path in (parts / "checkpoints").iterdir():
            if path.name.isdigit() and int(path.name) > step:
                shutil.rmtree(path)
        finish(start(parts, n, 2 // n, kind=STAGED, data=2), parts)
        assert f"going on from step {step}" in Path(f"{parts}.0.log").read_text()
        assert losses(parts) == same


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_ends_and_the_run_goes_on(tmp_path):
    """Within a bounded time and with an error that says so; then from the newest checkpoint."""
    run = tmp_path / "run"
    started = start(run, 2, 2, steps=2000, data=2, fsdp=2)
    deadline = time.monotonic() + LIMIT
    while not (run / "checkpoints" / "2" / "manifest.json").exists():
        assert time.monotonic() < deadline and started[0].poll() is None
        time.sleep(0.2)
    started[1].send_signal(signal.SIGKILL)
    # The service asks for signs of life, finds none, tells the others, and they end.
    assert started[0].wait(3 * SILENCE) != 0
    assert "unhealthy" in Path(f"{run}.0.log").read_text()
    finish(start(run, 1, 4, steps=max(losses(run)) + 4, data=2, fsdp=2), run)
    assert "going on from step" in Path(f"{run}.0.log").read_text()


@pytest.mark.parametrize("text", ["localhost,2,0", "localhost:1,2,2", "here", "localhost:1,2"])
def test_processes_that_cannot_be_are_refused(text):
    with pytest.raises(ValueError, match="neither auto nor HOST:PORT,n,i"):
        join(text)
