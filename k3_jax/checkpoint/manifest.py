"""Which directories are whole checkpoints, told by a manifest that is written last.

Why a manifest beside Orbax's commit marker. Seen with Orbax 0.12.8: a missing marker and some
shortened array files go unnoticed, shortened metadata reads as "no metadata", the rest raises only
once arrays are read. Sizes, and checksums of small files, cost one listing, tell "whole" without
reading an array, and name the file. They do not see changed bytes in a large array file of the same
length: a damaged compression frame is noticed by the reader, and that step is skipped as well; a
flipped bit in the numbers is not, and is left to the checksums of disks and object stores.
"""

import json
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

NAME = "manifest.json"
VERSION = 1
SMALL_BYTES = 1 << 20  # files up to here are checked by content: markers, metadata, loader states
THREADS, LOCAL_THREADS = 32, 4  # an object store answers one question per round trip
UNFINISHED = ".orbax-checkpoint-tmp"
COMMITTED = "commit_success.txt"
STEP = re.compile(rf"(0|[1-9]\d*)(?:{re.escape(UNFINISHED)})?")


def numbered(directory: epath.Path) -> list[tuple[int, epath.Path]]:
    """All (step, path) below directory, whole or not, smallest step first."""
    if not directory.exists():
        return []
    names = sorted(path.name for path in directory.iterdir())
    matches = [match for name in names if (match := STEP.fullmatch(name))]
    return sorted((int(match[1]), directory / match[0]) for match in matches)


def write(path: epath.Path, meta: dict[str, Any]) -> None:
    """Makes the step in `path` whole. Nothing in it may change afterwards."""
    draft = path / f"{NAME}.draft"
    draft.unlink(missing_ok=True)  # of a process that was killed right here
    content = {"version": VERSION, "meta": meta, "files": _fingerprints(path)}
    draft.write_text(json.dumps(content, indent=1))
    draft.rename(path / NAME)


def read(path: epath.Path) -> dict[str, Any]:
    """{"meta": ..., "files": {name: [bytes, CRC-32 or None]}}"""
    content = json.loads((path / NAME).read_text())
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, this code reads {VERSION}")
    return content


def check_is_model(path: epath.Path, meta: dict[str, Any]) -> None:
    """Raises ValueError where the step in `path` holds adapters, by their place in its meta."""
    if "lora" in meta:
        raise ValueError(
            f"{path} holds adapters for {meta['lora']['base']}, not a model: merge them first "
            "(python -m k3_jax.lora merge)"
        )


def fault(path: epath.Path) -> str | None:
    """Why the step in `path` is not whole; None when it is."""
    if path.name.endswith(UNFINISHED):
        return "its save was cut off, or is under way"
    try:
        content = read(path)
    except FileNotFoundError:
        return f"{NAME} is missing: its save was cut off, or is under way"
    except (ValueError, KeyError) as error:
        return f"{NAME} is damaged: {error}"
    found = _fingerprints(path)
    for name, (size, crc) in content["files"].items():
        if name not in found:
            return f"file {name} is missing"
        if found[name][0] != size:
            return f"file {name} has {found[name][0]:,} bytes, {size:,} were written"
        if found[name][1] != crc:
            return f"file {name} has other content than was written"
    return None


def _fingerprints(root: epath.Path) -> dict[str, list[int | None]]:
    """{name: [bytes, CRC-32 of a small file]} of all files below root."""
    files, folders = {}, [("", root)]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            name = prefix + entry.name
            if entry.is_dir():
                folders.append((f"{name}/", entry))
            else:
                files[name] = entry
    names = sorted(files)

    def fingerprint(name: str) -> list[int | None]:
        size = files[name].stat().length
        return [size, zlib.crc32(files[name].read_bytes()) if size <= SMALL_BYTES else None]

    with ThreadPoolExecutor(LOCAL_THREADS if is_local(root) else THREADS) as pool:
        return dict(zip(names, pool.map(fingerprint, names), strict=True))


def is_unfinished(path: epath.Path) -> bool:
    """Whether the save in `path` died before Orbax had all arrays."""
    return not any((path / name).exists() for name in (NAME, COMMITTED))


def remove(path: epath.Path) -> None:
    """Removes a step, its manifest first: cut short, this leaves one that is plainly not whole."""
    (path / NAME).unlink(missing_ok=True)
    path.rmtree()


def is_local(path: str | os.PathLike) -> bool:
    """Whether it is on this machine's file systems, not in an object store (gs://...)."""
    return "://" not in os.fspath(path)
