"""Every second of a run is of one kind, over all its starts."""

import threading

import pytest

from k3_jax.goodput import KINDS, Clock, Spans


class Time:
    """A clock that tests turn; `compiled` of its seconds were spent compiling."""

    def __init__(self):
        self.now, self.compiled = 100.0, 7.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.compiled)

    def passes(self, seconds, compiling=0.0):
        self.now += seconds
        self.compiled += compiling


class Array:
    """What a step returns, for `jax.block_until_ready`."""

    def __init__(self):
        self.is_there = threading.Event()

    def block_until_ready(self):
        self.is_there.wait()
        return self


def seconds(clock) -> dict:
    """Without those of nothing."""
    told = clock.seconds()
    return {kind: told[f"seconds_{kind}"] for kind in KINDS if told[f"seconds_{kind}"]}


def test_each_second_is_of_one_kind():
    time = Time()
    clock = time.clock()
    time.passes(5, compiling=2)
    clock.go_on([], 0)
    time.passes(10, compiling=4)
    with clock("checkpoint"):
        time.passes(3)
    with pytest.raises(OSError), clock("evaluation"):
        time.passes(2, compiling=1)
        raise OSError
    time.passes(1)
    want = dict(productive=7, compile=7, checkpoint=3, evaluation=1, restart=3)
    assert seconds(clock) == want and sum(want.values()) == time.now - 100
    assert clock.seconds()["goodput"] == 7 / 21
    clock.close()


def test_a_wait_for_data_counts_while_the_device_has_nothing_to_do():
    """The device is at work for 4 of 10 seconds; then for all; then it has not been at work."""
    time, first, second = Time(), Array(), Array()
    clock = time.clock()
    clock.go_on([], 0)
    with clock("data"):
        time.passes(1)
    clock.device_has(first)
    with clock("data"):
        time.passes(4)
        first.is_there.set()
        clock._idle_since.result(timeout=10)
        time.passes(6)
    assert seconds(clock) == dict(productive=4, data=7)
    clock.device_has(second)
    with clock("data"):
        time.passes(10)
    assert seconds(clock) == dict(productive=14, data=7)
    second.is_there.set()
    clock._idle_since.result(timeout=10)
    time.passes(1)
    with clock("data"):
        time.passes(3)
    assert seconds(clock) == dict(productive=15, data=10)
    clock.close()


def told_after(clock, step):
    return {"step": step, "loss": 1.0} | clock.seconds()


def test_a_run_goes_on_counting_where_it_stopped_and_steps_made_again_are_lost():
    """Steps of 10 s are told of every 2; after step 6 it stops; it goes on from step 3."""
    time = Time()
    clock = time.clock()
    time.passes(1)
    clock.go_on([], 0)
    told = []
    for step in (2, 4, 6):
        time.passes(20)
        with clock("checkpoint"):
            time.passes(1)
        told += [told_after(clock, step), {"step": step, "heldout_loss": 2.0}]
    time.passes(8)  # nobody was told of these

    time = Time()
    clock = time.clock()
    time.passes(4)
    clock.go_on(told, 3)
    time.passes(10)
    assert seconds(clock) == dict(productive=30 + 10, checkpoint=3, restart=1 + 30 + 4)

    # The lines of the steps that are made again are dropped; once more, from where it stood.
    told = [x for x in told if x["step"] <= 3] + [told_after(clock, 4)]
    time = Time()
    clock = time.clock()
    clock.go_on(told, 4)
    assert seconds(clock) == dict(productive=40, checkpoint=3, restart=35)
    assert clock.seconds()["goodput"] == 40 / 78


def test_spans_within_another_are_counted_once():
    spans = Spans()
    for start, end in ((0, 1), (3, 4), (5, 6), (2, 8), (9, 10)):
        spans.add(start, end)
    assert spans.seconds() == 1 + 6 + 1
