"""Laws of the choice of a checkpoint, over random histories of attempts.

A history is played as it happens: an attempt commits while it lives, the next
one starts from what is chosen at that moment, and any dead attempt may still
commit late. Late commits are known by construction, not by the code under test.

Listings are read only as far as the choice needs. A reference that reads all of them must choose the same.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from support.builders.lineage import LINEAGE, RUN, STEP, attempts_of, claim_of, commit, ref, write_claim
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.select import choose_checkpoint, order_candidates
from tiphys.protocol import environment
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout


@dataclass
class History:
    starts: dict[int, CheckpointRef | None] = field(default_factory=dict)
    live: list[CheckpointRef] = field(default_factory=list)
    late: list[CheckpointRef] = field(default_factory=list)
    barred: set[CheckpointRef] = field(default_factory=set)

    @property
    def commits(self) -> list[CheckpointRef]:
        return self.live + self.late

    def candidates(self) -> list[CheckpointRef]:
        return [c for c in order_candidates(self.commits, LINEAGE, self.starts) if c not in self.barred]

    def reached(self, attempt: int) -> int:
        """The last step that an attempt has come to."""
        start = self.starts[attempt]
        own = [c.global_step for c in self.commits if c.attempt == attempt]
        return max(own, default=start.global_step if start else 0)


ACTIONS = st.lists(
    st.one_of(
        st.just(("start", 0)),
        st.tuples(st.just("commit"), st.integers(1, 5)),
        st.tuples(st.just("late"), st.integers(0, 10)),
        st.tuples(st.just("quarantine"), st.integers(0, 10)),
    ),
    max_size=40,
)


def play(actions: list[tuple[str, int]]) -> History:
    history = History({1: None})
    for action, number in actions:
        newest = max(history.starts)
        if action == "start":
            best = history.candidates()
            history.starts[newest + 1] = best[0] if best else None
        elif action == "commit":
            history.live.append(ref(newest, history.reached(newest) + number))
        elif action == "late" and newest > 1:
            dead = 1 + number % (newest - 1)
            history.late.append(ref(dead, history.reached(dead) + 1))
        elif action == "quarantine" and history.live:
            history.barred.add(history.live[number % len(history.live)])
    return history


@given(ACTIONS)
def test_late_commits_are_never_candidates(actions):
    history = play(actions)
    assert not set(history.candidates()) & set(history.late)


@given(ACTIONS)
def test_candidates_go_back_in_attempts_and_in_steps(actions):
    """Each candidate is an ancestor of the one before it, so falling back never mixes two branches."""
    candidates = play(actions).candidates()
    assert candidates == sorted(candidates, key=lambda c: (-c.attempt, -c.global_step))
    assert [c.global_step for c in candidates] == sorted((c.global_step for c in candidates), reverse=True)
    assert len(set(candidates)) == len(candidates)


@given(ACTIONS)
def test_a_commit_of_the_newest_attempt_is_chosen_at_once(actions):
    history = play(actions)
    newest = max(history.starts)
    made = ref(newest, history.reached(newest) + 1)
    before = history.candidates()
    history.live.append(made)
    assert history.candidates() == [made, *before]


@given(ACTIONS, st.integers(0, 10))
def test_barring_a_checkpoint_removes_that_one_and_no_other(actions, index):
    history = play(actions)
    before = history.candidates()
    if before:
        barred = before[index % len(before)]
        history.barred.add(barred)
        assert history.candidates() == [c for c in before if c != barred]


@given(ACTIONS)
def test_an_acknowledged_checkpoint_is_reachable_unless_barred_or_left_behind(actions):
    """The newest live commit of the newest attempt, or else what that attempt started from, is always first."""
    history = play(actions)
    newest = max(history.starts)
    own = [c for c in history.live if c.attempt == newest and c not in history.barred]
    start = history.starts[newest]
    expected = max(own, key=lambda c: c.global_step) if own else start
    if expected is not None and expected not in history.barred:
        assert history.candidates()[0] == expected


REFS = st.builds(ref, st.integers(1, 4), st.integers(1, 6))
STARTS = st.lists(st.none() | REFS | st.just(ref(1, 3, "other/fit")), max_size=4)
"""Also such as no history has: a start that nobody committed, a circle, another lineage."""


def every_candidate(commits: set[CheckpointRef], starts: dict[int, CheckpointRef | None]) -> list[CheckpointRef]:
    """The candidates, from a listing of all commits."""
    found: list[CheckpointRef] = []
    attempt, ceiling = max(starts, default=0), float("inf")
    while True:
        own = [commit for commit in commits if commit.attempt == attempt and commit.global_step <= ceiling]
        found += sorted(own, key=lambda commit: -commit.global_step)
        start = starts.get(attempt)
        if start is None or start.lineage != LINEAGE or start.attempt >= attempt:
            return found
        attempt, ceiling = start.attempt, start.global_step


def store_of(commits: set[CheckpointRef], quarantined: set[CheckpointRef], incomplete: set[CheckpointRef]):
    store = MemoryStore()
    for made in commits:
        manifest = commit(store, made)
        if made in incomplete:
            store.delete(manifest.shards[0].key)
    for barred in quarantined:
        quarantine_checkpoint(store, barred, "poison", "ana")
    for folder in (LineageLayout(LINEAGE).manifests, LineageLayout(LINEAGE).all_quarantined):
        store.create(f"{folder}README", b"no checkpoint")
    return store


@given(st.sets(REFS), st.sets(REFS), st.sets(REFS), STARTS)
def test_choice_is_that_of_a_full_listing(commits, quarantined, incomplete, starts):
    candidates = every_candidate(commits, dict(enumerate(starts, 1)))
    usable = [candidate not in quarantined | incomplete for candidate in candidates]
    first = usable.index(True) if any(usable) else len(candidates)
    choice = choose_checkpoint(store_of(commits, quarantined, incomplete), LINEAGE, attempts_of(*starts))
    assert choice.checkpoint == next(iter(candidates[first:]), None)
    assert [skip.checkpoint for skip in choice.skipped] == candidates[:first]
    reasons = ["quarantined by ana" if skip.checkpoint in quarantined else "is missing" for skip in choice.skipped]
    assert all(reason in skip.reason for reason, skip in zip(reasons, choice.skipped, strict=True))


@given(st.sets(REFS), st.sets(REFS), st.lists(st.none() | REFS, min_size=1, max_size=4))
def test_restored_candidates_are_those_of_full_listings(commits, quarantined, starts):
    """First what the plugin has chosen and what is older of its attempt, then by the claims of all attempts."""
    store, newest = store_of(commits, quarantined, set()), len(starts)
    for attempt, start in enumerate(starts, 1):
        write_claim(store, claim_of(attempt, start))
    settings = CheckpointSettings.from_environment(
        {
            environment.STORE: "file:///unused",
            environment.RUN: RUN,
            environment.STEP: STEP,
            environment.ATTEMPT: str(newest),
            environment.LINEAGE: LINEAGE,
            environment.RESUME_FROM: starts[-1].relative_to(LINEAGE) if starts[-1] else "",
        }
    )
    assert settings is not None
    chosen = every_candidate(commits, {newest: starts[-1]})
    claimed = every_candidate(commits, dict(enumerate(starts, 1)))
    expected = [found for found in dict.fromkeys([*chosen, *claimed]) if found not in quarantined]
    assert list(RestoreCandidates(settings, store, store).iter_newest_first()) == expected
