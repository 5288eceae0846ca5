"""Which checkpoints stay, and the words that say why.

| checkpoint | stays because |
|---|---|
| among the newest `last` valid ones | newest 3 |
| the first valid one from a multiple of `every_steps` on | every 1,000 steps |
| among the best by a metric that is a finite number | best loss |
| pinned, quarantined, in use | whoever holds it says so |
| late or damaged, and not older than the newest ones | it may still be looked into |
| anything else | it does not, unless too few valid ones would stay |
"""

import math

import pytest
from support.builders.lineage import ref

from tiphys.lineage.retention.policy import LineageSnapshot, evaluate_retention
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy, parse_keep_best, parse_keep_every


def seen(*steps, damaged=(), metrics=None, held=None, late=()):
    """Commits of attempt 1 at ``steps``; ``late`` ones are of no use to anybody."""
    commits = [ref(1, step) for step in steps]
    usable = [commit for commit in sorted(commits, key=lambda c: -c.global_step) if commit not in late]
    valid = {c: (metrics or {}).get(c.global_step, {}) for c in usable if c.global_step not in damaged}
    return LineageSnapshot(commits, usable, valid, held or {})


def kept(keep, observed):
    verdict = evaluate_retention(keep, observed)
    assert sorted([*verdict.kept, *verdict.expired], key=str) == sorted(observed.commits, key=str)
    return {str(one): ", ".join(why) for one, why in verdict.kept.items()}


def test_the_newest_are_kept():
    assert kept(RetentionPolicy(last=2), seen(1, 2, 3)) == {"1-3": "newest 2", "1-2": "newest 2"}


def test_without_a_policy_all_are():
    assert kept(None, seen(1, 2)) == {"1-1": "all are kept", "1-2": "all are kept"}


def test_anchors_are_the_first_from_each_multiple_on_and_not_before_the_first_multiple():
    found = kept(RetentionPolicy(last=1, every_steps=1000), seen(10, 900, 1100, 1900, 2000, 2500, 4200))
    assert found == {
        "1-4200": "newest 1, every 1,000 steps",
        "1-2000": "every 1,000 steps",
        "1-1100": "every 1,000 steps",
    }


def test_a_damaged_anchor_gives_way_to_the_next():
    assert set(kept(RetentionPolicy(last=1, every_steps=10), seen(10, 11, 30, damaged=[10]))) == {"1-11", "1-30"}


@pytest.mark.parametrize(("order", "best"), [("min", {"1-1", "1-3"}), ("max", {"1-2", "1-4"})])
def test_the_best_are_kept(order, best):
    losses = {1: {"loss": 0.1}, 2: {"loss": 0.9}, 3: {"loss": 0.2}, 4: {"loss": 0.8}, 5: {"loss": 0.5}}
    found = kept(
        RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order=order, count=2)),
        seen(1, 2, 3, 4, 5, metrics=losses),
    )
    assert set(found) == {"1-5", *best}
    assert {found[one] for one in best} == {"best loss"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("order", ["min", "max"])
def test_a_metric_that_is_no_finite_number_is_never_best(value, order):
    metrics = {1: {"loss": value}, 2: {"loss": 1.0}, 3: {"accuracy": 1.0}, 4: {}}
    assert set(
        kept(
            RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order=order, count=9)),
            seen(1, 2, 3, 4, metrics=metrics),
        )
    ) == {
        "1-2",
        "1-4",
    }


def test_of_equally_good_ones_the_newer_is_best():
    metrics = {step: {"loss": 1.0} for step in (1, 2, 3)}
    assert set(
        kept(RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order="min")), seen(1, 2, 3, metrics=metrics))
    ) == {"1-3"}
    metrics[3] = {"loss": 2.0}
    assert set(
        kept(RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order="min")), seen(1, 2, 3, metrics=metrics))
    ) == {
        "1-2",
        "1-3",
    }


def test_a_damaged_one_counts_for_nothing_and_waits_until_it_is_old():
    metrics = {3: {"loss": 0.0}}
    keep = RetentionPolicy(last=2, every_steps=3, best=BestCheckpoints(metric="loss", order="min"))
    assert kept(keep, seen(1, 2, 3, 4, damaged=[3], metrics=metrics)) == {
        "1-4": "newest 2, every 3 steps",
        "1-3": "not older than the newest 2 valid",
        "1-2": "newest 2",
    }
    assert set(kept(keep, seen(3, 4, 5, damaged=[3], metrics=metrics))) == {"1-4", "1-5"}


def test_checkpoints_stay_while_too_few_are_valid():
    assert len(kept(RetentionPolicy(last=3), seen(1, 2, 3, 4, damaged=[2, 3]))) == 4


def test_a_held_checkpoint_stays_and_says_for_whom():
    held = {ref(1, 1): ["pinned release-1", "quarantined"], ref(1, 9): ["pinned gone"]}
    assert kept(RetentionPolicy(last=1), seen(1, 2, 3, held=held)) == {
        "1-3": "newest 1",
        "1-1": "pinned release-1, quarantined",
    }


def test_late_commits_go_once_they_are_older():
    assert set(kept(RetentionPolicy(last=1), seen(1, 2, 3, late=[ref(1, 3)]))) == {"1-2", "1-3"}
    assert set(kept(RetentionPolicy(last=1), seen(1, 3, 4, late=[ref(1, 3)]))) == {"1-4"}


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss:min:2", BestCheckpoints(metric="loss", order="min", count=2)),
        (" accuracy:max ", BestCheckpoints(metric="accuracy", order="max", count=1)),
        ("val:loss:min", BestCheckpoints(metric="val:loss", order="min", count=1)),
        ("min:max:3", BestCheckpoints(metric="min", order="max", count=3)),
    ],
)
def test_the_best_is_written_as_metric_order_and_number(text, best):
    assert parse_keep_best(text, "") == best
    assert parse_keep_best(str(best), "") == best


def test_anchors_are_written_as_steps():
    assert [parse_keep_every(text, "") for text in ("1 step", "1000 steps", " 20steps ")] == [1, 1000, 20]
