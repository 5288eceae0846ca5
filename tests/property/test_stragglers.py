"""Laws of the verdict that a member of a gang is slow: it takes most of the last windows, and it ends."""

import random

from hypothesis import given
from hypothesis import strategies as st
from tiphys_plugin.nodes.stragglers import MIN_SLOW_WINDOWS, RECENT_WINDOWS, find_stragglers

from tiphys.store.layout import RankStepTime

NOW = 100
WINDOWS = range(NOW - RECENT_WINDOWS, NOW)

paces = st.lists(
    st.builds(
        RankStepTime,
        st.integers(NOW - RECENT_WINDOWS - 2, NOW),
        st.integers(0, 5),
        st.integers(0, 1),
        st.floats(0.0, 10.0, allow_nan=False),
    ),
    max_size=60,
)


def gang(members: int, slow: dict[int, set[int]], times: float = 1.5, noise: float = 0.02, seed: int = 0):
    """Members that work about a second for a step; ``slow`` names windows of members that take longer."""
    draw = random.Random(seed)
    return [
        RankStepTime(
            window, member, rank, draw.uniform(1 - noise, 1 + noise) * (times if window in slow.get(member, ()) else 1)
        )
        for window in WINDOWS
        for member in range(members)
        for rank in (2 * member, 2 * member + 1)
    ]


@given(paces, st.randoms(use_true_random=False))
def test_order_scale_and_what_is_too_old_do_not_matter(step_times, shuffler):
    found = find_stragglers(step_times, NOW)
    assert find_stragglers(shuffler.sample(step_times, len(step_times)), NOW) == found
    recent = [one for one in step_times if one.window in WINDOWS]
    assert find_stragglers(recent, NOW) == found
    twice = [one._replace(own_seconds=2 * one.own_seconds) for one in step_times]
    assert [one.member for one in find_stragglers(twice, NOW)] == [one.member for one in found]


@given(paces)
def test_a_verdict_takes_most_windows_and_never_holds_for_most_members(step_times):
    found = find_stragglers(step_times, NOW)
    for one in found:
        windows = {pace.window for pace in step_times if pace.member == one.member and pace.window in WINDOWS}
        assert MIN_SLOW_WINDOWS <= one.windows <= len(windows)
        assert one.slowdown > 1.1
    assert 2 * len(found) <= len({one.member for one in step_times}), "half of a gang is its median"


@given(
    st.integers(3, 40),
    st.integers(0, 39),
    st.sets(st.sampled_from(list(WINDOWS))),
    st.sampled_from([1.3, 1.5, 3.0]),
    st.integers(0, 99),
)
def test_a_repeatedly_slow_member_is_found_and_no_other_member(members, who, windows, times, seed):
    slow = who % members
    found = find_stragglers(gang(members, {slow: windows}, times, seed=seed), NOW)
    expected = len(windows) >= MIN_SLOW_WINDOWS and NOW - 1 in windows
    assert [one.member for one in found] == ([slow] if expected else [])
    if found:
        assert abs(found[0].slowdown - times) < 0.1 * times
        assert (found[0].windows, found[0].members) == (len(windows), members)


def test_a_gang_of_two_has_no_straggler():
    assert find_stragglers(gang(2, {0: set(WINDOWS)}), NOW) == []


def test_a_rank_makes_its_member_slow():
    step_times = [one._replace(own_seconds=2.0) if one.rank == 5 else one for one in gang(4, {})]
    assert [one.member for one in find_stragglers(step_times, NOW)] == [2]


def test_an_unfinished_window_changes_nothing():
    step_times = gang(4, {1: set(WINDOWS)})
    early = [one for one in step_times if one.window < NOW - 1 or one.member in (0, 2)]
    assert [one.member for one in find_stragglers(early, NOW)] == [1]


def test_uneven_ranks_are_no_stragglers():
    assert find_stragglers(gang(16, {}, noise=0.3, seed=3), NOW) == []
