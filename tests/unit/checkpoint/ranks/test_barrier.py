"""Several ranks of one training: threads that step together, as collectives would have them.

| what happens | promise |
|---|---|
| sharded save | one commit when all shards are there; each rank restores its own |
| one state for all | the first rank saves, every rank restores |
| a rank dies before its shard | no commit, and nobody waits for ever |
| SIGTERM reaches one rank | all save at one step and ask to be tried again |
| SIGTERM reaches a rank that waits to begin a save | nobody waits for that save, and the last one lands |
| the training is complete before the ranks would stop | its last save is made, also after one that takes long |
| a save is due by the first rank's clock | all save at one step |
| a rank hears of a call too late | the save is given up at once |
| one rank's shard is damaged | all ranks fall back together |
| the launcher restarts the processes | what they stored before is not mixed in |
| another number of ranks | refused by name |
"""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, claim_of, end_of, ref, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session

from tiphys.checkpoint.ranks import barrier, coordination
from tiphys.checkpoint.ranks.barrier import RankBarrier, RankInfo
from tiphys.checkpoint.ranks.coordination import steps_ahead as real_steps_ahead
from tiphys.checkpoint.save import saver
from tiphys.checkpoint.settings import SaveInterval
from tiphys.errors import StoreError, UsageError
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest

RANKS = 3
BARRIER_TIMEOUT_SECONDS = 120


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Ranks listen when the test says so, and call three steps ahead."""
    monkeypatch.setattr(coordination, "POLL_SECONDS", 3600.0)
    monkeypatch.setattr(coordination, "steps_ahead", lambda *_: 3)
    monkeypatch.setattr(
        coordination.SaveRequestListener, "measure_step_time", lambda self, step: setattr(self, "_step_seconds", 1.0)
    )


@pytest.fixture
def store():
    found = MemoryStore()
    write_claim(found, claim_of(1, None))
    return found


def state_of(rank, step):
    return {"step": step, "mine": np.full(5, 100 * rank + step, dtype=np.float32)}


class Meeting:
    """A barrier whose break reaches only ranks that would wait.

    ``threading.Barrier`` also fails those that were let through and have not woken yet.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.arrivals = 0
        self.broken = False
        self.changed = threading.Condition()

    def wait(self):
        """Return once every rank has arrived as often as this one; False where that will not be."""
        with self.changed:
            self.arrivals += 1
            everyone = -(-self.arrivals // self.ranks) * self.ranks
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.arrivals >= everyone or self.broken, BARRIER_TIMEOUT_SECONDS)
            return self.arrivals >= everyone

    def break_up(self):
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class Training:
    """Ranks that step together until ``steps``; ``events[rank]`` says how each ended."""

    def __init__(self, store, *, steps=6, attempt=1, ranks=RANKS, incarnation=0, sharded=True, **options):
        self.store = store
        self.steps = steps
        self.sharded = sharded
        self.meet = Meeting(ranks)
        self.ended = {}
        self.started = {}
        self.states = {}
        self.sessions = {}
        self.at_step = lambda rank, step: None
        self._threads = [
            threading.Thread(target=self._run, args=(RankInfo(rank, ranks, incarnation), attempt, options))
            for rank in range(ranks)
        ]

    def run(self):
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(BARRIER_TIMEOUT_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads)
        return self

    def _run(self, place, attempt, options):
        rank = place.rank
        options = {"asynchronous": True, "when_busy": "wait", **options}
        try:
            with open_session(
                self.store, attempt, rank_info=place, sharded=self.sharded, admit=False, **options
            ) as session:
                self.sessions[rank] = session
                state = session.restore(default=state_of(rank, 0))
                self.started[rank] = state["step"]
                self.states[rank] = state
                for step in range(state["step"] + 1, self.steps + 1):
                    if not self.meet.wait():
                        self.ended[rank] = "stranded"
                        return
                    with suppress(StoreError):
                        session._coordinator._save_requests.poll()  # type: ignore[attr-defined]
                    self.at_step(rank, step)
                    session.step(step, state_of(rank, step))
            self.ended[rank] = "finished"
        except BaseException as error:  # noqa: BLE001  told by the test
            self.meet.break_up()
            self.ended[rank] = getattr(error, "code", repr(error))


