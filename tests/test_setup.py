"""Finding a Python and making .venv, with fake Pythons on fake PATHs: nothing here installs."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FINDER = ROOT / ".ci" / "find_python.sh"
TOOLS = ("sh", "cat", "cp", "make", "mkdir", "rm", "sed", "touch", "tr")

SHIM = 'echo "pyenv: $0: command not found" >&2\nexit 127'
# Answers as the real one would, builds environments by copying itself, and logs what it is told.
FAKE_PYTHON = """
case "$*" in
*"-m venv --clear"*)
    echo "venv with $0" >> "$LOG"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip install"*)
    echo "install" >> "$LOG"
    exit ${PIP_EXIT:-0} ;;
*"-m pip --version"*) test -e .venv/has_pip ;;
*"-m ensurepip"*)
    echo "ensurepip" >> "$LOG"
    touch .venv/has_pip ;;
*) echo "VERSION $0" ;;
esac
"""
# Runs the finder's own question in this Python, after a change to what it will see.
CHANGED_PYTHON = """
exec "{python}" -c '
import sys, sysconfig
code, sys.argv = sys.argv[4], sys.argv[4:]
{change}
exec(code)' "$@"
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake(path, version="3.12"):
    return program(path, FAKE_PYTHON.replace("VERSION", version))


def changed(path, change):
    return program(path, CHANGED_PYTHON.format(python=sys.executable, change=change))


@pytest.fixture
def home(tmp_path):
    """An empty machine: home/bin and the bare tools are its PATH, and no Python is on it."""
    for tool in TOOLS:
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "bin").mkdir()
    return tmp_path


def call(home, *command, cwd=None, **env):
    path = f"{home / 'bin'}:{home / 'late'}:{home / 'tools'}"
    return subprocess.run(
        [home / "tools" / command[0], *command[1:]],
        env={"PATH": path, "HOME": str(home), "LOG": str(home / "log"), **env},
        cwd=cwd or home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def find(home, *arguments, **env):
    return call(home, "sh", str(FINDER), *arguments, **env)


def found(home, *arguments, **env):
    answer = find(home, *arguments, **env)
    assert answer.returncode == 0, answer.stderr
    return Path(answer.stdout.removesuffix("\n"))


def test_a_shim_that_fails_is_passed_over_for_a_real_one_later_on_the_path(home):
    program(home / "bin" / "python3.12", SHIM)
    real = fake(home / "late" / "python3.12")
    assert found(home) == real


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.12.1/bin/python",
        ".asdf/installs/python/3.12.1/bin/python",
        ".local/share/mise/installs/python/3.12.1/bin/python",
        ".local/share/uv/python/cpython-3.12.1-linux/bin/python",
        "miniconda3/envs/work/bin/python",
        "miniforge3/bin/python",
    ],
)
def test_a_python_under_a_version_manager_is_found_though_its_shim_fails(home, place):
    for name in ("python3.12", "python3", "python"):
        program(home / "bin" / name, SHIM)
    real = fake(home / place)
    assert found(home) == real


def test_a_version_manager_that_was_moved_is_found_by_its_variable(home):
    real = fake(home / "else where" / "versions" / "3.13.0" / "bin" / "python", "3.13")
    assert found(home, PYENV_ROOT=str(home / "else where")) == real


def test_the_oldest_allowed_version_wins_wherever_it_is(home):
    """3.12 is what the project is tested with; 3.14 first on PATH must not displace it."""
    fake(home / "bin" / "python3", "3.14")
    fake(home / "late" / "python3.13", "3.13")
    tested = fake(home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python")
    assert found(home) == tested


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sys.version_info = (3, 11, 9)", "is 3.11, not one of"),
        ("sys.version_info = (3, 15, 0)", "is 3.15, not one of"),
        ("sys.modules['ensurepip'] = None", "lacks the module ensurepip"),
        ("sys.modules['venv'] = None", "lacks the module venv"),
        ("sys.modules['ssl'] = None", "lacks the module ssl"),
        ("sys.implementation.name = 'pypy'", "is not a 64-bit CPython"),
        ("sysconfig.get_config_var = {'Py_GIL_DISABLED': 1}.get", "is free-threaded"),
        ("sys.exit(3)", "does not run"),
    ],
)
def test_an_unfit_python_is_refused_with_the_reason(home, change, reason):
    unfit = changed(home / "bin" / "python3", change.replace("'", '"'))
    answer = find(home)
    assert answer.returncode == 1 and answer.stdout == ""
    assert f"{unfit} {reason}" in answer.stderr


def test_a_fit_python_passes_the_same_questions(home):
    """The other half of the test above: with nothing changed, this very Python is taken."""
    changed(home / "bin" / "python3", "")
    assert found(home) == Path(sys._base_executable)


