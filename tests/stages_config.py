"""tests/train_config.py in two stages of six steps, four rows of 64 and then two of 128, with the
least that there is to compile."""

import train_config


def get_config():
    config = train_config.get_config()
    config.data.sources.text.lengths = dict(long=dict(min_bytes=150, times=3.0))
    config.model.update(n_layers=1, mla_layers=(0,), n_dense=1)
    config.optim.update(name="adamw", qk_clip=0.0)
    config.steps = 0
    config.eval_every = 4
    config.save_every = 1
    config.keep = 20
    config.stages = dict(
        s1_short=dict(tokens=6 * 4 * 64, seq_len=64, batch=4),
        s2_long=dict(tokens=6 * 2 * 128 - 1, seq_len=128, batch=2, accumulate=2),
    )
    return config
