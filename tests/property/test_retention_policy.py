"""Laws of retention over random lineages and policies, and the rule is shown to notice planted bugs."""

import dataclasses

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.builders.lineage import ref

from tiphys.lineage.retention import policy
from tiphys.lineage.retention.policy import LineageSnapshot, age_key, evaluate_retention
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy

refs = st.builds(ref, st.integers(1, 4), st.integers(0, 30))
losses = st.floats(allow_nan=True, allow_infinity=True, width=16)
bests = st.builds(
    BestCheckpoints,
    metric=st.sampled_from(["loss", "accuracy"]),
    order=st.sampled_from(["min", "max"]),
    count=st.integers(1, 4),
)
keeps = st.builds(
    RetentionPolicy, last=st.integers(1, 5), every_steps=st.none() | st.integers(1, 15), best=st.none() | bests
)


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Commits by what is the matter with them."""

    commits: frozenset
    late: frozenset
    damaged: frozenset
    held: frozenset
    metrics: dict

    def observed(self, without=()):
        commits = self.commits.difference(without)
        usable = sorted(commits - self.late, key=age_key, reverse=True)
        valid = {one: self.metrics.get(one, {}) for one in usable if one not in self.damaged}
        return LineageSnapshot(sorted(commits, key=age_key), usable, valid, {one: ["held"] for one in self.held})


@st.composite
def lineages(draw):
    commits = draw(st.frozensets(refs, max_size=14))
    some = st.frozensets(st.sampled_from(sorted(commits, key=age_key)), max_size=6) if commits else st.just(frozenset())
    metrics = {
        one: draw(st.dictionaries(st.sampled_from(["loss", "accuracy"]), losses, max_size=2))
        for one in sorted(commits, key=age_key)
    }
    return Lineage(commits, draw(some), draw(some), draw(some), metrics)


def valid_newest_first(observed):
    return [one for one in observed.usable if one in observed.valid]


@given(lineages(), keeps)
def test_every_commit_is_either_kept_for_a_reason_or_expired(lineage, keep):
    verdict = evaluate_retention(keep, lineage.observed())
    assert set(verdict.kept) | set(verdict.expired) == lineage.commits
    assert not set(verdict.kept) & set(verdict.expired)
    assert all(verdict.kept.values())
    assert list(verdict.expired) == sorted(verdict.expired, key=age_key)


@given(lineages(), keeps)
def test_the_newest_valid_ones_never_expire(lineage, keep):
    observed = lineage.observed()
    assert not set(evaluate_retention(keep, observed).expired) & set(valid_newest_first(observed)[: keep.last])


@given(lineages(), keeps)
def test_retention_never_keeps_fewer_valid_checkpoints_than_asked(lineage, keep):
    observed = lineage.observed()
    verdict = evaluate_retention(keep, observed)
    valid = valid_newest_first(observed)
    left = [one for one in valid if one not in verdict.expired]
    assert len(left) >= min(keep.last, len(valid))


@given(lineages(), keeps)
def test_retention_expires_nothing_while_too_few_checkpoints_are_valid(lineage, keep):
    observed = lineage.observed()
    assert len(valid_newest_first(observed)) >= keep.last or not evaluate_retention(keep, observed).expired


@given(lineages(), keeps)
def test_a_held_checkpoint_never_expires(lineage, keep):
    assert not lineage.held & set(evaluate_retention(keep, lineage.observed()).expired)


@given(lineages(), keeps)
def test_a_damaged_or_late_one_never_counts(lineage, keep):
    verdict = evaluate_retention(keep, lineage.observed())
    for one in lineage.damaged | lineage.late:
        assert not any(why.startswith(("newest", "every", "best")) for why in verdict.kept.get(one, ()))


@given(lineages(), keeps)
def test_damaged_ones_have_no_say_in_what_becomes_of_the_others(lineage, keep):
    others = evaluate_retention(keep, lineage.observed(without=lineage.damaged))
    assert set(others.expired) == set(evaluate_retention(keep, lineage.observed()).expired) - lineage.damaged


@given(lineages(), keeps)
def test_a_second_pass_of_retention_expires_no_more(lineage, keep):
    expired = evaluate_retention(keep, lineage.observed()).expired
    assert evaluate_retention(keep, lineage.observed(without=expired)).expired == ()


@given(lineages(), keeps, st.data())
def test_a_deletion_that_stopped_half_way_leads_to_the_same_end(lineage, keep, data):
    expired = evaluate_retention(keep, lineage.observed()).expired
    gone = frozenset(data.draw(st.lists(st.sampled_from(expired), unique=True))) if expired else frozenset()
    assert set(evaluate_retention(keep, lineage.observed(without=gone)).expired) == set(expired) - gone


def more(keep, data):
    """A policy that keeps at least as much as ``keep``."""
    every = keep.every_steps
    divisors = [number for number in range(1, (every or 0) + 1) if every % number == 0] or [None, 1, 7]
    best = keep.best
    if best is None:
        best = data.draw(st.none() | bests)
    else:
        best = best.model_copy(update={"count": best.count + data.draw(st.integers(0, 3))})
    return RetentionPolicy(
        last=keep.last + data.draw(st.integers(0, 3)), every_steps=data.draw(st.sampled_from(divisors)), best=best
    )


@given(lineages(), keeps, st.data())
def test_a_policy_that_keeps_more_never_expires_more(lineage, keep, data):
    assert set(evaluate_retention(more(keep, data), lineage.observed()).expired) <= set(
        evaluate_retention(keep, lineage.observed()).expired
    )


@given(lineages(), keeps, st.data())
def test_a_further_hold_only_saves_the_held_checkpoint(lineage, keep, data):
    held = data.draw(st.frozensets(refs, max_size=4))
    held_more = dataclasses.replace(lineage, held=lineage.held | held)
    assert (
        set(evaluate_retention(keep, held_more.observed()).expired)
        == set(evaluate_retention(keep, lineage.observed()).expired) - held
    )


@given(lineages(), keeps, st.lists(st.integers(1, 10), max_size=12))
def test_an_anchor_stays_for_ever_while_the_training_goes_on(lineage, keep, strides):
    """Commits are added and retention runs, again and again: what was an anchor once is one at the end."""
    every = keep.every_steps or 5
    keep = keep.model_copy(update={"every_steps": every})
    newest = max((one.global_step for one in lineage.commits), default=0)
    anchors = set()
    for stride in strides:
        newest += stride
        commits = lineage.commits | {ref(5, newest)}
        lineage = dataclasses.replace(lineage, commits=commits)
        verdict = evaluate_retention(keep, lineage.observed())
        assert anchors <= set(verdict.kept)
        anchors |= {one for one, why in verdict.kept.items() if any(reason.startswith("every") for reason in why)}
        lineage = dataclasses.replace(lineage, commits=commits.difference(verdict.expired))


@given(lineages(), keeps)
def test_retention_without_a_policy_expires_nothing(lineage, keep):
    assert evaluate_retention(None, lineage.observed()).expired == ()


def counting_damaged(keep, seen):
    return list(seen.usable)[: keep.last]


def last_of_each_bucket(every_steps, valid):
    found = {one.global_step // every_steps: one for one in sorted(valid, key=age_key)}
    found.pop(0, None)
    return list(found.values())


def old_whatever_is_left(keep, seen):
    recent = policy.select_newest_valid(keep, seen)
    return [one for one in seen.commits if recent and age_key(one) < min(map(age_key, recent))]


@pytest.mark.parametrize(
    ("place", "bug", "law"),
    [
        ("select_newest_valid", counting_damaged, test_retention_never_keeps_fewer_valid_checkpoints_than_asked),
        ("_select_anchors", last_of_each_bucket, test_an_anchor_stays_for_ever_while_the_training_goes_on),
        ("_select_expirable", old_whatever_is_left, test_retention_expires_nothing_while_too_few_checkpoints_are_valid),
    ],
)
def test_the_laws_notice_planted_bugs(place, bug, law, monkeypatch):
    monkeypatch.setattr(policy, place, bug)
    unshrunk = settings(phases=[Phase.generate], report_multiple_bugs=False, max_examples=500)
    with pytest.raises(AssertionError):
        unshrunk(law)()
