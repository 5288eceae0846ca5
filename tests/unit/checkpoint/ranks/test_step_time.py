"""The pace of a rank: its own time for a step, told in windows of minutes, without the time in which it waits.

| between two steps it               | counts as its own |
|------------------------------------|-------------------|
| works                              | yes               |
| waits for others, and says so      | no                |
| saves, restores, flushes           | no                |
| never says where it waits          | nothing is told   |
"""

import pytest
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session, state_at

from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.ranks.step_time import (
    KEPT_WINDOWS,
    NoStepTimer,
    StepTimePublisher,
    StepTimer,
    member_index,
    open_step_timer,
)
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import SaveInterval
from tiphys.errors import StoreError
from tiphys.store import LineageLayout
from tiphys.store.layout import STEP_TIME_WINDOW_SECONDS, RankStepTime, parse_step_time


class Training:
    """Steps of a rank, in time that the test makes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.published: list[tuple[int, float]] = []
        self.pace = StepTimer(
            lambda *published: self.published.append(published),
            clock=lambda: self.now,
            wall_clock=lambda: self.now + STEP_TIME_WINDOW_SECONDS * 9,
        )

    def step(self, works: float = 1.0, waits: float | None = 2.0, saves: float = 0.0) -> None:
        self.now += works
        if waits is not None:
            with self.pace.waiting():
                self.now += waits
        with self.pace.excluded():
            self.pace.record_step()
            self.now += saves

    def go_on(self, seconds: float, **how: float | None) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step(**how)


def test_only_its_own_work_counts():
    training = Training()
    training.go_on(3 * STEP_TIME_WINDOW_SECONDS, works=1.5, waits=2.0, saves=4.0)
    assert [own for _, own in training.published] == [pytest.approx(1.5)] * len(training.published)
    windows = [window for window, _ in training.published]
    assert windows == list(range(windows[0], windows[0] + len(windows)))
    assert len(windows) >= 2


def test_the_median_does_not_go_by_a_single_slow_step():
    training = Training()
    training.step()
    training.step(works=60.0)
    training.go_on(STEP_TIME_WINDOW_SECONDS, works=1.0)
    assert training.published[0][1] == pytest.approx(1.0)


def test_a_rank_that_never_marks_its_waits_publishes_no_step_time():
    training = Training()
    training.go_on(3 * STEP_TIME_WINDOW_SECONDS, waits=None)
    assert training.published == []


def test_few_steps_of_a_window_say_nothing():
    training = Training()
    training.go_on(3 * STEP_TIME_WINDOW_SECONDS, works=STEP_TIME_WINDOW_SECONDS / 3, waits=1.0)
    assert training.published == []


def test_a_wait_within_a_save_counts_once():
    training = Training()
    training.step()
    with training.pace.excluded(), training.pace.waiting():
        training.now += 50.0
    training.go_on(STEP_TIME_WINDOW_SECONDS, works=1.0)
    assert training.published[0][1] == pytest.approx(1.0)


def test_step_times_can_be_listed_and_only_the_last_windows_stay():
    store = MemoryStore()
    teller = StepTimePublisher(store, "r/fit", 2, member=1, rank=11)
    for window in range(KEPT_WINDOWS + 3):
        teller(window, 1.25)
        teller.wait(120)
    found = [parse_step_time(info.key) for info in store.list(LineageLayout("r/fit").step_times(2))]
    assert found == [RankStepTime(window, 1, 11, 1.25) for window in range(3, KEPT_WINDOWS + 3)]


def test_storage_that_fails_does_not_reach_the_training():
    refused = []

    class Refusing(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if not refused:
                refused.append(key)
                raise StoreError("no")
            super().create(key, data)

    store = Refusing()
    teller = StepTimePublisher(store, "r/fit", 1, 0, 0)
    for window in (1, 2):
        teller(window, 1.0)
        teller.wait(120)
    assert [parse_step_time(key).window for key in [*refused, *store.objects]] == [1, 2]


@pytest.mark.parametrize(
    ("environ", "member"),
    [({"PET_NODE_RANK": "3"}, 3), ({"JOB_COMPLETION_INDEX": "2"}, 2), ({}, 1), ({"PET_NODE_RANK": ""}, 1)],
)
def test_the_pod_of_a_rank_is_known_from_its_job(environ, member):
    assert member_index(RankInfo(rank=11, world_size=16, local_world_size=8), environ) == member


def test_a_single_process_keeps_no_pace():
    alone = open_step_timer(MemoryStore(), "r/fit", 1, RankInfo(), {}, lambda: 0.0)
    assert type(alone) is NoStepTimer
    with alone.waiting(), alone.excluded():
        alone.record_step()


def test_keys_of_others_tell_no_pace():
    assert parse_step_time("data/lineages/r/fit/step-times/000000001/notes.txt") is None


def test_a_session_that_keeps_nothing_waits_as_well():
    with pytest.raises(KeyError), Session().waiting():
        raise KeyError("of the program")


def test_a_session_leaves_out_its_saves_and_what_is_said_to_be_waiting(monkeypatch):
    store, clock, published = MemoryStore(), Clock(), []
    pace = StepTimer(lambda *one: published.append(one), clock=clock, wall_clock=clock)
    monkeypatch.setattr("tiphys.checkpoint.tracked_session.open_step_timer", lambda *_: pace)

    def slow_copy():
        clock.advance(40.0)
        return state_at(1)

    with open_session(store, clock=clock, every=SaveInterval(2, "steps")) as session:
        for step in range(1, 30):
            clock.advance(1.0)
            with session.waiting():
                clock.advance(30.0)
            session.step(step, slow_copy)
    assert published
    assert [own for _, own in published] == [pytest.approx(1.0)] * len(published)
