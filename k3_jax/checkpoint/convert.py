"""Converts checkpoints between the released format and ours, compares them and looks into them.

    python -m k3_jax.checkpoint.convert hf-to-orbax SRC DST
    python -m k3_jax.checkpoint.convert orbax-to-hf SRC DST
    python -m k3_jax.checkpoint.convert verify A B
    python -m k3_jax.checkpoint.convert inspect PATH

Both conversions stream: they need memory for a few pieces of 16 MiB a worker, whatever the model's
size. Called again after a kill or an error they go on where they were. Paths may be local or what
etils.epath opens, such as gs://.
"""

import argparse
import resource
import sys

from k3_jax.checkpoint import table, to_hf, to_orbax, verify
from k3_jax.checkpoint.plan import SHARD_BYTES, Options
from k3_jax.checkpoint.views import open_view


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m k3_jax.checkpoint.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    there = commands.add_parser(
        "hf-to-orbax",
        help="released safetensors -> a checkpoint that serve.py opens",
        description="Every tensor is kept as it is: packed experts packed, float32 float32, and "
        "what the text model has no place for under vision/. orbax-to-hf then gives back the same "
        "files, byte for byte.",
    )
    _add_paths(there, "directory with safetensors files", "new directory, or an unfinished one")
    there.add_argument("--config", help="path of a config.json, by default the one in SRC")
    there.add_argument(
        "--allow-rounded",
        action="store_true",
        help="take bfloat16 where the release has float32, as some fine-tunes are saved",
    )
    there.add_argument(
        "--shard-mb",
        type=_positive,
        default=SHARD_BYTES >> 20,
        help="most MiB of packed experts in one file (default: %(default)s)",
    )
    _add_lossy(there)

    back = commands.add_parser(
        "orbax-to-hf",
        help="a checkpoint of ours, converted or trained -> released safetensors",
        description="A converted checkpoint gives the files that it was made from, byte for byte, "
        "each tensor checked against its recorded BLAKE3. A trained one gives new files, an "
        "index and a config.json that the GPU engines load.",
    )
    _add_paths(back, "run, checkpoints directory or step", "new directory, or an unfinished one")
    back.add_argument(
        "--narrow",
        choices=["bf16"],
        help="round float32 masters to bfloat16 where the release has it; else kept as they are",
    )
    back.add_argument(
        "--shard-mb",
        type=_positive,
        default=to_hf.FILE_BYTES // 1_000_000,
        help="most MB in one new file (default: %(default)s)",
    )
    _add_lossy(back)

    _add_lookers(commands)
    return out


def _add_lookers(commands):
    compare = commands.add_parser(
        "verify",
        help="compare two checkpoints of either format, tensor by tensor",
        description="Compares names, dtypes, shapes and BLAKE3 of bytes; exits with 1 when any "
        "differs.",
    )
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument(
        "--logits",
        metavar="PROMPT_IDS",
        type=_ids,
        help="also run a prompt, such as 1,5,7, through both: agreement of logits and of chosen "
        "experts by layer, with own and with forced routing. The model has to fit",
    )
    compare.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    compare.add_argument("--workers", type=_positive, default=2, help="threads (default: 2)")

    look = commands.add_parser("inspect", help="print what a checkpoint of either format holds")
    look.add_argument("path", metavar="PATH")


def _add_paths(command, src, dst):
    command.add_argument("src", metavar="SRC", help=src)
    command.add_argument("dst", metavar="DST", help=dst)
    command.add_argument("--workers", type=_positive, default=2, help="threads (default: 2)")


def _add_lossy(command):
    command.add_argument(
        "--dequantize", choices=["bf16"], help="widen packed experts; the way back is not exact"
    )
    command.add_argument("--quantize", choices=["mxfp4"], help="pack experts; loses precision")
    command.add_argument(
        "--rule",
        choices=["floor", "ceil"],
        help="exponents of --quantize: floor saturates above 6 units, ceil clips nothing",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _ids(text: str) -> list[int]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids such as 1,5,7")
    return [int(part) for part in parts]


def _options(args, **others) -> Options:
    if bool(args.quantize) != bool(args.rule):
        raise ValueError("--quantize mxfp4 and --rule floor or ceil go together")
    if args.quantize and args.dequantize:
        raise ValueError("--quantize and --dequantize cannot both be asked for")
    return Options(dequantize=bool(args.dequantize), quantize=args.rule or "", **others)


def run(args) -> bool:
    """Does what was asked for; False when a comparison failed."""
    if args.command == "inspect":
        print("\n".join(table.lines(open_view(args.path))))
        return True
    if args.command == "verify":
        is_same = verify.verify(args.a, args.b, args.workers)
        if args.logits:
            is_same &= verify.compare_logits(args.a, args.b, args.logits, args.dtype)
        return is_same
    if args.command == "hf-to-orbax":
        more = dict(allow_rounded=args.allow_rounded, shard_bytes=args.shard_mb << 20)
        options = _options(args, **more)
        to_orbax.convert(args.src, args.dst, args.config, options, args.workers)
    else:
        to_hf.convert(
            args.src,
            args.dst,
            _options(args),
            narrow=bool(args.narrow),
            file_bytes=args.shard_mb * 1_000_000,
            workers=args.workers,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"done: {args.dst}. Peak resident memory {peak / 1024:,.0f} MiB")
    return True


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return 0 if run(args) else 1
    except (OSError, ValueError, RuntimeError) as e:
        print(f"convert: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert: stopped; call again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
