"""What a program writes below ``data/`` costs it that object, and the run goes on.

| a program writes | plan, resume, lineage | cost |
|---|---|---|
| a quarantine record that is none, or of another checkpoint | go on, with the reason | that checkpoint |
| manifests that name each other as restored | end | the hint where the attempt began |
"""

import json

import pytest
from support.lineage import LINEAGE, RUN, attempts_of, claim_of, commit, ref, write_claim, write_run
from support.memory import MemoryStore

from tiphys.lineage import CheckpointStatus, read_lineage_tree
from tiphys.lineage.fork_history import choose_start_checkpoint
from tiphys.lineage.quarantine import quarantine_checkpoint, read_quarantine_records
from tiphys.lineage.select import choose_checkpoint, infer_starts_from_volume
from tiphys.lineage.timeline import read_timeline
from tiphys.records import QuarantineRecord
from tiphys.store import LineageLayout

LAYOUT = LineageLayout(LINEAGE)
QUARANTINE = LAYOUT.quarantined(1, 20)
GARBAGE = {
    "empty": b"",
    "text": "Grüße".encode("latin-1"),
    "deep": b'{"checkpoint": ' + b"[" * 100_000,
    "large": b'{"reason": "' + b"x" * 5_000_000 + b'"}',
    "digits": b'{"version": ' + b"9" * 5_000 + b"}",
    "later": b'{"version": 99, "nonce": "n", "written_at": "2026-05-04T11:00:00.000Z"}',
    "of another": QuarantineRecord(checkpoint=ref(1, 10), reason="bit rot", by="ana").to_bytes(),
    "of another run": QuarantineRecord(checkpoint=ref(1, 20, "other/fit"), reason="bit rot", by="ana").to_bytes(),
}


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    commit(store, ref(1, 20))
    return store


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_quarantine_record_that_is_none_costs_its_checkpoint_alone(body: bytes, store: MemoryStore) -> None:
    store.objects[QUARANTINE] = body

    for choice in (
        choose_checkpoint(store, LINEAGE, attempts_of(None)),
        choose_start_checkpoint(store, RUN, "fit", attempts_of(None)),
    ):
        assert choice.checkpoint == ref(1, 10)
        assert [skip.checkpoint for skip in choice.skipped] == [ref(1, 20)]
        assert QUARANTINE in choice.skipped[0].reason
    (lineage,) = read_lineage_tree(store, RUN).steps
    nodes = lineage.attempts[0].checkpoints
    assert [node.status for node in nodes] == [CheckpointStatus.COMMITTED, CheckpointStatus.QUARANTINED]
    assert [QUARANTINE in node.reason for node in nodes] == [False, True]
    assert len(read_timeline(store, RUN)) >= 4
    quarantine_checkpoint(store, ref(1, 20), "it crashes", by="settle")
    assert store.objects[QUARANTINE] == body


def test_good_quarantine_records_are_read_beside_a_bad_one(store: MemoryStore) -> None:
    store.objects[QUARANTINE] = b"garbage"
    quarantine_checkpoint(store, ref(1, 10), "bit rot", by="ana")

    records = read_quarantine_records(store, LINEAGE)

    assert {one: isinstance(record, str) for one, record in records.items()} == {ref(1, 10): False, ref(1, 20): True}


def test_a_circle_of_manifests_ends() -> None:
    store = MemoryStore()
    for step, restored in ((10, 20), (20, 10)):
        commit(store, ref(1, step), restored=ref(1, restored))
    commit(store, ref(2, 30), restored=ref(2, 30))

    assert json.dumps(sorted(infer_starts_from_volume(store, LINEAGE, [1, 2, 3]))) == "[1, 2, 3]"
