"""From the released format to ours, resumable.

DST/0/state/...        the arrays; DST/0 is step 0 of a Store, whole once its manifest is there
DST/0/source/...       what a byte-exact way back needs: headers, index, hashes, other files
DST/convert.journal/   while it lasts: what is being converted, and a record of each finished job
"""

import gzip
import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.fill import Filler
from k3_jax.checkpoint.hf import PREFIX
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.checkpoint.journal import FOLDER, Journal, check_space, run_all
from k3_jax.checkpoint.plan import DEFAULT, Options, Plan, make_plan
from k3_jax.checkpoint.safetensors import INDEX, Stored, names_in, raw_header, read_index
from k3_jax.checkpoint.zarr import replace_text, write_tree
from k3_jax.config import ModelConfig, to_dict

FORMAT = 2  # of what is stored: a journal of another one is not continued
STEP, STATE, SOURCE = "0", "state", "source"
FILES, HEADERS, HASHES = "files", "headers", "blake3.gz"


class Source(NamedTuple):
    """A released directory that has been read up to its tensors' bytes."""

    directory: epath.Path
    tensors: dict[str, Stored]
    config: ModelConfig

    @property
    def n_bytes(self) -> int:
        return sum(t.stop - t.start for t in self.tensors.values())

    def files(self) -> dict[str, epath.Path]:
        """The safetensors files by name."""
        found = {id(t.file): t.file for t in self.tensors.values()}
        return {file.name: file for file in found.values()}


def open_source(directory, config=None) -> Source:
    """`config`: the path of a config.json, that of the directory by default."""
    directory = epath.Path(directory)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"{directory} {what}; give a directory with safetensors files")
    tensors = read_index(directory)
    path = epath.Path(config) if config else directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; --config names one elsewhere")
    precision = dict(dtype="bfloat16", param_dtype="bfloat16")
    return Source(directory, tensors, from_hf(path, **precision))


def convert(
    src, dst, config=None, options: Options = DEFAULT, workers: int = 2, say: Callable = print
) -> None:
    """Writes the released checkpoint `src` as one of ours to the directory `dst`.

    Raises FormatError, ValueError or OSError that name what is wrong. Called again after any of
    them, or after a kill, it goes on where it was.
    """
    source, dst = open_source(src, config), epath.Path(dst)
    plan = make_plan(source.tensors, source.config, options)
    step = dst / STEP
    if (step / manifest.NAME).exists():
        if not (dst / FOLDER).exists():
            raise FileExistsError(f"{dst} holds a whole checkpoint; give a new directory")
        # Killed when all was done but to sweep up.
        return (dst / FOLDER).rmtree()
    journal = Journal(dst, _identity(source, options))
    done = journal.open()
    todo = [job for job in plan.jobs if job.id not in done]
    say(
        f"{src}: {len(source.tensors):,} tensors, {source.n_bytes:,} bytes -> {dst}: "
        f"{len(plan.arrays):,} arrays in {len(plan.jobs):,} files, {len(todo):,} of them to do"
    )
    if kept := plan.matched.kept:
        say(f"{len(kept):,} tensors, such as {kept[0]}, are not of the text model; they are kept")
    if unnamed := sorted({*names_in(source.directory)} - set(source.files())):
        say(f"ignored, since the index does not name them: {', '.join(unnamed)}")
    check_space(dst, sum(job.n_bytes for job in todo))
    filler = Filler(source.tensors, plan, source.config, step / STATE, options.quantize)
    records = done | run_all(todo, filler.fill, journal, workers, say)
    _finish(source, plan, step, records, options)
    journal.remove()


def _identity(source: Source, options: Options) -> dict:
    """What makes two conversions the same."""
    total = hashlib.sha256()
    names = {id(file): name for name, file in source.files().items()}
    for key, t in sorted(source.tensors.items()):
        total.update(f"{key!a} {t.dtype} {t.shape} {names[id(t.file)]} {t.start}\n".encode())
    config = hashlib.sha256(json.dumps(to_dict(source.config), sort_keys=True).encode())
    return {
        "format": FORMAT,
        "tensors": total.hexdigest(),
        "configuration": config.hexdigest(),
        "options": options._asdict(),
    }


def _finish(source: Source, plan: Plan, step: epath.Path, records: dict, options: Options) -> None:
    """Writes what tells of the arrays, the manifest last."""
    write_tree(step, STATE, list(plan.arrays.values()))
    (step / "data").mkdir(exist_ok=True)
    replace_text(step / "data" / "0.json", "{}")
    own = step / SOURCE
    (own / HEADERS).mkdir(parents=True, exist_ok=True)
    for name, file in source.files().items():
        header, _ = raw_header(file)
        (own / HEADERS / f"{name}.gz").write_bytes(gzip.compress(header, mtime=0))
    index = source.directory / INDEX
    if index.exists():
        (own / f"{INDEX}.gz").write_bytes(gzip.compress(index.read_bytes(), mtime=0))
    hashes = sorted((key, value) for record in records.values() for key, value in record.items())
    if [key for key, _ in hashes] != sorted(source.tensors):
        raise AssertionError("the finished jobs have not read every tensor once")
    lines = "".join(f"{value}  {key}\n" for key, value in hashes)
    (own / HASHES).write_bytes(gzip.compress(lines.encode(), mtime=0))
    copy_others(source.directory, own / FILES)
    model = {"model": to_dict(source.config), "data": {"tokenizer": ""}}
    told = {
        "format": FORMAT,
        "source": str(source.directory),
        "options": options._asdict(),
        "exact": not (options.dequantize or options.quantize),
        "tensors": len(source.tensors),
        "bytes": source.n_bytes,
        "has_prefix": any(key.startswith(PREFIX) for key in source.tensors),
    }
    manifest.write(step, {"config": model, "convert": told})


def copy_others(directory: epath.Path, target: epath.Path) -> None:
    """Copies all that is no tensor: configuration, tokenizer, code, licence. No hidden files."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.iterdir(), key=lambda p: p.name):
        if path.name.startswith(".") or path.name == INDEX or path.name.endswith(".safetensors"):
            continue
        if path.is_dir():
            copy_others(path, target / path.name)
        else:
            path.copy(target / path.name, overwrite=True)