def test_an_environment_leads_to_the_python_that_it_was_made_from(home):
    """Otherwise .venv, when active, would be cleared by the Python that runs in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "env"], check=True)
    answer = found(home, str(home / "env" / "bin" / "python"))
    assert home not in answer.parents


def test_no_python_at_all_says_how_to_get_one(home):
    answer = find(home)
    assert answer.returncode == 1 and answer.stdout == ""
    for way in ("uv python install", "pyenv install", "apt install", "python.org", "make PYTHON="):
        assert way in answer.stderr


def test_a_named_python_is_the_only_one_judged(home):
    fake(home / "bin" / "python3.12")
    named = fake(home / "my own" / "python", "3.13")
    assert found(home, str(named)) == named
    shim = program(home / "bin" / "python3.13", SHIM)
    refused = find(home, "python3.13")
    assert refused.returncode == 1 and f"{shim} does not run" in refused.stderr
    missing = find(home, "python9")
    assert missing.returncode == 1 and "PYTHON=python9" in missing.stderr


def test_uv_is_asked_for_what_it_has_and_to_install_only_when_nothing_else_is_there(home):
    managed = home / "managed" / "python"
    program(
        home / "bin" / "uv",
        f"""echo "uv $*" >> "$LOG"
        case "$*" in
        "python install 3.12") mkdir -p {managed.parent}; cp {home}/seed {managed} ;;
        "python find --system 3.12") [ -f {managed} ] && echo {managed} ;;
        *) exit 2 ;;
        esac""",
    )
    fake(home / "seed")
    assert found(home) == managed
    log = home / "log"
    assert "uv python install 3.12" in log.read_text()
    log.unlink()
    assert found(home) == managed
    assert "install" not in log.read_text()


def test_a_uv_that_cannot_install_leads_to_the_advice(home):
    program(home / "bin" / "uv", "echo 'no network' >&2; exit 2")
    answer = find(home)
    assert answer.returncode == 1
    assert "no network" in answer.stderr and "make PYTHON=" in answer.stderr


@pytest.fixture
def tree(home):
    """A copy of what set-up reads, in a folder with a space in its name, and a Python that fits."""
    tree = home / "a tree"
    (tree / ".ci").mkdir(parents=True)
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt", FINDER):
        shutil.copy(ROOT / name, tree / (ROOT / name).relative_to(ROOT))
    fake(home / "bin" / "python3.12")
    return tree


def setup(home, tree, *arguments, **env):
    """Runs `make setup`; returns its exit status and what the fake Pythons were told meanwhile."""
    log = home / "log"
    log.write_text("")
    answer = call(home, "make", "setup", *arguments, cwd=tree, **env)
    steps = [line.replace(str(home), "~") for line in log.read_text().splitlines()]
    return answer.returncode, steps


NEW = (0, ["venv with ~/bin/python3.12", "ensurepip", "install"])


def test_set_up_makes_and_installs_once(home, tree):
    assert setup(home, tree) == NEW
    assert setup(home, tree) == (0, [])


@pytest.mark.parametrize("name", ["setup.py", "constraints.txt"])
def test_a_changed_requirement_is_installed_into_the_same_environment(home, tree, name):
    setup(home, tree)
    stamp = (tree / ".venv" / ".complete").stat().st_mtime
    os.utime(tree / name, (stamp + 5, stamp + 5))
    assert setup(home, tree) == (0, ["install"])


def test_an_interrupted_installation_fails_and_is_begun_anew(home, tree):
    status, steps = setup(home, tree, PIP_EXIT="1")
    assert status != 0 and steps == NEW[1]
    assert setup(home, tree) == NEW


def test_an_environment_whose_python_is_gone_is_made_anew(home, tree):
    setup(home, tree)
    program(tree / ".venv" / "bin" / "python", SHIM)
    assert setup(home, tree) == NEW


def test_a_half_made_environment_is_made_anew(home, tree):
    (tree / ".venv" / "bin").mkdir(parents=True)
    assert setup(home, tree) == NEW


def test_a_copied_tree_does_not_trust_the_environment_that_came_along(home, tree):
    """Its editable installation still leads to the folder that it was copied from."""
    setup(home, tree)
    copy = shutil.copytree(tree, home / "a copy")
    assert setup(home, copy) == NEW


def test_a_python_named_to_make_replaces_the_one_in_use(home, tree):
    setup(home, tree)
    other = fake(home / "other" / "python", "3.13")
    steps = ["venv with ~/other/python", "ensurepip", "install"]
    assert setup(home, tree, f"PYTHON={other}") == (0, steps)
    assert setup(home, tree, f"PYTHON={other}") == (0, [])
    assert setup(home, tree) == (0, [])


def test_an_environment_that_the_user_made_is_kept_and_completed(home, tree):
    """uv leaves out pip, for one; a TPU's own packages must not be thrown away."""
    fake(tree / ".venv" / "bin" / "python")
    assert setup(home, tree) == (0, ["ensurepip", "install"])


def test_without_any_python_make_fails_with_the_advice_and_makes_nothing(home, tree):
    (home / "bin" / "python3.12").unlink()
    answer = call(home, "make", "setup", cwd=tree)
    assert answer.returncode != 0 and "uv python install" in answer.stderr
    assert not (tree / ".venv").exists()


def test_make_alone_lists_the_targets(home, tree):
    answer = call(home, "make", cwd=tree)
    names = {line.split()[1] for line in answer.stdout.splitlines()}
    assert names == {"help", "setup", "demo", "test", "test-slow", "bench", "clean"}
    assert not (tree / ".venv").exists()


def test_every_requirement_is_pinned_within_its_range():
    """A range that no longer holds its pin would make the two README commands fail."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert all(exact.startswith("==") for exact in pinned.values()), pinned
    calls = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    given = {k.arg: k.value for node in calls for k in getattr(node, "keywords", ())}
    extras = ast.literal_eval(given["extras_require"])
    asked = [*ast.literal_eval(given["install_requires"]), *extras["serve"], *extras["test"]]
    for requirement in map(Requirement, asked):
        exact = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(exact.removeprefix("==")), (requirement, exact)
