"""The program dies at every single call to storage, before and after it takes effect; nothing is ever lost.

A run is cut off at its n-th call for every n there is. A new attempt then goes
on, as the plugin would open it. This covers the places between writes that no
failpoint names.
"""

import contextlib

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session, state_at

from tiphys.checkpoint.save import commit_policy as commits
from tiphys.checkpoint.save.commit import commit_checkpoint
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import checkpoint_fault
from tiphys.store import LineageLayout, read_step_attempts

STEPS = 4
"""From the third on, when a checkpoint expires, all steps make the same calls."""
MORE = STEPS + 2
"""Steps of the attempt that survives: more, so that it commits and cleans up wherever it starts."""

KEEP = 2
LAYOUT = LineageLayout(LINEAGE)


class ProcessDied(BaseException):
    """Unlike an error, nothing in the program may handle it."""


class DyingStore(MemoryStore):
    """Dies at the n-th call, with or without its effect. Shares its objects with what survives."""

    def __init__(self, objects: dict[str, bytes], dies_at: int | None, after_effect: bool) -> None:
        super().__init__()
        self.objects = objects
        self.calls = 0
        self._dies_at = dies_at
        self._after_effect = after_effect

    def create(self, key, data, *, sha256=None):
        self._count(lambda: super(DyingStore, self).create(key, data))

    def delete(self, key):
        self._count(lambda: super(DyingStore, self).delete(key))

    def read(self, key):
        return self._count(lambda: super(DyingStore, self).read(key))

    def list(self, prefix):
        return self._count(lambda: iter(tuple(super(DyingStore, self).list(prefix))))

    def _count(self, call):
        self.calls += 1
        if self.calls == self._dies_at and not self._after_effect:
            raise ProcessDied
        result = call()
        if self.calls == self._dies_at:
            raise ProcessDied
        return result


def run_attempt(store, number, acknowledged, steps=STEPS):
    """Open an attempt where the choice says and train; note what was acknowledged, answer where it started."""
    safe = MemoryStore()
    safe.objects = store.objects
    if number > 1:
        write_end(safe, end_of(number - 1))
    choice = choose_checkpoint(safe, LINEAGE, read_step_attempts(safe, RUN, STEP))
    write_claim(safe, claim_of(number, choice.checkpoint))
    with open_session(store, number, resume_from=choice.checkpoint, keep_last=KEEP, admit=False) as session:
        state = session.restore(default=state_at(0))
        started = state["step"]
        for step in range(started + 1, steps + 1):
            if (save := session.step(step, state_at(step))) and save.wait():
                acknowledged.append(step)
    return started


def calls_of_a_whole_run():
    store = DyingStore({}, None, False)
    run_attempt(store, 1, [])
    return store.calls


def die_at_every_call(after_effect):
    total = calls_of_a_whole_run()
    assert total > 50
    for number in range(1, total + 1):
        objects: dict[str, bytes] = {}
        acknowledged: list[int] = []
        with pytest.raises(ProcessDied):
            run_attempt(DyingStore(objects, number, after_effect), 1, acknowledged)
        best, where = max(acknowledged, default=0), f"died at call {number} of {total}"
        assert torn(objects) == [], where
        assert run_attempt(DyingStore(objects, None, False), 2, [], MORE) >= best, where
        check(objects, where)


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_death_at_any_call_loses_no_acknowledged_checkpoint(after_effect):
    die_at_every_call(after_effect)


def test_the_checker_notices_a_commit_before_its_shards(monkeypatch):
    """Planted bug: the same trials must fail when the manifest is written first."""

    def manifest_first(store, draft, packed, check_fence, uploads):
        missing = MemoryStore()
        manifest = commit_checkpoint(missing, draft, packed, check_fence)
        for key in sorted(missing.objects):  # manifests/ sorts before shards/
            store.create(key, missing.objects[key])
        return manifest

    monkeypatch.setattr(commits, "commit_checkpoint", manifest_first)
    with pytest.raises(AssertionError, match="died at call"):
        die_at_every_call(after_effect=True)


@pytest.mark.heavy
@pytest.mark.parametrize("after_effect", [False, True])
def test_a_second_death_in_a_row_loses_no_acknowledged_checkpoint(after_effect):
    """The second attempt dies too, at calls spread over its life; retention of both may be half done."""
    total = calls_of_a_whole_run()
    for first in range(5, total + 1, 4):
        for second in range(1, total, 3):
            objects: dict[str, bytes] = {}
            acknowledged: list[int] = []
            with pytest.raises(ProcessDied):
                run_attempt(DyingStore(objects, first, after_effect), 1, acknowledged)
            with contextlib.suppress(ProcessDied):
                run_attempt(DyingStore(objects, second, after_effect), 2, acknowledged)
            best, where = max(acknowledged, default=0), f"died at {first}, then {second}"
            assert torn(objects) == [], where
            assert run_attempt(DyingStore(objects, None, False), 3, [], MORE) >= best, where
            check(objects, where)


def torn(objects):
    """Checkpoints whose manifest stands although they are not whole; there must be none at any moment."""
    store = MemoryStore(objects)
    return [fault for ref in list_commits(store, LINEAGE) if (fault := checkpoint_fault(store, ref))]


def check(objects, where):
    """Once a run has gone on, all that is left is whole, uncondemned, and complete with its manifest."""
    store = MemoryStore(objects)
    commits = list_commits(store, LINEAGE)
    assert commits, where
    assert torn(objects) == [], where
    assert list_quarantined(store, LINEAGE) == set(), where
    assert commits[0].global_step == MORE, where
    assert {LAYOUT.parse_shard(info.key) for info in store.list(LAYOUT.all_shards)} == set(commits), where
    assert list(store.list(LAYOUT.all_tombstones)) == [], where