def test_shards_of_all_ranks_are_one_checkpoint_and_each_rank_restores_its_own(store):
    first = Training(store).run()
    assert first.ended == dict.fromkeys(range(RANKS), "finished")
    assert list_commits(store, LINEAGE) == [ref(1, step) for step in range(6, 0, -1)]
    manifest = read_manifest(store, ref(1, 6))
    assert [shard.rank for shard in manifest.shards] == [0, 0, 1, 1, 2, 2]

    write_end(store, end_of(1))
    write_claim(store, claim_of(2, ref(1, 6)))
    second = Training(store, attempt=2, steps=8, resume_from=ref(1, 6)).run()
    assert second.started == dict.fromkeys(range(RANKS), 6)
    for rank, state in second.states.items():
        np.testing.assert_array_equal(state["mine"], state_of(rank, 6)["mine"])
    assert list_commits(store, LINEAGE)[0] == ref(2, 8)


def test_a_state_shared_by_all_ranks_is_saved_by_the_first_and_restored_by_every_rank(store):
    Training(store, sharded=False).run()
    assert {shard.rank for shard in read_manifest(store, ref(1, 6)).shards} == {0}
    write_end(store, end_of(1))
    write_claim(store, claim_of(2, ref(1, 6)))
    second = Training(store, attempt=2, sharded=False, ranks=2, resume_from=ref(1, 6)).run()
    assert second.started == {0: 6, 1: 6}
    np.testing.assert_array_equal(second.states[1]["mine"], state_of(0, 6)["mine"])


def test_a_rank_that_dies_before_its_shard_leaves_no_checkpoint(store, monkeypatch):
    def die(rank, step):
        if rank == 1 and step == 4:
            assert training.sessions[rank].flush() == ref(1, 2)
            monkeypatch.setattr(barrier, "BARRIER_TIMEOUT_SECONDS", 0.5)
            raise SystemExit(1)

    training = Training(store, every=SaveInterval(2, "steps"))
    training.at_step = die
    training.run()
    assert training.ended[1] == 1
    assert list_commits(store, LINEAGE) == [ref(1, 2)]
    assert training.sessions[0].failed_saves == 1


@pytest.mark.parametrize("signalled", range(RANKS))
@pytest.mark.parametrize("sharded", [True, False])
def test_a_sigterm_that_reaches_one_rank_ends_all_of_them_at_one_step(store, signalled, sharded):
    def tell(rank, step):
        if rank == signalled and step == 5:
            training.sessions[rank]._stop.request()

    training = Training(store, steps=100_000, sharded=sharded, every=SaveInterval(1e9, "seconds"), grace_seconds=100.0)
    training.at_step = tell
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 75)
    (committed,) = list_commits(store, LINEAGE)
    assert committed.global_step > 5
    assert read_manifest(store, committed).reason == "sigterm"


def test_a_sigterm_that_reaches_all_ranks_at_once_is_one_stop(store):
    def tell(rank, step):
        if step == 5:
            training.sessions[rank]._stop.request()

    training = Training(store, steps=100_000, every=SaveInterval(1e9, "seconds"), grace_seconds=100.0)
    training.at_step = tell
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 75)
    assert len(list_commits(store, LINEAGE)) == 1


def test_a_rank_stopped_before_it_can_begin_a_save_holds_up_no_other(store):
    def tell(rank, step):
        session = training.sessions[rank]
        if rank == 1 and step == 4:
            session._wait_for_saver = lambda: session._stop.request()  # while an earlier save is under way
        elif rank == 1:
            vars(session).pop("_wait_for_saver", None)

    training = Training(store, steps=100_000, every=SaveInterval(4, "steps"), grace_seconds=100.0)
    training.at_step = tell
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 75)
    (committed,) = list_commits(store, LINEAGE)
    assert committed.global_step > 4
    assert read_manifest(store, committed).reason == "sigterm"


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("total_steps", [None, 6])
def test_last_save_of_a_training_that_is_complete_before_its_ranks_stop_lands(sharded, total_steps):
    """They would stop at step 8. The save of step 3 is under way when that of step 6 is due."""
    gate = threading.Event()

    class Slow(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "shards/" in key and "-000000000000003/" in key:
                gate.wait(BARRIER_TIMEOUT_SECONDS / 2)
            super().create(key, data, sha256=sha256)

    def tell(rank, step):
        saver = training.sessions[rank]._saver
        if step == 5:
            training.sessions[rank]._stop.request()
        elif step == 6 and saver.is_busy:
            wait_until_free = saver.wait_until_free
            saver.wait_until_free = lambda seconds: gate.set() or wait_until_free(seconds)

    store = Slow()
    write_claim(store, claim_of(1, None))
    every = SaveInterval(3, "steps")
    training = Training(store, sharded=sharded, every=every, grace_seconds=100.0, total_steps=total_steps)
    training.at_step = tell
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), "finished")
    assert gate.is_set()
    assert list_commits(store, LINEAGE) == [ref(1, 6), ref(1, 3)]


