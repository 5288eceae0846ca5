"""One write for everybody who came while another wrote.

| what happens                              | what follows                                   |
|-------------------------------------------|------------------------------------------------|
| many ask while one writes                 | one more write serves all of them, in order    |
| somebody comes before another try         | that try serves it too                         |
| another service was faster                | fewer are decided together, until it goes well |
| one of them has no room                   | the others get theirs                          |
| the API server refuses                    | all who shared the write are told              |
| the one that writes does not come back    | `StoreError`, and nothing is decided later     |
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.builders.ledger import LedgerApi, ask, ledger_api, queues
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred
from tiphys_plugin.quota.ledger import room
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger, QueuedWrite, WriteBatcher

from tiphys.errors import StoreError

MANY = 20


class Gate:
    """Holds the first write until everybody else has come."""

    def __init__(self, api: LedgerApi) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        api.meanwhile = self._pass

    def _pass(self) -> str:
        if not self.entered.is_set():
            self.entered.set()
            assert self.opened.wait(120)
        return ""


def all_at_once(ledger: KubernetesLedger, gate: Gate):
    with ThreadPoolExecutor(MANY + 1) as pool:
        first = pool.submit(ledger.request, ask(1, "first"))
        assert gate.entered.wait(120)
        others = [pool.submit(ledger.request, ask(1, f"u{number}")) for number in range(MANY)]
        while len(ledger._write_batcher._waiting) < MANY:
            threading.Event().wait(0.001)
        gate.opened.set()
        return first.result(), [other.result() for other in others]


def test_requests_during_a_write_are_served_by_one_write():
    api = ledger_api(queues(research={"A100": 8}))
    ledger = KubernetesLedger(api, "tiphys")
    first, others = all_at_once(ledger, Gate(api))
    assert api.calls.count("replace") == 2
    assert isinstance(first, Admitted)
    assert sum(isinstance(answer, Admitted) for answer in others) == 7
    held = ledger.snapshot()
    assert len(held.leases) == 8
    assert {answer.lease for answer in others if isinstance(answer, Admitted)} < {lease.id for lease in held.leases}
    assert sorted(answer.position for answer in others if isinstance(answer, Deferred)) == list(range(1, MANY - 6))


def test_a_request_before_a_second_try_is_served_by_it():
    api = ledger_api(queues(research={"A100": 8}))
    conflicts = ["conflict"]
    api.meanwhile = lambda: conflicts.pop() if conflicts else ""
    with ThreadPoolExecutor(1) as pool:
        late = []

        def pause(_: float) -> None:
            late.append(pool.submit(ledger.request, ask(1, "late")))
            while not ledger._write_batcher._waiting:
                threading.Event().wait(0.001)

        ledger = KubernetesLedger(api, "tiphys", pause=pause)
        answers = [ledger.request(ask(1, "first")), late[0].result()]
    assert all(isinstance(answer, Admitted) for answer in answers)
    assert len(late) == 1
    assert api.calls.count("replace") == 2, "one met the conflict, and one was for both"


def test_fewer_requests_are_decided_together_after_conflicts_and_all_are_answered():
    api = ledger_api(queues(research={"A100": 8}))
    ledger = KubernetesLedger(api, "tiphys", pause=lambda _: None)
    gate = Gate(api)
    sizes, write, conflicts = [], ledger._ledger_object.write, ["", *4 * ["conflict"]]

    def counted(version, state):
        sizes.append(len(state.leases) + len(state.pending) - len(version.state.leases) - len(version.state.pending))
        written = write(version, state)
        api.meanwhile = lambda: conflicts.pop() if conflicts else ""
        return written

    ledger._ledger_object.write = counted
    _, others = all_at_once(ledger, gate)
    assert sizes == [1, 20, 20, 20, 10, 5, 10, 5]
    assert sum(isinstance(answer, Admitted) for answer in others) == 7
    assert len(ledger.snapshot().leases) == 8


def test_a_request_without_room_takes_no_room_from_others(monkeypatch):
    monkeypatch.setattr(room, "ROOM_ENTRIES", 4)
    api = ledger_api(queues(research={"A100": 100}).model_copy(update={"ledger_share": 1}))
    first, others = all_at_once(KubernetesLedger(api, "tiphys"), Gate(api))
    assert isinstance(first, Admitted)
    assert sum(isinstance(answer, Admitted) for answer in others) == 3
    assert {answer.reason for answer in others if isinstance(answer, Deferred)} == {AdmissionReason.LEDGER_FULL}


def test_a_failed_write_fails_every_request_that_shared_it():
    shared = []

    def down(writes: list[QueuedWrite]):
        while not shared and len(turns._waiting) < 3:
            threading.Event().wait(0.001)
        shared.append(len(writes))
        raise StoreError("the API server did not answer")

    turns = WriteBatcher(down, 60, "the ledger")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(turns.submit, lambda book, rules: (book, None)) for _ in range(4)]
    assert [str(one.exception()) for one in asked] == ["the API server did not answer"] * 4
    assert shared == [1, 3]


def test_a_request_that_gave_up_waiting_is_not_decided_later():
    entered, opened, served = threading.Event(), threading.Event(), []

    def slow(turns: list[QueuedWrite]):
        served.append(len(turns))
        entered.set()
        assert opened.wait(120)
        return [None for _ in turns]

    turns = WriteBatcher(slow, 0.05, "GPULedger tiphys/default")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(turns.submit, lambda book, rules: (book, None))
        assert entered.wait(120)
        with pytest.raises(StoreError, match=r"GPULedger tiphys/default is busy: others have waited .* for 0.05 s"):
            turns.submit(lambda book, rules: (book, None))
        opened.set()
        first.result()
    turns.submit(lambda book, rules: (book, None))
    assert served == [1, 1]
