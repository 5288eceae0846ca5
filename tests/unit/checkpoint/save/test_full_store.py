"""A store that is full: what has expired goes at once, what is kept stays, and the save follows.

| in the full store | afterwards |
|---|---|
| checkpoints that expired, in their delay | removed, and the save is committed |
| shards of failed saves of this attempt | likewise |
| pinned, quarantined, restored and kept checkpoints | stay |
| nothing that expired | the save fails, and says so |
"""

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, claim_of, ref, write_claim
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.tracked_session import TrackedSession
from tiphys.errors import FencedError, StoreFullError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.retention.policy import pin_checkpoint, unpin_checkpoint
from tiphys.lineage.select import list_commits
from tiphys.store import LineageLayout

LAYOUT = LineageLayout(LINEAGE)
WEIGHT_BYTES = 80_000
DELAY = 600


class SmallStore(MemoryStore):
    """Room for ``checkpoints`` of them. A ``strict`` one takes nothing more once it was full, until a deletion."""

    def __init__(self, checkpoints: int, *, strict: bool) -> None:
        super().__init__()
        self.capacity, self.strict = round((checkpoints + 0.5) * WEIGHT_BYTES), strict
        self.is_full = False

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        used = sum(map(len, self.objects.values()))
        self.is_full = (self.is_full and self.strict) or used + len(data) > self.capacity
        if self.is_full:
            raise StoreFullError(f"cannot write {key}: the disk or its quota is full")
        super().create(key, data, sha256=sha256)

    def delete(self, key: str) -> None:
        self.is_full = self.is_full and key not in self.objects
        super().delete(key)


def save(session: TrackedSession, *steps: int) -> None:
    for step in steps:
        session.save(step, {"schritt": step, "w": np.full(WEIGHT_BYTES // 8, float(step))})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_full_store_is_emptied_of_what_expired_and_then_saved_to(strict: bool, is_asynchronous: bool, capsys):
    store = SmallStore(3, strict=strict)
    with open_session(store, keep_last=1, delay_seconds=DELAY, asynchronous=is_asynchronous) as session:
        for step in range(1, 10):
            save(session, step)
            assert session.flush() == ref(1, step)
        assert session.failed_saves == 0
    assert "the store is full, so" in capsys.readouterr().err


@pytest.mark.parametrize("strict", [False, True])
def test_kept_checkpoints_stay_in_a_full_store(strict: bool):
    store = SmallStore(6, strict=strict)
    with open_session(store, keep_last=2, delay_seconds=DELAY) as session:
        save(session, 1)
    with open_session(store, 2, resume_from=ref(1, 1), keep_last=2, delay_seconds=DELAY) as session:
        session.restore({"schritt": 0, "w": np.zeros(1)})
        save(session, 2, 3)
        pin_checkpoint(store, ref(2, 2), "keep-me")
        quarantine_checkpoint(store, ref(2, 3), "its readers crash", by="test")
        save(session, 4, 5, 6, 7, 8)
        assert session.failed_saves == 0
    kept = {
        ref(1, 1): "restored",
        ref(2, 2): "pinned",
        ref(2, 3): "quarantined",
        ref(2, 7): "newest",
        ref(2, 8): "newest",
    }
    assert set(list_commits(store, LINEAGE)) - {ref(2, 6)} == kept.keys(), "step 6 expired when there was room again"


def test_shards_of_failed_saves_make_room(capsys):
    store = SmallStore(4, strict=True)
    with open_session(store, keep_last=3, delay_seconds=DELAY) as session:
        save(session, 1, 2)
        abandoned = LAYOUT.shard(1, 3, 0, "0" * 64, ".safetensors")
        store.create(abandoned, bytes(2 * WEIGHT_BYTES))
        save(session, 4)
        assert (session.failed_saves, session.last_committed) == (0, ref(1, 4))
    assert abandoned not in store.objects


def test_mark_of_any_expired_checkpoint_makes_room_to_delete_the_first():
    store = SmallStore(3, strict=True)
    with open_session(store, keep_last=1, delay_seconds=DELAY) as session:
        save(session, 1)
        pin_checkpoint(store, ref(1, 1), "release")
        save(session, 2, 3)
        unpin_checkpoint(store, ref(1, 1), "release")
        save(session, 4)
        assert session.failed_saves == 0
    assert list_commits(store, LINEAGE)[0] == ref(1, 4)


def test_save_without_room_says_that_nothing_expired(capsys):
    store = SmallStore(3, strict=False)
    with open_session(store, keep_last=3, delay_seconds=DELAY) as session:
        save(session, 1, 2, 3, 4)
        assert session.failed_saves == 1
    assert list_commits(store, LINEAGE) == [ref(1, 3), ref(1, 2), ref(1, 1)]
    assert "is full; nothing in it that this training keeps has expired" in capsys.readouterr().err


def test_replaced_attempt_removes_nothing_from_a_full_store():
    store = SmallStore(3, strict=False)
    with pytest.raises(SystemExit), open_session(store, keep_last=1, delay_seconds=DELAY) as session:
        save(session, 1, 2, 3)
        write_claim(store, claim_of(2, ref(1, 3)))
        with pytest.raises(FencedError):
            save(session, 4)
        assert list_commits(store, LINEAGE) == [ref(1, 3), ref(1, 2), ref(1, 1)]
        save(session, 5)


def test_failure_of_a_writer_with_tries_of_its_own_makes_room_for_the_next_one():
    store = SmallStore(3, strict=True)
    with open_session(store, keep_last=1, delay_seconds=DELAY) as session:
        save(session, 1, 2, 3)
        session._committer.on_failed(4, StoreFullError("cannot write shard 4: the quota is full"))
        assert list_commits(store, LINEAGE) == [ref(1, 3)]
