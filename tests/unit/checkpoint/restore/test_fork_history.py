"""A training of a fork: it goes on from checkpoints of another run, and back through them if one is damaged."""

from itertools import islice

import pytest
from support.builders.lineage import claim_of, commit, ref, write_claim

from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.errors import UsageError
from tiphys.lineage.fork_history import find_fork_origin, iter_fork_history
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.protocol import environment
from tiphys.store import DirectoryStore, LineageLayout

PARENT, FORK = "digits-1/fit", "hot/fit"


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def settings(store, attempt, resume_from) -> CheckpointSettings:
    found = CheckpointSettings.from_environment(
        {
            environment.STORE: store.url,
            environment.RUN: "hot",
            environment.STEP: "fit",
            environment.ATTEMPT: str(attempt),
            environment.LINEAGE: FORK,
            environment.RESUME_FROM: resume_from,
        }
    )
    assert found is not None
    return found


def candidates(store, attempt, resume_from) -> list[str]:
    return [
        found.relative_to(FORK)
        for found in RestoreCandidates(settings(store, attempt, resume_from), store, store).iter_newest_first()
    ]


def history(store) -> None:
    """The parent saved in two attempts, and the fork began with what the second had."""
    for attempt, start in ((1, None), (2, ref(1, 10))):
        write_claim(store, claim_of(attempt, start))
    for attempt, step in ((1, 10), (1, 20), (2, 30), (2, 40)):
        commit(store, ref(attempt, step))
    write_claim(store, claim_of(1, ref(2, 30), run="hot"))


def test_a_fork_falls_back_to_checkpoints_of_its_parent_before_the_fork_point(store):
    history(store)
    assert candidates(store, 1, f"{PARENT}/2-30") == [f"{PARENT}/2-30", f"{PARENT}/1-10"]


def test_checkpoints_of_the_fork_come_before_those_of_its_parent(store):
    history(store)
    commit(store, ref(1, 35, FORK))
    write_claim(store, claim_of(2, ref(1, 35, FORK), run="hot"))
    assert candidates(store, 2, "1-35") == ["1-35", f"{PARENT}/2-30", f"{PARENT}/1-10"]


def test_the_newest_attempt_decides_whether_a_fork_goes_on_from_its_parent():
    assert find_fork_origin(FORK, {1: ref(2, 30), 2: None}) is None
    assert find_fork_origin(FORK, {1: ref(2, 30), 2: ref(1, 35, FORK)}) == ref(2, 30)


def test_forks_of_each_other_are_each_visited_once(store):
    for run, other in (("digits-1", FORK), ("hot", PARENT)):
        write_claim(store, claim_of(1, ref(1, 10, other), run=run))
        commit(store, ref(1, 10, f"{run}/fit"))
    found = iter_fork_history(store, store, ref(1, 10, PARENT))
    assert list(islice(found, 9)) == [ref(1, 10, PARENT), ref(1, 10, FORK)]


def test_a_checkpoint_quarantined_in_the_parent_is_barred_in_the_fork(store):
    history(store)
    quarantine_checkpoint(store, ref(2, 30), "bit rot", by="verify")
    assert candidates(store, 1, f"{PARENT}/2-30") == [f"{PARENT}/1-10"]


@pytest.mark.parametrize("text", ["../fit/1-10", "digits-1/../1-10", "a/b/c/1-10", "/1-10", "x-10"])
def test_a_start_that_is_no_place_in_the_store_is_refused(store, text):
    with pytest.raises(UsageError):
        settings(store, 1, text)


def test_ranks_vote_on_a_checkpoint_of_another_run_apart_from_their_own():
    layout = LineageLayout(FORK)
    assert layout.votes(1, 1, ref(1, 10)) != layout.votes(1, 1, ref(1, 10, FORK))
