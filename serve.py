"""Batch inference with a checkpoint of ours or a released one: prompts in, JSON lines out.

    python serve.py --checkpoint=runs/tiny --prompt="def main("
    python serve.py --checkpoint=DIR --prompts=prompts.jsonl --output=answers.jsonl
    python serve.py --checkpoint=DIR --mode=score --prompts=texts.jsonl --output=scores.jsonl

A line of a JSONL file has `prompt`, `text`, `token_ids` or `messages` (see k3_jax/chat.py), and may
have `id` and its own settings, `max_tokens`, `temperature`, `top_p`, `seed`, `stop` and so on.
Run again with the same flags, a job that was interrupted continues where it stopped.

    python serve.py --compile_only --config=configs/k3.py --topology=v5p:4x4x4 --experts=packed

needs no weights and no TPU: does it fit that slice, what does a step move, how long at best.
"""

import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from k3_jax import compile_only
from k3_jax.checkpoint.load import open_checkpoint
from k3_jax.checkpoint.store import CheckpointError
from k3_jax.checks import check_serving
from k3_jax.logs import quiet_libraries
from k3_jax.serving.engine import Engine
from k3_jax.serving.jobs import FORMATS, Output, Reader
from k3_jax.serving.lines import answer_lines, score_lines
from k3_jax.serving.progress import write_all
from k3_jax.serving.sampling import Settings
from k3_jax.tokenizer import load_tokenizer
from sharding import make_mesh, mesh_sizes

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "training run or released directory")
PROMPT = flags.DEFINE_multi_string("prompt", [], "a prompt; a single one streams to the terminal")
PROMPTS = flags.DEFINE_string("prompts", None, "file of prompts, or - for stdin")
FORMAT = flags.DEFINE_enum("format", "auto", FORMATS, "of --prompts; text: a file is one prompt")
OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write or to continue; else stdout")
MODE = flags.DEFINE_enum("mode", "generate", ("generate", "score"), "continue texts or score them")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float32"), "of weights and products")
TOKENIZER = flags.DEFINE_string("tokenizer", None, '"bytes" or a path; else the checkpoint\'s own')
BATCH = flags.DEFINE_integer("batch", 8, "rows at a time on each device", lower_bound=1)
PIECE = flags.DEFINE_integer("piece", 256, "tokens of a prompt that go in at a time", lower_bound=1)
MAX_LENGTH = flags.DEFINE_integer("max_length", 32768, "most tokens of a prompt and its answer")
EXPERTS = flags.DEFINE_enum("experts", "widened", ("widened", "packed"), "packed: stay MXFP4")
ACTIVATIONS = flags.DEFINE_enum("activations", None, ("plain", "mxfp8"), "default: as trained")
MESH = flags.DEFINE_string("mesh", "fsdp=-1", "sizes of mesh axes: data=2,expert=1,tensor=32")
COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "compile for --topology, no more")
TOPOLOGY = flags.DEFINE_string("topology", None, "a TPU slice that need not be here: v5p:4x4x4")
CONFIG = config_flags.DEFINE_config_file("config", None, "a file of configs/, for --compile_only")
LOGPROBS = flags.DEFINE_bool("logprobs", False, "write each answer token's log-probability")
FULL_LOGITS = flags.DEFINE_bool("full_logits", False, "score: whole rows to OUTPUT.logits/*.npz")
SETTINGS = {
    "max_tokens": flags.DEFINE_integer("max_tokens", 128, "longest answer, in tokens"),
    "temperature": flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token"),
    "top_k": flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens; 0: from all"),
    "top_p": flags.DEFINE_float("top_p", 1.0, "draw from the likeliest that together reach p"),
    "min_p": flags.DEFINE_float("min_p", 0.0, "draw from those with p times the best one's chance"),
    "seed": flags.DEFINE_integer("seed", 0, "of the random numbers, with the prompt's index"),
    "stop": flags.DEFINE_multi_string("stop", [], "text that ends an answer; may be repeated"),
    "stop_ids": flags.DEFINE_multi_integer("stop_ids", [], "token id that ends an answer"),
    "ignore_eos": flags.DEFINE_bool("ignore_eos", False, "go on after the checkpoint's end ids"),
}


def main(argv):
    # What a person can get wrong is refused before the work.
    if len({COMPILE_ONLY.value, bool(TOPOLOGY.value), bool(CONFIG.value)}) > 1:
        raise app.UsageError("--compile_only, --topology and --config go together")
    sizes, limits = mesh_sizes(MESH.value), dict(piece=PIECE.value, max_length=MAX_LENGTH.value)
    weights = DTYPE.value, EXPERTS.value == "packed", ACTIVATIONS.value
    if COMPILE_ONLY.value:
        what = CONFIG.value.model, *weights, TOPOLOGY.value, sizes, BATCH.value
        return compile_only.tell(OUTPUT.value, compile_only.serve_reports(*what, **limits))
    if len(argv) > 1 or bool(PROMPT.value) == (PROMPTS.value is not None) or not CHECKPOINT.value:
        raise app.UsageError(f"needs --checkpoint, and --prompt or --prompts; {argv[1:]} is left")
    if FULL_LOGITS.value and (MODE.value != "score" or not OUTPUT.value):
        raise app.UsageError("--full_logits needs --mode=score and --output")
    given = {name: flag.value for name, flag in SETTINGS.items()}
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})

    # Prompts, mesh, and which of the prompts have their line already.
    checkpoint = open_checkpoint(CHECKPOINT.value, *weights)
    tokenizer = load_tokenizer(spec) if (spec := TOKENIZER.value or checkpoint.tokenizer) else None
    reader = Reader(tokenizer, checkpoint.config.vocab_size, checkpoint.eos_ids, settings)
    if PROMPTS.value is None:
        requests = [reader.text(text, i) for i, text in enumerate(PROMPT.value)]
    else:
        requests = reader.file(PROMPTS.value, FORMAT.value)
    made_by = [checkpoint.name, spec, DTYPE.value, MODE.value, MAX_LENGTH.value]
    made_by += [LOGPROBS.value, FULL_LOGITS.value, checkpoint.config.moe.activations]
    jax.set_mesh(mesh := make_mesh(**sizes))
    check_serving(checkpoint.config, mesh)
    output = Output(OUTPUT.value, requests, made_by)
    todo = [r for r in requests if r.index not in output.done]

    # Weights, on all devices.
    engine = Engine(checkpoint.load(), n_rows=BATCH.value * mesh.size, **limits)

    # The work, a line at a time.
    is_streamed = len(PROMPT.value) == 1 and tokenizer is not None and MODE.value == "generate"
    if MODE.value == "score":
        folder = f"{OUTPUT.value}.logits" if FULL_LOGITS.value else None
        lines = score_lines(engine, todo, folder=folder)
    else:
        show = (lambda text: print(text, end="", flush=True)) if is_streamed else None
        lines = answer_lines(engine, todo, tokenizer, with_logprobs=LOGPROBS.value, show=show)
    write_all(lines, output, MODE.value, len(requests), is_streamed=is_streamed)


if __name__ == "__main__":
    quiet_libraries()
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("serve.py: interrupted; with --output, the same command continues")
    except (ValueError, OSError, CheckpointError) as error:
        logging.debug("--verbosity=1 shows where it was", exc_info=True)
        sys.exit(f"serve.py: {error}")
