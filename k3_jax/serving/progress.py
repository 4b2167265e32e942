"""The work of serve.py as it is watched: a bar with the rate, and the errors of streamed rows."""

import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from k3_jax.serving.jobs import Output
from k3_jax.serving.lines import Line

COLUMNS = (*Progress.get_default_columns(), MofNCompleteColumn())


def write_all(
    lines: Iterable[Line], output: Output, task: str, n_requests: int, *, is_streamed: bool
) -> None:
    """Write each line to `output` as it comes; what a streamed answer shows is not written twice.

    n_requests: of the whole job, those included that `output` had already. The bar goes to stderr,
    and only where it disturbs no answer on the same terminal.
    """
    n_rows, n_tokens, rate, start = 0, 0, 0.0, time.monotonic()
    console = Console(stderr=True)
    is_quiet = not console.is_terminal or (sys.stdout.isatty() and not output.path)
    with output, Progress(*COLUMNS, console=console, disable=is_quiet) as bar:
        shown = bar.add_task(task, total=n_requests, completed=len(output.done))
        for line in lines:
            if output.path or not is_streamed:
                output.write(line.request, line.content)
            elif "error" in line.content:
                console.print(line.content["error"])
            n_rows, n_tokens = n_rows + 1, n_tokens + line.n_tokens
            rate = n_tokens / (time.monotonic() - start)
            bar.update(shown, advance=1, description=f"{rate:.0f} tokens/s")
    console.print(f"\n{n_rows} rows, {n_tokens} tokens, {rate:.1f} tokens/s with compilation")
