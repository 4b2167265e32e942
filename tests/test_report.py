"""The report of a run: what it draws, what it says where it cannot, and that it stands alone."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import train_config

from k3_jax.config import TrainConfig, from_dict, to_dict
from k3_jax.report.figures import POINTS, VARIABLES, running_mean, thinned
from k3_jax.report.page import CSS, flat, write
from k3_jax.report.record import KEPT_LISTS, describe, read
from k3_jax.report.sections import half_life

ROOT = Path(__file__).parent.parent
SECTIONS = {
    "Loss": 1,
    "Optimizer": 1,
    "Experts": 3,
    "Attention Residuals": 1,
    "Memory of the KDA layers": 2,
    "Scale of activations and gradients": 1,
    "Speed": 2,
    "Configuration": 0,
}
VOID = {"meta", "br", "img", "link", "hr"}


class Page(html.parser.HTMLParser):
    """A page taken apart: every tag is closed by its own, and what it links to is kept."""

    def __init__(self, path):
        super().__init__()
        self.open, self.ids, self.links, self.addresses = [], [], [], []
        self.figures, self.missing, self.text, self.heading = {}, {}, "", None
        self.source = Path(path).read_text()
        self.feed(self.source)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                self.links.append(value)
            self.links += re.findall(r"url\((.*?)\)", value or "")
            if "//" in (value or "") and not name.startswith("xmlns") and "data:" not in value:
                self.addresses.append(value)
        if tag == "svg":
            self.figures[self.heading] = self.figures.get(self.heading, 0) + 1
        if ("class", "missing") in attrs:
            self.missing[self.heading] = self.missing.get(self.heading, 0) + 1

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.heading = data
        self.text += data


def full_line(step: int) -> dict:
    """All numbers of a step of two MoE layers with four experts, three layers, two of them KDA."""
    x = step / 10
    return {
        "step": step,
        "stage": "8k" if step < 6 else "64k",
        "loss": 6 - x,
        "z": 30.0,
        "grad_norm": 2 - x,
        "learning_rate": 1e-3 * x,
        "tokens": 255,
        "skipped": step // 4,
        "spikes": step // 8,
        "bad_in_row": 0,
        "tokens_per_second": 1e3 + step,
        "tflops_per_device": 1.0,
        "mfu": 0.4,
        "load_mean": 64.0,
        "load_max": 2 - x,
        "load_min": 0.5,
        "bias_range": 0.1,
        "load_max_layers": [2 - x, 1.5],
        "load_min_layers": [0.5, 0.6],
        "bias_range_layers": [0.1, 0.1],
        "dropped": 0.0,
        "largest_logit": 3.0,
        "heldout_loss": 6.1 - x,
        "heldout_bits_per_byte": 3 - x,
        "seconds_productive": 8.0 * step,
        "seconds_compile": 60.0,
        "seconds_restart": 0.0,
        "goodput": 0.8,
        "health/attn_res": [[1, None, None], [0.4, 0.6, None], [0.2, 0.3, 0.5]],
        "health/attn_res_ffn": [[0.5, 0.5, None], [0.4, 0.6, None], [0.2, 0.3, 0.5]],
        "health/kda_decay": [[0.1, 0.5, 0.9, 0.99, 1.0], [0.2, 0.5, 0.8, 0.9, 0.95]],
        "health/kda_beta": [0.5, 0.6],
        "health/kda_layers": [0, 2],
        "health/activation_rms": [1.0, 1.1, 1.2],
        "health/gradient_rms": [1e-4, 0.0, 1e-6],
        "health/situ_saturation": [0.0, 0.01, 0.02],
        "health/expert_load": [[64, 64, 100, 28], [64, 0, 128, 64]],
    }


def run_of(folder, lines, tail=""):
    """A run's folder with these lines and, after them, some text."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def test_a_full_run_is_drawn_whole_on_a_page_that_stands_alone(tmp_path):
    run = run_of(tmp_path / "a<b>&c", [full_line(i) for i in range(1, 11)])
    config = to_dict(from_dict(TrainConfig, train_config.get_config().to_dict()))
    describe(run, 12345, "8 x TPU7x", config)
    assert read(run).about["config"] == config and read(run).config("optim.b1") == 0.9
    page = Page(write(run))
    drawn = {title: n for title, n in SECTIONS.items() if n}
    assert page.figures == drawn and not page.missing
    assert (
        page.source.count("<figcaption>") == page.source.count("Healthy: ") == sum(drawn.values())
    )
    assert "<title>a&lt;b&gt;&amp;c</title>" in page.source
    for words in (
        "12,345 parameters, 2 layers of width 32",
        "8 x TPU7x",
        "muon_per_head",
        "64k from step 6",
    ):
        assert words in page.text
    for label in ("loss, nats per token", "half-life, tokens", "tokens per second", "step", "64k"):
        assert label in page.text, label
    # Nothing is fetched; what is pointed at is there, once.
    assert page.addresses == [] and "<script" not in page.source
    inner = [x.removeprefix("#") for x in page.links if x.startswith("#")]
    assert inner and set(inner) <= set(page.ids) and len(set(page.ids)) == len(page.ids)
    assert all(x.startswith(("#", "data:image/png;base64,")) for x in page.links)
    # Colours are the page's own.
    for colour, name in VARIABLES.items():
        assert colour not in page.source and CSS.count(f"--{name}:") == 2


