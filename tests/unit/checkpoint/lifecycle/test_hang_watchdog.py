"""When a training counts as stuck, and what does not.

| what happens | stuck |
|---|---|
| nothing, before the first step | no |
| no step for the limit | yes |
| no step for the limit, but steps took a tenth of that before | no, not before ten times as long |
| a save, a restore | no |
| SIGTERM has come, or a save is under way | no: both have limits of their own |
"""

import queue
import re
import threading
import time

import pytest

from tiphys.checkpoint.lifecycle.hang_watchdog import (
    REMEMBERED_STEPS,
    HangReport,
    HangWatchdog,
    KernelAlarm,
    NoHangWatchdog,
    dump_stacks,
    step_limit_seconds,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Training:
    """A watch whose time passes by `idle` alone; ``ended`` is what it was ended for."""

    def __init__(self, least_seconds: float = 60.0, alarm: KernelAlarm | None = None) -> None:
        self.alarm = alarm
        self.clock = Clock()
        self.ended: list[HangReport] = []
        self.excused = False
        self.watch = HangWatchdog(
            least_seconds, self.ended.append, clock=self.clock, is_excused=lambda: self.excused, alarm=alarm
        )

    def step(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        with self.watch.paused():
            self.watch.record_step()

    def idle(self, seconds: float) -> bool:
        """Whether it is ended after so many seconds more, each of which is looked at."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.watch.check(1)
        return bool(self.ended)


@pytest.fixture
def training() -> Training:
    return Training()


def test_a_training_that_completes_no_step_any_more_is_stuck(training):
    training.step()
    assert not training.idle(60)  # of which the first look only sees that there was a step
    assert training.idle(1)
    (stuck,) = training.ended
    assert (stuck.seconds, stuck.longest_seconds) == (60, 0)
    assert stuck.message == "it completed no step in 60 s"


def test_the_time_before_the_first_step_has_no_limit(training):
    assert not training.idle(10_000)


def test_slow_steps_may_take_ten_times_as_long_as_before(training):
    training.step()
    training.step(20)
    assert not training.idle(200)
    assert training.idle(1)
    assert training.ended[0].message == "it completed no step in 200 s, and the longest before took 20.0 s"


def test_a_slow_step_long_ago_is_forgotten(training):
    training.step()
    training.step(3600)
    for _ in range(REMEMBERED_STEPS):
        training.step()
    assert training.idle(61)


def test_steps_that_are_completed_keep_it_alive(training):
    for _ in range(50):
        training.step()
        assert not training.idle(50)


def test_saving_is_no_part_of_a_step(training):
    training.step()
    with training.watch.paused(), training.watch.paused():
        assert not training.idle(10_000)
    training.step()
    assert not training.idle(60)


def test_a_training_asked_to_stop_or_waiting_for_its_save_is_left_alone(training):
    training.step()
    training.excused = True
    assert not training.idle(10_000)
    training.excused = False
    assert not training.idle(60)
    assert training.idle(1)


class Alarms(KernelAlarm):
    """Notes when it would ring; nothing in a test may end the process that tests."""

    def __init__(self):
        self.set_to = 0.0

    def install(self):
        return True

    def arm(self, seconds):
        self.set_to = seconds

    def uninstall(self):
        self.set_to = 0.0


def test_the_kernel_is_to_ring_only_where_a_step_is_under_way_and_no_thread_puts_it_off():
    training = Training(alarm=Alarms())
    training.idle(3)
    before_the_first_step = training.alarm.set_to
    training.step()
    training.step(30)
    training.idle(1)
    in_a_step = training.alarm.set_to
    with training.watch.paused():
        training.idle(1)
        in_a_save = training.alarm.set_to
    assert (before_the_first_step, in_a_step, in_a_save) == (0, 600, 0)
    training.idle(400)
    assert training.ended
    assert training.alarm.set_to == 0


def test_the_limit_is_never_below_what_the_author_says():
    assert step_limit_seconds(60, 0) == step_limit_seconds(60, 6) == 60
    assert step_limit_seconds(60, 7) == 70


def test_a_thread_looks_and_ends_what_is_stuck():
    ended = queue.Queue()
    watch = HangWatchdog(0.02, ended.put, clock=time.monotonic, is_excused=lambda: False, alarm=Alarms())
    watch.open()
    with watch.paused():
        watch.record_step()
    assert "most recent call first" in ended.get(timeout=60).stacks
    watch.close()


def test_stacks_name_the_place_of_each_thread():
    assert re.search(r"most recent call first.*test_hang_watchdog\.py.* in test_stacks_name", dump_stacks(), re.DOTALL)


def test_without_a_limit_nothing_is_watched():
    before = set(threading.enumerate())
    watch = NoHangWatchdog()
    watch.open()
    with watch.paused():
        watch.record_step()
    assert set(threading.enumerate()) <= before
    watch.close()