def test_a_save_that_is_due_by_time_is_made_at_one_step_by_all(store):
    def end_after_a_commit(rank, step):
        if rank == 0 and list_commits(store, LINEAGE):
            training.sessions[rank]._stop.request()

    often = SaveInterval(1e-9, "seconds")
    training = Training(store, steps=100_000, every=often, grace_seconds=100.0, clock=time.monotonic)
    training.at_step = end_after_a_commit
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 75)
    newest = list_commits(store, LINEAGE)[-1]
    assert {shard.rank for shard in read_manifest(store, newest).shards} == set(range(RANKS))
    assert read_manifest(store, newest).reason == "due"


def gang_of(store, rank, ranks, incarnation=0):
    return RankBarrier(store, LINEAGE, 1, RankInfo(rank, ranks, incarnation), sharded=True, check_fence=lambda: None)


def test_a_rank_that_hears_too_late_says_so_and_no_rank_waits(store):
    first = gang_of(store, 0, 2)
    late = coordination.SaveRequestListener(gang_of(store, 1, 2))
    with open_session(store, admit=False) as session:
        draft = session._draft(10, None, None, None)
    first.request_save(10, stop=False)
    assert not late.complete_step(12)
    late.poll()
    first.store_rank_shards(draft, [])
    with pytest.raises(StoreError, match="step 10 was abandoned by rank 1: it had passed the step"):
        first.collect_shards(draft)


def test_a_damaged_shard_of_one_rank_takes_all_ranks_back(store):
    Training(store).run()
    key = next(shard.key for shard in read_manifest(store, ref(1, 6)).shards[::-1] if shard.rank == 1)
    store.objects[key] = store.objects[key][:-1] + b"\x01"
    write_end(store, end_of(1))
    write_claim(store, claim_of(2, ref(1, 6)))
    second = Training(store, attempt=2, resume_from=ref(1, 6)).run()
    assert second.started == dict.fromkeys(range(RANKS), 5)
    assert list_quarantined(store, LINEAGE) == {ref(1, 6)}


def test_shards_stored_before_a_restart_are_not_mixed_in(store):
    """The first start stored one share of step 2 and died; the second has other numbers."""
    before = gang_of(store, 0, RANKS)
    with open_session(store, admit=False) as session:
        before.store_rank_shards(session._draft(2, None, None, None), [])
    training = Training(store, incarnation=1, every=SaveInterval(2, "steps")).run()
    assert training.ended == dict.fromkeys(range(RANKS), "finished")
    assert len(read_manifest(store, ref(1, 2)).shards) == 2 * RANKS


def test_ranks_of_an_attempt_that_was_replaced_commit_nothing(store):
    def replace(rank, step):
        if rank == 0 and step == 3:
            write_end(store, end_of(1))
            write_claim(store, claim_of(2, None))

    training = Training(store, steps=6, every=SaveInterval(3, "steps"))
    training.at_step = replace
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 76)
    assert list_commits(store, LINEAGE) == []


