"""The lines that are kept from one look to the next are those that would be made anew."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, waiting
from tiphys_plugin.quota.lease import PendingRequest
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.pending_queues import PendingQueues

RULES = Queues.model_validate(
    {
        "queues": [
            {"name": "a", "gpus": {"A100": 8}},
            {"name": "b", "gpus": {"A100": 8}, "order": "attained"},
            {"name": "shut", "gpus": {"A100": 8}, "stopped": True},
        ]
    }
)


def shown(lines: PendingQueues) -> dict[str, list[object]]:
    return {
        queue.name: sorted(
            (one.position, one.pending.request, one.pending.promised_at, one.max_seconds, number)
            for group in groups.values()
            for number, one in enumerate(group)
        )
        for queue, groups in lines
    }


def newcomer(source: random.Random, number: int) -> PendingRequest:
    return waiting(
        source.choice([1, 2, 4]),
        number,
        queue=source.choice(["a", "a", "b", "b", "shut", "unknown"]),
        priority=source.choice([0, 0, 5]),
        attained=source.choice([0.0, 7200.0, 36_000.0]),
        seconds=source.choice([None, 60]),
    )


def changed(source: random.Random, one: PendingRequest) -> PendingRequest:
    """It asked again, as another try of its step, or something was promised to it."""
    return source.choice(
        [
            replace(one, seen_at=one.seen_at + timedelta(seconds=5)),
            replace(one, request=replace(one.request, attempt=one.request.attempt + 1, priority=source.choice([0, 5]))),
            replace(one, promised_at=NOW),
        ]
    )


@pytest.mark.parametrize("cached_shapes", [4096, 2])
def test_pending_queues_are_updated_by_added_removed_and_changed_requests(monkeypatch, cached_shapes):
    monkeypatch.setattr(pools, "MAX_CACHED_SHAPES", cached_shapes)
    rules, cache = Queues.model_validate(RULES.model_dump(exclude_unset=True)), SchedulerCache()
    source, number = random.Random(20_261_122), 60
    line = [newcomer(source, number) for number in range(1, 61)]
    for _ in range(300):
        for _ in range(source.choice([0, 1, 1, 5])):
            number += 1
            line.append(newcomer(source, number))
        for _ in range(min(len(line), source.choice([0, 1, 2, 4]))):
            line.pop(source.randrange(len(line)))
        line = [changed(source, one) if source.random() < 0.02 else one for one in line]
        kept = cache.sort_pending(rules, tuple(line))
        assert shown(kept) == shown(PendingQueues(rules, line))
        assert kept.has_promises == any(one.promised_at for one in line)


def test_a_later_seen_at_changes_no_pending_queue():
    line, cache = tuple(waiting(1, number, queue="a") for number in range(1, 6)), SchedulerCache()
    later = tuple(replace(one, seen_at=one.seen_at + timedelta(seconds=5)) for one in line)
    kept = cache.sort_pending(RULES, line)
    assert cache.sort_pending(RULES, later) is kept
    assert cache.sort_pending(RULES, line, later[2]) is kept


def test_the_request_itself_is_added_or_takes_the_place_of_its_earlier_version():
    source, cache = random.Random(20_261_123), SchedulerCache()
    line = tuple(newcomer(source, number) for number in range(1, 41))
    for own in source.sample(line, 20):
        others = tuple(one for one in line if one is not own)
        again = changed(source, own)
        now = tuple(again if one is own else one for one in line)
        for pending in (line, others):
            assert shown(cache.sort_pending(RULES, pending, again)) == shown(PendingQueues(RULES, now))
        known = cache.sort_pending(RULES, others, again)
        assert cache.sort_pending(RULES, others, again) is known
