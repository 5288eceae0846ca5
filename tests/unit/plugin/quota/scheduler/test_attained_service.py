"""Queues that go by the GPU time that a training has had: who is next, what is counted, and what the book keeps.

| of two that wait in such a queue        | goes first         |
|-----------------------------------------|--------------------|
| higher priority                         | whatever it had    |
| of the same: lower level of GPU time    | whoever came first |
| of the same level                       | who began first    |
| beyond the last, fewer slices of 48 h   | whoever came first |
| of the same, neither has begun          | who came first     |
"""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, ask, lease, queues, waiting
from support.stories.plugin import Clock, fit, gpus, records, world
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.ledger.status_codec import decode_state, encode_state
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import decide_admission
from tiphys_plugin.quota.scheduler.fair_share import attained_gpu_seconds, attained_level_of

from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import RunLayout, claim_record, read_record

HOUR = 3600.0


def by_gpu_time(**changes) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8}, "order": "attained", "attained_gpu_hours": [1, 8], **changes}
    return Queues.model_validate({"queues": [queue]})


RULES = by_gpu_time()


def first(rules: Queues, *line) -> str:
    """Who of those that each want all GPUs would get them."""
    state = LedgerState(queues=rules)
    answers = {
        one.request.uid: decide_admission(
            replace(state, pending=tuple(other for other in line if other is not one)), one.request, one.arrival, NOW
        )
        for one in line
    }
    [name] = [name for name, answer in answers.items() if isinstance(answer, Admitted)]
    return name


@pytest.mark.parametrize(
    ("earlier", "later", "goes"),
    [
        ({"attained": 2 * HOUR}, {"attained": 0.9 * HOUR}, "later"),
        ({"attained": 7 * HOUR}, {"attained": 2 * HOUR}, "earlier"),
        ({"attained": 300 * HOUR}, {"attained": 9 * HOUR}, "earlier"),
        ({"attained": 900 * HOUR}, {"attained": 9 * HOUR}, "later"),
        ({"attained": 900 * HOUR, "priority": 1}, {}, "earlier"),
        ({"attained": 3 * HOUR, "first_start": 200.0}, {"attained": 5 * HOUR, "first_start": 100.0}, "later"),
        ({}, {"attained": 60, "first_start": 100.0}, "later"),
    ],
)
def test_a_lower_level_goes_before_an_earlier_arrival_and_behind_a_higher_priority(earlier, later, goes):
    line = waiting(8, 1, "earlier", **earlier), waiting(8, 2, "later", **later)
    assert first(RULES, *line) == goes
    if "priority" not in earlier:
        assert first(queues(research={"A100": 8}), *line) == "earlier", "a queue that goes by arrival heeds none of it"


def test_a_request_behind_less_attained_gpu_time_gets_the_reason():
    state = LedgerState(pending=(waiting(8, 2, "new", attained=0.5 * HOUR),), queues=RULES)
    answer = decide_admission(state, ask(8, "long", attained=20 * HOUR), 1, NOW)
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.BEHIND_LESS_ATTAINED, 2)
    assert answer.message.startswith(
        "8 A100 asked; behind run-new/fit (8 A100, which has had 0.5 GPU-hours so far, and this one 20.0)"
    )


def test_a_request_behind_an_earlier_start_gets_the_reason():
    state = LedgerState(pending=(waiting(8, 2, "old", attained=HOUR, first_start=100.0),), queues=RULES)
    answer = decide_admission(state, ask(8, "young", attained=HOUR, first_start=200.0), 1, NOW)
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.BEHIND_EARLIER_REQUEST
    assert "behind run-old/fit (8 A100, began earlier)" in answer.message


def test_positions_in_a_stopped_queue_go_by_the_same_order():
    state = LedgerState(
        pending=(waiting(1, 1, "long", attained=9 * HOUR), waiting(1, 2, "new")), queues=by_gpu_time(stopped=True)
    )
    answer = decide_admission(state, ask(1, "mine", attained=2 * HOUR), 3, NOW)
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.QUEUE_STOPPED, 2)


def test_gpu_time_of_a_lease_is_that_of_earlier_attempts_and_its_own():
    held, queue = lease(4, attained=HOUR), RULES.queues[0]
    assert attained_gpu_seconds(held, NOW) == HOUR
    assert attained_gpu_seconds(held, NOW + timedelta(hours=2)) == 9 * HOUR
    assert attained_gpu_seconds(held, NOW - timedelta(hours=2)) == HOUR, "a clock that was put back takes none away"
    assert [attained_level_of(queue, held, NOW + timedelta(hours=hours)) for hours in (0, 1, 2)] == [1, 1, 2]
    small = lease(2, attained=900 * HOUR, min_members=1, max_members=4)
    grown = replace(small, request=small.request.with_members(4))
    assert attained_level_of(queue, small, NOW) == attained_level_of(queue, grown, NOW), "members change no level"


def test_admit_counts_what_the_attempts_before_have_had(tmp_path):
    here = world(tmp_path, RULES)
    flow = here.submit(fit(gpu=gpus(4)))
    flow.admit("fit", 0)
    [document] = records(here.store, "control/runs/digits-abc12/attempts/fit/")
    begun = AttemptClaim.model_validate(document)
    for attempt, hours in ((1, 12), (2, 24)):
        claim = read_record(here.store, RunLayout("digits-abc12").attempt("fit", attempt), AttemptClaim)
        end = AttemptEnd(
            run=claim.run,
            step="fit",
            attempt=attempt,
            submission=1,
            outcome=AttemptEndOutcome.FAILED,
            cause=Cause.PREEMPTION,
            written_at=claim.written_at + timedelta(hours=3 * attempt),
            last_alive_at=claim.written_at + timedelta(hours=3),
        )
        claim_record(here.store, RunLayout("digits-abc12").attempt_end("fit", attempt), end)
        here.ledger.release(claim.lease)
        flow.admit("fit", attempt)
        [held] = here.ledger.snapshot().leases
        assert (held.request.attempt, held.request.attained) == (attempt + 1, hours * HOUR)
        assert held.request.first_start == begun.written_at.timestamp()


def test_the_file_keeps_it_where_the_queue_goes_by_it_and_nowhere_else(tmp_path):
    nightly = {"name": "nightly", "gpus": {"A100": 8}, "backfill": "strict"}
    document = {"queues": [*RULES.model_dump()["queues"], nightly]}
    ledger = SqliteLedger(tmp_path / "ledger.db", Queues.model_validate(document), clock=Clock())
    ledger.request(ask(8, "u1", attained=5 * HOUR, first_start=1.5))
    ledger.request(ask(8, "u2", attained=6 * HOUR))
    ledger.request(ask(8, "u3", attained=7 * HOUR, first_start=2.5, queue="nightly"))
    seen = ledger.snapshot()
    kept = [(one.request.attained, one.request.first_start) for one in (*seen.leases, *seen.pending)]  # type: ignore[attr-defined]
    assert kept == [(5 * HOUR, 1.5), (0, None), (6 * HOUR, None)]
    assert isinstance(ledger.request(ask(8, "u1", attained=5 * HOUR)), Admitted), "the same answer again"
    ledger.close()


def test_the_stored_ledger_says_it_only_where_there_is_some():
    for one, is_written in ((lease(8, attained=1.5, first_start=9.25), True), (lease(8), False)):
        stored = json.loads(json.dumps(encode_state(LedgerState((one,)))))
        assert ("attained" in stored["leases"][0]["request"]) == is_written
        assert decode_state(stored) == LedgerState((one,))
