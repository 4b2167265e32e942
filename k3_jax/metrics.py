"""What a run tells: a line, a progress bar, `run.json`, `metrics.jsonl` and TensorBoard."""

import json
import math
import sys
from datetime import timedelta

import jax
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from tensorboardX import SummaryWriter

from k3_jax.checkpoint.zarr import replace_text
from k3_jax.chips import peak_flops
from k3_jax.config import Stage, TrainConfig, planned, to_dict
from k3_jax.flops import train_flops_per_token
from k3_jax.goodput import Clock
from k3_jax.report.record import describe


class Metrics:
    """Writes the same numbers for people and for programs. Only process 0 writes.

    In a run of stages every line names its stage. A resumed run drops the lines after the step it
    resumes from, which it will make again. The clock goes on from what the lines told of earlier
    starts.
    """

    def __init__(self, workdir, config: TrainConfig, start: int, clock: Clock):
        self._workdir, self._config, self._start = epath.Path(workdir), config, start
        self._is_first, self._clock = jax.process_index() == 0, clock
        self._stages = planned(config)
        self._n_steps = self._stages[-1].last
        self._tokens, self._pending, told = 0, None, []
        self._console = Console(soft_wrap=True, highlight=False)
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        is_shown = self._is_first and sys.stdout.isatty()
        self._bar = Progress(*columns, console=self._console, disable=not is_shown, transient=True)
        self._task = self._bar.add_task("training", total=self._n_steps, completed=start)
        if self._is_first:
            path = self._workdir / "metrics.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            told = [json.loads(x) for x in lines if x.endswith("}")]
            kept = (json.dumps(x) + "\n" for x in told if x["step"] <= start)
            replace_text(path, "".join(kept))
            self._file = path.open("a")
            self._board = SummaryWriter(str(workdir), purge_step=start + 1)
        self._bar.start()
        clock.go_on(told, start)
        self._since = _stepping(clock.seconds())

    def begin(self, n_params: int, n_devices: int) -> None:
        """Say what runs on what, also to `k3_jax.report`."""
        devices = f"{n_devices} x {jax.devices()[0].device_kind}"
        self.say(f"{n_params:,} parameters on {devices}")
        self.say(f"going on from step {self._start}" if self._start else "from the start")
        if first := self._config.qat_from_step:
            self.say(f"experts train as they will be served from step {first}")
        if self._is_first:
            describe(self._workdir, n_params, devices, to_dict(self._config))

    def say(self, text: str) -> None:
        """One line for people, above the progress bar."""
        if self._is_first:
            self._console.print(text, markup=False)

    def later(self, step: int, values: dict[str, jax.Array]) -> None:
        """Tell of a step when the next one is under way, so that the device never waits for the
        host."""
        self.now()
        self._pending = step, values

    def now(self) -> None:
        """Tell of the step that `later` was given. Raises ValueError, which stops the run, after
        too many bad ones in a row."""
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        values = {k: v.tolist() for k, v in jax.device_get(values).items()}
        self.step(step, values)
        if values["bad_in_row"] >= self._config.max_bad_steps:
            raise ValueError(
                f"the loss or gradient was not finite or a spike in {values['bad_in_row']} steps "
                f"in a row up to step {step}; none of them changed the weights. Lower "
                "optim.learning_rate or look at the data"
            )

    def step(self, step: int, values: dict[str, float]) -> None:
        """Count one finished step; every `log_every` steps, tell of it."""
        self._tokens += values["tokens"]
        self._bar.update(self._task, completed=step)
        every, stage = self._config.log_every, self._stage(step)
        if not every or step % every and step != stage.last:
            return
        spent = self._clock.seconds()
        seconds = _stepping(spent) - self._since
        rate = self._tokens / seconds
        c = stage.config
        a_token = train_flops_per_token(c.model, c.data.seq_len, bool(c.lora.base))
        flops = rate * a_token / jax.device_count()
        values = values | {"tokens_per_second": rate, "tflops_per_device": flops / 1e12}
        values |= spent
        peak = peak_flops()
        if peak:
            values["mfu"] = flops / peak
        left = (self._n_steps - step) * seconds / max(step - self._start, 1)
        self._since, self._tokens, self._start = _stepping(spent), 0, step
        self.write(step, values)
        self.say(
            f"{self._place(step)}  loss {values['loss']:.4f}  "
            f"grad {values['grad_norm']:.3f}  lr {values['learning_rate']:.2e}  "
            f"{rate:,.0f} tokens/s  {flops / 1e12:.3g} TFLOP/s/device  "
            + (f"MFU {100 * flops / peak:.1f} %  " if peak else "")
            + (f"load {values['load_max']:.2f}  " if "load_max" in values else "")
            + (f"skipped {values['skipped']:.0f}  " if values["skipped"] else "")
            + (f"spikes {values['spikes']:.0f}  " if values["spikes"] else "")
            + f"goodput {100 * spent['goodput']:.0f} %  "
            + f"ETA {timedelta(seconds=round(left))}"
        )

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Tell of the held-out loss after a step."""
        self.write(step, values)
        self.say(
            f"{self._place(step)}  held-out loss {values['heldout_loss']:.4f}  "
            f"{values['heldout_bits_per_byte']:.4f} bits per byte"
        )

    def _stage(self, step: int) -> Stage:
        """The stage of a step."""
        return next(s for s in self._stages if step <= s.last)

    def _place(self, step: int) -> str:
        stage = self._stage(step).name
        return f"step {step}/{self._n_steps}" + (f"  {stage}" if stage else "")

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of `metrics.jsonl` and one point of each TensorBoard curve.

        Lists, which have numbers for each layer, are in the file alone.
        """
        if self._is_first:
            stage = self._stage(step).name
            place = {"step": step} | ({"stage": stage} if stage else {})
            self._file.write(json.dumps(place | _finite(values)) + "\n")
            self._file.flush()
            for name, value in values.items():
                if not isinstance(value, list):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._bar.stop()
        if self._is_first:
            self._file.close()
            self._board.close()


def _finite(values):
    """JSON has no NaN: what is not finite is null."""
    if isinstance(values, dict):
        return {k: _finite(v) for k, v in values.items()}
    if isinstance(values, list):
        return [_finite(v) for v in values]
    return values if math.isfinite(values) else None


def _stepping(spent: dict[str, float]) -> float:
    """The seconds by which tokens per second are counted."""
    return spent["seconds_productive"] + spent["seconds_data"]
