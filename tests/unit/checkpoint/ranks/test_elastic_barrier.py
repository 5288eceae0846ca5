"""Ranks that torchrun starts again with fewer of them, within one attempt.

| what happens | promise |
|---|---|
| nodes count different numbers of restarts | their ranks still meet, by the port of their meeting |
| ranks of a bigger world have voted, or called to stop | they count no more |
| a state of each rank, a program that torchrun has not started | refused by name before the first step |
| one state for all, and fewer ranks | all restore it |
| a port comes again | the first rank stops before anybody believes an old word |
| a rank fails because another was lost | no crash of the attempt is recorded while torchrun starts it again |
"""

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, claim_of, ref, write_claim
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.ranks import barrier
from tiphys.checkpoint.ranks.barrier import RankBarrier, RankInfo
from tiphys.checkpoint.session import session
from tiphys.errors import StoreError, UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import RunLayout
from tiphys.store.incarnations import crash_key

TORCHRUN = {
    "TIPHYS_ELASTIC": "1:3",
    "TORCHELASTIC_RUN_ID": "gang",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_MAX_RESTARTS": "4",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_PORT": "43210",
}


@pytest.fixture
def store():
    found = MemoryStore()
    write_claim(found, claim_of(1, None))
    return found


def rank(store, number, ranks, port):
    place = RankInfo(number, ranks, port, is_elastic=True)
    return RankBarrier(store, LINEAGE, 1, place, sharded=False, check_fence=lambda: None)


def test_ranks_meet_by_the_port_whatever_their_nodes_have_counted():
    places = [RankInfo.from_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "2")]
    assert places == [RankInfo(1, 2, 43210, 1, is_elastic=True)] * 2
    assert RankInfo.from_environment({**TORCHRUN, "MASTER_PORT": "43211"}) != places[0]


def test_a_store_that_torchrun_shares_would_mix_two_meetings_and_is_refused():
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        RankInfo.from_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_without_torchrun_a_second_node_would_train_for_itself_and_is_refused():
    assert RankInfo.from_environment({"TIPHYS_ELASTIC": "1:3", "NODE_RANK": "0"}) == RankInfo()
    with pytest.raises(UsageError, match="start the command of the step with torchrun"):
        RankInfo.from_environment({"TIPHYS_ELASTIC": "1:3", "NODE_RANK": "1"})


def test_a_call_to_stop_of_ranks_that_have_gone_is_ignored(store):
    rank(store, 1, 3, 41000).request_save(9, stop=True)
    assert rank(store, 0, 2, 42000).read_save_requests() == []


def test_states_of_each_rank_are_refused_before_the_first_step():
    step = {"LINEAGE": LINEAGE, "STORE": "file:///nowhere", "RUN": "r", "STEP": "s", "ATTEMPT": "1"}
    environ = {**TORCHRUN, **{f"TIPHYS_{name}": value for name, value in step.items()}}
    with pytest.raises(UsageError, match="may continue with fewer ranks, and NumPy states cannot be resharded"):
        session(sharded=True, environ=environ)


def test_a_vote_of_before_does_not_count(store, monkeypatch):
    monkeypatch.setattr(barrier, "BARRIER_TIMEOUT_SECONDS", 0.0)
    for number in (0, 1):
        store.create(f"data/lineages/{LINEAGE}/gangs/000000001-41000/votes/1-5/{number:05d}", b"")
    with pytest.raises(StoreError, match="rank 1 did not restore"):
        rank(store, 0, 2, 42000).vote_valid(ref(1, 5))


def test_a_port_that_comes_again_is_noticed_by_the_first_rank(store):
    rank(store, 0, 3, 41000).open()
    rank(store, 1, 2, 41000).open()
    with pytest.raises(StoreError, match="twice on port 41000"):
        rank(store, 0, 2, 41000).open()
    rank(store, 0, 2, 42000).open()


def test_a_state_shared_by_all_ranks_is_restored_by_fewer_ranks_in_the_same_attempt(store):
    for ranks, port, begins, step in ((3, 41000, 0, 4), (2, 42000, 4, 6)):
        place = RankInfo(0, ranks, port, is_elastic=True)
        with open_session(store, rank_info=place, admit=False) as session:
            session._coordinator.vote_valid = lambda _: True  # the others are not here
            state = session.restore(default={"step": 0, "weights": np.zeros(3)})
            assert state["step"] == begins
            session.save(step, {"step": step, "weights": np.full(3, step)})
    assert list_commits(store, LINEAGE) == [ref(1, 6), ref(1, 4)]
    assert read_manifest(store, ref(1, 6)).restored == ref(1, 4), "of the same attempt"


@pytest.mark.parametrize(("restarts", "recorded"), [("0", False), ("3", False), ("4", True)])
def test_an_error_after_which_torchrun_starts_again_is_no_crash_of_the_attempt(store, restarts, recorded):
    environ = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": restarts}
    with pytest.raises(RuntimeError), open_session(store, environ=environ, admit=False):
        raise RuntimeError("connection closed by peer")
    key = crash_key(RunLayout(claim_of(1, None).run), claim_of(1, None).step, 1)
    assert (key in store.objects) is recorded
