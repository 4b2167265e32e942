"""Merges adapters into the checkpoint that they were trained on.

    python -m k3_jax.lora merge --base DIR --adapters runs/lora --to DIR

The result is a checkpoint of ours, which serve.py opens and convert's orbax-to-hf exports. Packed
experts are copied as they are; those that have adapters are packed again, which --rule has to say
how. Called again after a kill or an error it goes on where it was.
"""

import argparse
import sys

from k3_jax.checkpoint.store import CheckpointError
from k3_jax.lora.merge import merge


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k3_jax.lora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("merge", help="write W + (alpha / rank) A B")
    command.add_argument("--base", required=True, help="what lora.base was")
    command.add_argument("--adapters", required=True, help="the run, or one of its steps")
    command.add_argument("--to", required=True, help="new directory, or an unfinished one")
    command.add_argument(
        "--rule",
        default="",
        choices=["floor", "ceil"],
        help="exponents of packed experts that have adapters: floor saturates above 6 units, ceil "
        "clips nothing",
    )
    command.add_argument("--workers", type=int, default=2, help="threads (default: 2)")
    args = parser.parse_args(argv)
    try:
        merge(args.base, args.adapters, args.to, args.rule, args.workers)
    except (OSError, ValueError, CheckpointError) as e:
        print(f"lora: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