def test_a_rank_whose_storage_fails_lets_the_others_go_on(store, monkeypatch):
    monkeypatch.setattr(saver, "PAUSES_SECONDS", ())

    class OneRefuses(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "/r00002-" in key and "-000000000000003/" in key:
                raise StoreError("no space left")
            super().create(key, data, sha256=sha256)

    training = Training(OneRefuses(store.objects), every=SaveInterval(3, "steps")).run()
    assert training.ended == dict.fromkeys(range(RANKS), "finished")
    assert list_commits(training.store, LINEAGE) == [ref(1, 6)]
    assert {training.sessions[rank].failed_saves for rank in range(RANKS)} == {1}


def test_states_of_more_ranks_than_there_are_now_are_refused_by_name(store):
    Training(store).run()
    write_end(store, end_of(1))
    write_claim(store, claim_of(2, ref(1, 6)))
    with pytest.raises(UsageError, match="the states of 3 ranks, but 1 are running"):
        open_session(store, 2, resume_from=ref(1, 6), admit=False).restore()
    assert list_quarantined(store, LINEAGE) == set()


def test_ranks_that_say_nothing_are_named(store, monkeypatch, capsys):
    monkeypatch.setattr(barrier, "BARRIER_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(barrier, "_HINT_SECONDS", 0.0)
    lonely = gang_of(store, 0, 8)
    with pytest.raises(StoreError, match="ranks 1, 2, 3, 4, 5 and 2 more did not restore checkpoint 1-1"):
        lonely.vote_valid(ref(1, 1))
    assert "alone=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'"),
    ],
)
def test_a_launcher_that_tells_nonsense_is_named(environ, said):
    with pytest.raises(UsageError, match=said):
        RankInfo.from_environment(environ)


def test_without_a_launcher_there_is_one_rank():
    assert RankInfo.from_environment({}) == RankInfo(0, 1, 0, 1)


@pytest.mark.parametrize(("step_seconds", "steps"), [(10.0, 1), (1.0, 3), (0.01, 250), (0.0, 2_500_000)])
def test_a_call_names_a_step_that_no_rank_has_reached_when_it_is_heard(step_seconds, steps):
    assert real_steps_ahead(step_seconds, 1.0) == steps


@pytest.mark.parametrize("other_step", [30, 50])
def test_ranks_stop_by_a_single_request(store, other_step):
    first, second = gang_of(store, 0, 2), gang_of(store, 1, 2)
    listener = coordination.SaveRequestListener(second)
    assert first.request_save(35, stop=False).global_step == 35
    assert first.request_save(40, stop=True).global_step == 40
    assert second.request_save(other_step, stop=True).global_step == 40
    assert second.request_save(45, stop=False).global_step == 45
    listener.poll()
    assert listener.stop_request.global_step == 40
    assert [request.global_step for request in first.read_save_requests()] == [35, 40, 45]


def test_ranks_request_no_save_before_the_pace_is_known(store, monkeypatch):
    monkeypatch.undo()
    clock = Clock()
    ours = coordination.SaveRequestListener(gang_of(store, 0, 2), clock)
    ours.measure_step_time(10)
    ours.request_save(10, stop=True)
    assert ours.stop_request is None
    for step in range(11, 21):
        clock.advance(0.125)
        ours.measure_step_time(step)
    ours.request_save(20, stop=True)
    assert ours.stop_request.global_step == 20 + 20  # type: ignore[attr-defined]


def test_the_pace_is_that_of_the_newest_steps(store, monkeypatch):
    monkeypatch.undo()
    clock = Clock()
    ours = coordination.SaveRequestListener(gang_of(store, 0, 2), clock)
    ours.measure_step_time(0)
    clock.advance(60)  # the first step compiles
    ours.measure_step_time(1)
    for step in range(2, 102):
        clock.advance(1 / 64)
        ours.measure_step_time(step)
    ours.request_save(101)
    assert ours.has_pending(101 + 159)
    assert not ours.has_pending(101 + 160)


def test_a_store_that_cannot_take_the_call_is_asked_again(store, capsys):
    training = Training(store, steps=100_000, every=SaveInterval(1e9, "seconds"), grace_seconds=100.0)

    def tell(rank, step):
        if rank == 0 and step == 3:
            store.refuses = lambda operation, key: "save-requests/" in key
            training.sessions[0]._stop.request()
        if rank == 0 and step == 6:
            store.refuses = lambda operation, key: False

    training.at_step = tell
    training.run()
    assert training.ended == dict.fromkeys(range(RANKS), 75)
    assert len(list_commits(store, LINEAGE)) == 1
    assert "the request that all ranks stop could not be stored" in capsys.readouterr().err
