"""Supervised fine-tuning at laptop size: `k3_tiny` learns to answer in K3's chat format.

    python train.py --config configs/k3_sft_tiny.py --workdir runs/sft

begins with random weights; --config.start_from=runs/tiny takes those of a run of `k3_tiny`.

k3_sft_tiny.jsonl has 66 conversations, made for this project by a rule: sums in digits and in two
turns of words, words spelled backwards, letters counted in the think channel, sums by a tool.
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs import k3_tiny


def get_config() -> ConfigDict:
    config = k3_tiny.get_config()
    data = str(Path(__file__).with_suffix(".jsonl"))
    chat = dict(format="chat", glob=data, field="", weight=1.0, lengths=dict())
    config.data.sources = dict(chat=chat)
    config.data.seq_len = 576
    config.data.batch = 2
    config.data.holdout = 0.2
    config.data.interleave = 1
    config.stages = dict()
    config.steps = 60
    config.eval_every = 20
    config.eval_batches = 2
    config.save_every = 60
    return config
