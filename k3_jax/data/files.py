"""Which files a source has: what its glob matches, each named from the first wildcard on."""

import os
import sysconfig
from dataclasses import dataclass

from etils import epath

from k3_jax.config import SourceConfig

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
SOURCE_SUFFIXES = frozenset(
    ".bash .bat .bzl .c .cc .cfg .clj .cmake .cpp .cs .css .cu .cuh .cxx .dart .el .ex .f90 .go "
    ".gradle .h .hpp .hs .html .ini .ipynb .java .jl .js .json .jsx .kt .lean .lisp .lua .m .md "
    ".ml .mm .nix .php .pl .proto .ps1 .py .pyi .pyx .r .rb .rs .rst .scala .scm .sh .sql .svelte "
    ".swift .tex .toml .ts .tsx .txt .v .vue .xml .yaml .yml .zig".split()
)


@dataclass(frozen=True)
class File:
    """`name` is relative to the source's root and makes the key of the documents inside."""

    path: epath.Path
    name: str
    n_bytes: int


def files_matching(config: SourceConfig) -> list[File]:
    """The files that the glob matches, by name."""
    root, paths = _matches(config)
    files = [p for p in paths if not p.is_dir()]
    if not files:
        raise FileNotFoundError(f"source {config.name!r}: no file matches {config.glob!r}")
    return _named(root, files)


def files_below(config: SourceConfig) -> list[File]:
    """The source files below the folders that the glob matches, by name."""
    root, paths = _matches(config)
    folders = [p for p in paths if p.is_dir()]
    if not folders:
        raise FileNotFoundError(f"source {config.name!r}: no folder matches {config.glob!r}")
    below = {p for folder in folders for p in _walk(folder, SOURCE_SUFFIXES)}
    return _named(root, below)


def stdlib_files() -> list[File]:
    """The running Python's own standard library."""
    root = epath.Path(sysconfig.get_path("stdlib"))
    return _named(root, _walk(root, frozenset({".py"})))


def _matches(config: SourceConfig) -> tuple[epath.Path, list[epath.Path]]:
    """What the glob matches, and the folder that names are relative to: the one above the first
    wildcard; without a wildcard the folder itself, or the one that holds the file."""
    if not config.glob:
        raise ValueError(f"source {config.name!r}: format {config.format!r} needs a glob")
    path = epath.Path(config.glob)
    wild = [i for i, part in enumerate(path.parts) if set(part) & set("*?[")]
    if not wild:
        return path if path.is_dir() else path.parent, [path] if path.exists() else []
    root = epath.Path(*path.parts[: wild[0]])
    return root, list(_glob(root, path.parts[wild[0] :]))


def _glob(folder: epath.Path, parts):
    """Files and folders that match, name by name; epath's own glob refuses `**`."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        yield from _glob(folder, parts[1:])
        for below in folder.iterdir():
            if below.is_dir() and not os.path.islink(below):
                yield from _glob(below, parts)
    elif folder.is_dir():
        for match in folder.glob(parts[0]):
            yield from _glob(match, parts[1:])


def _named(root: epath.Path, paths) -> list[File]:
    files = [File(p, p.relative_to(root).as_posix(), p.stat().length) for p in paths]
    return sorted(files, key=lambda file: file.name)


def _walk(folder: epath.Path, suffixes: frozenset[str]):
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in SKIPPED_FOLDERS or os.path.islink(path):
            continue
        if path.is_dir():
            yield from _walk(path, suffixes)
        elif path.suffix.lower() in suffixes:
            yield path