def test_what_a_run_lacks_is_said_in_a_line_and_not_drawn_empty(tmp_path):
    page = Page(write(run_of(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}])))
    assert page.figures == {"Loss": 1}
    assert page.missing == {k: max(n, 1) for k, n in SECTIONS.items() if k != "Loss"}
    assert "no health/attn_res" in page.text and "health_every=0" in page.text
    assert "where loss was not finite: 1." in page.text


@pytest.mark.parametrize(
    "tail",
    ['{"step": 11, "lo', "\x00\x00\n", '{"step": "x"}\n[]\n3\n', '{"loss": 1}\n'],
    ids=["half line", "zeros", "other JSON", "no step"],
)
def test_lines_that_are_of_no_step_are_passed_over_and_counted(tmp_path, tail):
    whole = [full_line(i) for i in range(1, 4)]
    record = read(run_of(tmp_path, whole, tail))
    assert record.n_unread == len(tail.splitlines())
    assert record.column("loss").steps.tolist() == [1, 2, 3]


def test_values_that_cannot_be_drawn_leave_the_rest_of_the_page_whole(tmp_path):
    """NaN as Python writes it, nulls for lists, words, lists of unequal lengths, changed shapes."""
    lines = [full_line(i) for i in range(1, 6)]
    lines[1]["health/expert_load"] = None
    lines[2] |= {"loss": float("nan"), "grad_norm": float("inf"), "mfu": "fast"}
    lines[2]["load_max_layers"] = [None, float("nan")]
    lines[3]["health/attn_res"] = [[1.0], [0.5, 0.5]]
    lines[0]["health/activation_rms"] = [1.0]
    lines += [{"step": 6, "health/gradient_rms": [None, None, None], "health/kda_beta": {}}]
    run = run_of(tmp_path, lines, '{"step": 7, "lo')
    page = Page(write(run))
    assert page.figures == {title: n for title, n in SECTIONS.items() if n}
    assert "1 of metrics.jsonl" in page.text
    record = read(run)
    assert np.isnan(record.column("loss").values).tolist() == [False, False, True, False, False]
    assert np.isnan(record.column("load_max_layers").values[2]).all()
    assert record.column("health/activation_rms").steps.tolist() == [2, 3, 4, 5]
    assert record.column("health/attn_res").steps.tolist() == [1, 2, 3, 5]


def test_a_run_whose_numbers_are_all_not_finite_is_still_a_page(tmp_path):
    lines = [full_line(i) for i in range(1, 4)]
    for line in lines:
        for key, value in line.items():
            if key not in ("step", "stage"):
                line[key] = [None] if isinstance(value, list) else None
    page = Page(write(run_of(tmp_path, lines)))
    assert not page.figures and set(page.missing) == set(SECTIONS)


def test_zeros_negatives_and_single_steps_are_drawn(tmp_path):
    """Where an axis or a map's colours count orders of magnitude, or have no width."""

    def changed(value, number):
        if isinstance(value, list):
            return [changed(x, number) for x in value]
        return number if type(value) in (int, float) else value

    for number in (0, 1, -2.5):
        line = {k: v if k == "step" else changed(v, number) for k, v in full_line(1).items()}
        page = Page(write(run_of(tmp_path, [line])))
        assert page.figures["Optimizer"] == 1 and page.figures["Speed"] == 2


