"""Where an attempt really started.

| events of the attempt                        | start                   |
|----------------------------------------------|-------------------------|
| none                                         | what its claim says     |
| it restored an older checkpoint              | that one                |
| it skipped the one of its claim, and no more | the beginning           |
| its pod was created again, and restored      | what its first pod took |
| a fork restored an older one of its parent   | that one                |
"""

import pytest
from support.builders.lineage import LINEAGE, claim_of, ref

from tiphys.lineage.restored_starts import find_restored_starts
from tiphys.records import CheckpointRef, Event
from tiphys.store import Attempt

PARENT = "parent-1/fit"


def event(name: str, checkpoint: str, attempt: int = 2) -> Event:
    return Event(name=f"checkpoint.{name}", step="fit", attempt=attempt, message="", data={"checkpoint": checkpoint})


@pytest.mark.parametrize(
    ("events", "start"),
    [
        ([], ref(1, 50)),
        ([event("restored", "1-50")], ref(1, 50)),
        ([event("skipped", "1-50"), event("restored", "1-40")], ref(1, 40)),
        ([event("skipped", "1-50"), event("skipped", "1-40")], None),
        ([event("skipped", "1-50", attempt=3)], ref(1, 50)),
        ([event("restored", "1-50"), event("restored", "2-60")], ref(1, 50)),
        ([event("restored", "2-60")], ref(1, 50)),
        ([event("restored", "rubbish")], ref(1, 50)),
    ],
)
def test_start(events: list[Event], start: CheckpointRef | None) -> None:
    assert find_restored_starts([Attempt(claim_of(2, ref(1, 50)), None)], events) == {2: start}


def test_a_fork_starts_from_what_it_could_use_of_its_parent() -> None:
    attempt = Attempt(claim_of(1, ref(1, 50, PARENT)), None)
    events = [event("skipped", "1-50", 1), event("restored", "1-40", 1), event("restored", "1-60", 1)]
    assert find_restored_starts([attempt], events) == {1: ref(1, 40, PARENT)}
    assert LINEAGE != PARENT
