"""Draw a run as one page: python -m k3_jax.report RUN_DIR [--output=PAGE.html]"""

import importlib.util
import sys

from absl import app, flags


def main(argv):
    if len(argv) != 2:
        raise app.UsageError("give one folder, the --workdir of a run of train.py")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit(
            "k3_jax.report draws with matplotlib, which is not installed: "
            'pip install -e ".[report]" -c constraints.txt'
        )
    from k3_jax.report.page import write

    try:
        print(f"wrote {write(argv[1], OUTPUT.value)}")
    except (ValueError, OSError) as e:
        sys.exit(f"k3_jax.report: {e}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "the page; RUN_DIR/report.html by default")
    app.run(main)
