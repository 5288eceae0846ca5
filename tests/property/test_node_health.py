"""Laws of the verdict on a node: what it takes, that it ends, and that nobody's word counts twice."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tiphys_plugin.nodes.health import MIN_HINT_SEPARATION, NodeEvidence, NodeHealth, judge_node_health

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FORGET = timedelta(hours=6)
WORSE = [NodeHealth.HEALTHY, NodeHealth.SUSPECT, NodeHealth.UNHEALTHY]

moments = st.integers(-600, 30).map(lambda minutes: NOW + timedelta(minutes=minutes))
hints = st.builds(NodeEvidence, st.sampled_from("abc"), st.just(""), st.just("hint"), st.none() | moments)
faults = st.builds(
    NodeEvidence, st.sampled_from("abc"), st.just(""), st.sampled_from(["cordon", "fault", "notice"]), st.none()
)
evidence = st.lists(hints | faults, max_size=6)


@given(evidence, st.randoms(use_true_random=False))
def test_a_verdict_never_gets_worse_by_less_evidence_and_ignores_the_order(known, random):
    verdict = judge_node_health(known, NOW, FORGET)
    shuffled = random.sample(known, len(known))
    assert judge_node_health(shuffled, NOW, FORGET).state is verdict.state
    for left_out in range(len(known)):
        fewer = judge_node_health(known[:left_out] + known[left_out + 1 :], NOW, FORGET)
        assert WORSE.index(fewer.state) <= WORSE.index(verdict.state)


@given(st.lists(hints, max_size=6))
def test_a_suspicion_takes_more_than_one_source_or_some_time(known):
    verdict = judge_node_health(known, NOW, FORGET)
    assert verdict.state is not NodeHealth.UNHEALTHY
    assert not verdict.is_broken
    assert not verdict.is_departing
    if verdict.state is NodeHealth.SUSPECT:
        times = [one.at for one in verdict.evidence if one.at]
        assert len({one.source for one in verdict.evidence}) > 1 or max(times) - min(times) >= MIN_HINT_SEPARATION


@given(evidence)
def test_every_verdict_ends_with_its_evidence(known):
    now, looks = NOW, 0
    while (until := judge_node_health(known, now, FORGET).valid_until) is not None:
        assert until > now, "it says itself when to look again"
        now, looks = until, looks + 1
    assert looks <= len(known)
    lasting = [one for one in known if one.at is None]
    assert judge_node_health(known, now, FORGET) == judge_node_health(lasting, now, FORGET)
    assert judge_node_health([], now, FORGET).state is NodeHealth.HEALTHY


@given(evidence)
def test_a_verdict_holds_until_the_time_that_it_gives(known):
    verdict = judge_node_health(known, NOW, FORGET)
    if verdict.valid_until is not None:
        assert judge_node_health(known, verdict.valid_until - timedelta(microseconds=1), FORGET) == verdict
