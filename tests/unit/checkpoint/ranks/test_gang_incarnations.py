"""What an older incarnation of a gang has left in storage, or still tries, counts for no later one."""

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.lifecycle.crash_report import describe_error, judge_restart
from tiphys.checkpoint.ranks.barrier import RankBarrier, RankInfo
from tiphys.checkpoint.save.commit import AttemptFence
from tiphys.errors import FencedError
from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.records import GangRestartDecision
from tiphys.store import RunLayout, claim_record
from tiphys.store.incarnations import gang_decision_key

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}


def rank_info(incarnation: str, restarts: str) -> RankInfo:
    return RankInfo.from_environment(
        {**TORCHRUN, "TIPHYS_INCARNATION": incarnation, "TORCHELASTIC_RESTART_COUNT": restarts}
    )


def test_start_of_the_ranks_has_a_number_of_its_own() -> None:
    starts = [("1", "0"), ("1", "1"), ("1", "2"), ("2", "0"), ("2", "1"), ("3", "0")]
    numbers = [rank_info(*start).incarnation for start in starts]
    assert numbers == sorted(set(numbers))


def test_save_requests_of_an_older_incarnation_are_not_obeyed() -> None:
    store = MemoryStore()

    def barrier(incarnation: str) -> RankBarrier:
        return RankBarrier(store, LINEAGE, 1, rank_info(incarnation, "0"), sharded=True, check_fence=lambda: None)

    barrier("1").request_save(500, stop=True)
    assert barrier("2").read_save_requests() == []
    assert len(barrier("1").read_save_requests()) == 1


@pytest.mark.parametrize(("exit_code", "fenced"), [(None, True), (137, False)])
def test_commit_of_an_older_incarnation_is_refused_once_the_next_is_started(
    exit_code: int | None, fenced: bool
) -> None:
    store = MemoryStore()
    write_claim(store, claim_of(1))
    older, newer, alone = (AttemptFence(store, RUN, STEP, 1, number) for number in (1, 2, None))
    older.check()
    decision = GangRestartDecision(run=RUN, step=STEP, attempt=1, incarnation=2, exit_code=exit_code)
    claim_record(store, gang_decision_key(RunLayout(RUN), STEP, 1, 2), decision)
    newer.check()
    alone.check()
    if fenced:
        with pytest.raises(FencedError, match=r"process 1 of attempt 1 .* may not commit: process 2 of its gang"):
            older.check()
    else:
        older.check()


@pytest.mark.parametrize(
    ("error", "is_rank", "cause"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), True, "infrastructure"),
        (BrokenPipeError("the other rank is gone"), True, "infrastructure"),
        (RuntimeError("[c10d] recvValue failed on SocketImpl(fd=6): Connection reset by peer"), True, "infrastructure"),
        (
            RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote…"),
            True,
            "infrastructure",
        ),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:9] Read error [::1]:2: Connection reset"),
            False,
            "infrastructure",
        ),
        (ConnectionResetError(104, "Connection reset by peer"), False, "user_error"),
        (TypeError("a bug"), True, "user_error"),
    ],
)
def test_rank_that_loses_a_connection_has_lost_another_one(error: Exception, is_rank: bool, cause: str) -> None:
    """So says its launcher, which starts it again, and so says the service of the end of its attempt."""
    message = describe_error(error, is_rank=is_rank)
    assert judge_restart(message) == cause
    assert classify_failure(AttemptObservation("Failed", 1, crash_error=message)).cause == cause
