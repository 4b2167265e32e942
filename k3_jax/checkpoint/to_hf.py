"""From our format to the released one: byte for byte what came in, or a trained model's first.

A file is written front to back under another name and renamed when it is whole, so that a call
after a kill goes on with the files that are missing. The index comes last.
"""

import gzip
import hashlib
import json
import math
from collections.abc import Callable
from typing import NamedTuple

from blake3 import blake3
from etils import epath

from k3_jax.checkpoint.hf_config import to_hf
from k3_jax.checkpoint.journal import Journal, check_space, run_all
from k3_jax.checkpoint.manifest import is_local
from k3_jax.checkpoint.plan import DEFAULT, Options
from k3_jax.checkpoint.safetensors import (
    INDEX,
    Buffer,
    FormatError,
    blocks,
    make_header,
    parse_header,
)
from k3_jax.checkpoint.to_orbax import SOURCE, copy_others
from k3_jax.checkpoint.views import StoredView, find_step
from k3_jax.checkpoint.zarr import replace_text, reserve

FILE_BYTES = 5_000_000_000
# What a tokenizer's directory may hold that engines read.
TOKENIZER = ("tiktoken.model", "tokenizer*", "tokenization*.py", "special_tokens_map.json")


class File(NamedTuple):
    """One file to write. `id` is its name."""

    id: str
    header: bytes
    keys: list[str]
    n_bytes: int


def convert(
    src,
    dst,
    options: Options = DEFAULT,
    *,
    narrow: bool = False,
    file_bytes: int = FILE_BYTES,
    workers: int = 2,
    say: Callable = print,
) -> None:
    """Writes the checkpoint `src` of ours, converted or trained, as a released one to `dst`.

    narrow: float32 tensors that the release has in bfloat16 are rounded to it. file_bytes: the
    most that a file gets, where the source's own files are not written again.
    Raises FormatError, ValueError or OSError that name what is wrong; call again to go on.
    """
    step = find_step(epath.Path(src))
    if step is None:
        raise FileNotFoundError(f"{src} holds no checkpoint of ours (numbered steps)")
    view = StoredView(step, options, narrow)
    _check_options(view, options)
    files = _old_files(view) if view.is_exact else _new_files(view, file_bytes)
    dst = epath.Path(dst)
    meta = hashlib.sha256(json.dumps(view.meta, sort_keys=True).encode()).hexdigest()
    layout = hashlib.sha256(b"".join(f.id.encode() + f.header for f in files)).hexdigest()
    asked = {**options._asdict(), "narrow": narrow}
    journal = Journal(dst, {"checkpoint": meta, "tensors": layout, "options": asked})
    done = journal.open()
    todo = [f for f in files if f.id not in done]
    n_bytes = sum(f.n_bytes for f in files)
    say(
        f"{step}: {len(view.tensors):,} tensors, {n_bytes:,} bytes -> {dst}: {len(files):,} files, "
        f"{len(todo):,} of them to do"
        + ("; experts are packed as they were trained" if view.trained_rule else "")
        + ("" if view.is_exact else "; these are not the files that it was made from")
    )
    check_space(dst, sum(f.n_bytes for f in todo))
    run_all(todo, lambda file: _write(view, dst, file), journal, workers, say)
    _finish(view, dst, files, say)
    journal.remove()


def _check_options(view: StoredView, options: Options):
    packed = any(name.endswith("/packed") for name in view.stored_names)
    if options.quantize and view.trained_rule and options.quantize != view.trained_rule:
        raise ValueError(
            f"--rule {options.quantize}: the experts of this checkpoint were trained to be packed "
            f"by {view.trained_rule}"
        )
    if options.dequantize and not (packed or view.trained_rule):
        raise ValueError("--dequantize: the experts of this checkpoint are not packed")
    if options.quantize and packed:
        raise ValueError("--quantize: the experts of this checkpoint are packed already")


def _old_files(view: StoredView) -> list[File]:
    files = []
    for name, header in view.headers.items():
        tensors = parse_header(epath.Path(name), header)
        keys = sorted(tensors, key=lambda key: (tensors[key].start, tensors[key].stop))
        files.append(File(name, header, keys, max(t.stop for t in tensors.values())))
    return files


def _new_files(view: StoredView, limit: int) -> list[File]:
    groups, size = [[]], 0
    for key, info in view.tensors.items():
        n = math.prod(info.shape) * info.dtype.itemsize
        if groups[-1] and size + n > limit:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += n
    files = []
    for i, keys in enumerate(groups, 1):
        header = make_header({key: view.tensors[key] for key in keys})
        n = sum(math.prod(t.shape) * t.dtype.itemsize for t in map(view.tensors.get, keys))
        name = f"model-{i:05}-of-{len(groups):06}.safetensors"
        files.append(File(name, header, keys, len(header) + n))
    return files


def _write(view: StoredView, dst: epath.Path, file: File) -> dict:
    """Writes one file, each tensor against the hash that it had when it came in."""
    draft = dst / f"{file.id}.draft" if is_local(dst) else dst / file.id
    buffer = Buffer()
    with draft.open("wb") as out:
        if is_local(dst):
            reserve(out, file.n_bytes)
        out.write(file.header)
        for key in file.keys:
            total = blake3()
            for piece in view.pieces(key, buffer):
                for block in blocks(piece):
                    total.update(block)
                    out.write(block)
            if view.recorded.get(key, total.hexdigest()) != total.hexdigest():
                raise FormatError(f"{view.step}: {key} is not what was converted: bytes changed")
    if is_local(dst):
        draft.replace(dst / file.id)
    return {}


def _finish(view: StoredView, dst: epath.Path, files: list[File], say: Callable) -> None:
    if view.files:
        copy_others(view.files, dst)
    if view.is_exact:
        index = view.step / SOURCE / f"{INDEX}.gz"
        if index.exists():
            replace_text(dst / INDEX, gzip.decompress(index.read_bytes()).decode())
        return
    packed = any(dtype == "uint8" for dtype, _ in view.tensors.values())
    old = dst / "config.json"
    config = to_hf(view.config, packed, json.loads(old.read_text()) if old.exists() else None)
    replace_text(old, json.dumps(config, indent=1))
    if not view.files:
        _copy_tokenizer(view, dst, say)
    where = {key: file.id for file in files for key in file.keys}
    total = sum(math.prod(t.shape) * t.dtype.itemsize for t in view.tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": where}
    replace_text(dst / INDEX, json.dumps(content, indent=1))


def _copy_tokenizer(view: StoredView, dst: epath.Path, say: Callable) -> None:
    """The files of the tokenizer that a trained checkpoint names, where it has any."""
    named = view.meta["config"].get("data", {}).get("tokenizer", "")
    path = epath.Path(named) if named and named != "bytes" else None
    if path is None or not path.exists():
        say(f"no tokenizer files: the checkpoint's tokenizer is {named!r}")
        return
    folder = path if path.is_dir() else path.parent
    for pattern in TOKENIZER:
        for file in folder.glob(pattern):
            file.copy(dst / file.name, overwrite=True)