def test_lists_are_kept_evenly_and_to_the_last(tmp_path):
    n = 3 * KEPT_LISTS
    lines = [{"step": i, "loss": 1.0, "load_max_layers": [i, -i]} for i in range(n)]
    record = read(run_of(tmp_path, lines))
    steps, values = record.column("load_max_layers")
    assert steps.tolist() == [*range(0, n, 4), n - 1] and len(steps) <= KEPT_LISTS + 1
    assert np.array_equal(values, np.stack([steps, -steps], 1))
    assert len(record.column("loss").steps) == n


def test_a_thinned_curve_keeps_its_extremes_and_its_gaps():
    values = np.sin(np.arange(50_000) / 300) + np.random.default_rng(0).normal(size=50_000)
    values[31_007], values[77], values[40_000] = 99.0, -99.0, np.nan
    steps, kept = thinned(np.arange(50_000), values)
    assert len(kept) <= POINTS and {31_007, 77, 40_000} <= set(steps.tolist())
    assert np.array_equal(kept, values[steps], equal_nan=True) and (np.diff(steps) > 0).all()
    assert thinned(steps, kept)[1] is kept


def test_the_running_mean_is_that_of_the_finite_values_around():
    values = np.random.default_rng(0).normal(size=400)
    values[[0, 50, 51]] = np.nan
    found = running_mean(values)
    for i in range(400):
        around = values[max(i - 5, 0) : i + 6]
        wanted = np.nan if np.isnan(values[i]) else np.nanmean(around)
        np.testing.assert_allclose(found[i], wanted, rtol=1e-9)


def test_a_configuration_is_told_flat_and_in_words():
    told = flat(
        {"a": {"b": {"c": 1}, "d": {}}, "e": [], "f": [3, 7], "g": 1 / 6, "h": "", "i": False}
    )
    assert list(told) == [
        *(("a.b.c", "1"), ("a.d", "none"), ("e", "none"), ("f", "3, 7")),
        *(("g", "0.166667"), ("h", "none"), ("i", "False")),
    ]


def test_half_lives():
    """0.5 forgets half in a token; a decay of 1 keeps for a very long time, but a finite one."""
    found = half_life(np.array([0.5, 0.25, 0.5**0.01, 1.0, 0.0]))
    np.testing.assert_allclose(found[:3], [1, 0.5, 100], rtol=1e-6)
    assert found[3] > 1e6 and np.isfinite(found).all() and found[4] < 0.02


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none", "is no folder"),
        (lambda folder: folder, "there is no"),
        (lambda folder: run_of(folder, []), "it is empty"),
        (lambda folder: run_of(folder, [], '{"step": 1, "l'), "none of its 1 lines"),
    ],
    ids=["no folder", "no file", "empty", "half a line"],
)
def test_a_run_without_a_step_is_refused_in_words(tmp_path, make, words):
    with pytest.raises((OSError, ValueError), match=words):
        write(make(tmp_path))
    assert not list(tmp_path.glob("*.html*"))


def report(*arguments, before=""):
    """The program as the shell starts it, after some Python."""
    code = f"import runpy, sys\n{before}\nrunpy.run_module('k3_jax.report', run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_program_writes_where_it_is_told_and_refuses_in_words(tmp_path):
    run = run_of(tmp_path / "run", [full_line(1)])
    page = tmp_path / "pages" / "one.html"
    done = report(run, f"--output={page}")
    assert done.returncode == 0 and done.stdout == f"wrote {page}\n", done.stderr
    assert page.exists() and [x.name for x in run.iterdir()] == ["metrics.jsonl"]
    (run / "metrics.jsonl").write_text("")
    empty = report(run)
    assert empty.returncode == 1 and "it is empty" in empty.stderr
    assert "Traceback" not in empty.stderr


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    run = run_of(tmp_path, [full_line(1)])
    done = report(run, before="sys.modules['matplotlib'] = None")
    assert done.returncode == 1 and ".[report]" in done.stderr and "Traceback" not in done.stderr
