"""What a program writes below ``data/`` costs it that object, and the run goes on.

| a program writes | plan, resume, lineage | cost |
|---|---|---|
| a quarantine record that is none, or of another checkpoint | go on, with the reason | that checkpoint |
| manifests that name each other as restored | end | the hint where the attempt began |
| an index of files that names places outside, chains of links, odd types or sizes | go on before it | that checkpoint |
"""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, attempts_of, claim_of, commit, ref, write_claim, write_run
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.exec.restore import restore_files
from tiphys.checkpoint.restore.shard_reader import ShardReader
from tiphys.errors import IntegrityError
from tiphys.lineage.fork_history import choose_start_checkpoint
from tiphys.lineage.quarantine import quarantine_checkpoint, read_quarantine_records
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import choose_checkpoint, infer_starts_from_volume
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree
from tiphys.records import QuarantineRecord, Shard
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
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    nodes = lineage.attempts[0].checkpoints
    assert [node.status for node in nodes] == [CheckpointStatus.COMMITTED, CheckpointStatus.QUARANTINED]
    assert [QUARANTINE in node.reason for node in nodes] == [False, True]
    assert len(read_timeline(RunHistory.for_display(store, RUN))) >= 4
    quarantine_checkpoint(store, ref(1, 20), "it crashes", by="conclude")
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


def index_of(*rows: dict, **fields: object) -> bytes:
    plain = [{"kind": "file", "mode": 0o644, "size": 1, "modified_ns": 1, **row} for row in rows]
    roots = [row["path"] for row in rows if "/" not in str(row.get("path", "/"))]
    return json.dumps({"format": 2, "roots": roots, "shard_bytes": 10, "entries": plain, **fields}).encode()


FORGED = {
    "link chain": index_of(
        {"path": "d", "kind": "folder"},
        {"path": "d/up", "kind": "link", "target": ".."},
        {"path": "out", "kind": "link", "target": "d/up/../.."},
    ),
    "long link chain": index_of({"path": "ä", "kind": "link", "target": "ü/ö/../../.."}),
    "link without a target": index_of({"path": "l", "kind": "link", "target": ""}),
    "link to a number": index_of({"path": "l", "kind": "link", "target": 7}),
    "link to a null byte": index_of({"path": "l", "kind": "link", "target": "a\0b"}),
    "below a link": index_of({"path": "l", "kind": "link", "target": "d"}, {"path": "l/x"}),
    "root outside": index_of({"path": "x"}, roots=["../x"]),
    "root absolute": index_of({"path": "x"}, roots=["/etc"]),
    "root of no entry": index_of({"path": "x"}, roots=["x", "y"]),
    "root twice": index_of({"path": "x"}, roots=["x", "x"]),
    "root below a root": index_of({"path": "x", "kind": "folder"}, {"path": "x/y"}, roots=["x", "x/y"]),
    "roots are a text": index_of({"path": "x"}, roots="x"),
    "roots are a number": index_of({"path": "x"}, roots=7),
    "root is a list": index_of({"path": "x"}, roots=[["x"]]),
    "entry below no root": index_of({"path": "x"}, {"path": "y"}, roots=["x"]),
    "the folder of Tiphys": index_of({"path": ".tiphys-restore", "kind": "folder"}),
    "path twice": index_of({"path": "x"}, {"path": "x"}, roots=["x"]),
    "path is a number": index_of({"path": 7}, roots=[]),
    "path is a surrogate": index_of({"path": "\ud800"}),
    "path is long": index_of({"path": "ä" * 200}),
    "null byte": index_of({"path": "a\0b"}),
    "kind": index_of({"path": "x", "kind": "device"}),
    "kind is a list": index_of({"path": "x", "kind": []}),
    "mode": index_of({"path": "x", "mode": 1 << 20}),
    "mode is a text": index_of({"path": "x", "mode": "0644"}),
    "huge size": index_of({"path": "x", "size": 10**15}),
    "size is a float": index_of({"path": "x", "size": 1e15}, shard_bytes=10**15),
    "size without end": index_of({"path": "x", "size": 10**30}, shard_bytes=10**30),
    "size is negative": index_of({"path": "x", "size": -1}),
    "size is true": index_of({"path": "x", "size": True}),
    "time": index_of({"path": "x", "modified_ns": 10**30}),
    "time is a float": index_of({"path": "x", "modified_ns": 0.5}),
    "no bytes in a shard": index_of({"path": "x"}, shard_bytes=0),
    "negative bytes in a shard": index_of({"path": "x"}, shard_bytes=-5),
    "format is a text": index_of({"path": "x"}, format="3"),
    "entries are a number": index_of(entries=7),
    "row is a text": index_of(entries=["x"]),
    "row is empty": index_of(entries=[{}]),
    "list": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "digits": b'{"format": 2, "shard_bytes": ' + b"9" * 5_000 + b"}",
    "bytes": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("document", FORGED.values(), ids=FORGED.keys())
def test_a_forged_index_of_a_folder_is_damage_and_changes_nothing(document: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "trainer" / "folder"
    folder.mkdir(parents=True)
    (folder / "x").write_text("kept")
    (folder.parent / "x").write_text("kept, too")
    store = MemoryStore()
    manifest = commit(store, ref(1, 10), data=(document, b"1"))

    with pytest.raises(IntegrityError, match="index"):
        restore_files(store, manifest, folder, lambda: None)

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "trainer", "x", "x"]
    assert (folder / "x").read_text() == "kept"


def test_a_size_that_the_shards_do_not_have_reserves_no_memory(tmp_path: Path) -> None:
    store = MemoryStore()
    document = index_of({"path": "x", "size": 10**15}, shard_bytes=10**14)
    manifest = commit(store, ref(1, 10), data=(document, b"1"))
    large = manifest.model_copy(update={"shards": (Shard(**{**manifest.shards[0].model_dump(), "size": 10**15}),)})
    tracemalloc.start()
    try:
        for forged in (manifest, large):
            with pytest.raises(IntegrityError):
                restore_files(store, forged, tmp_path, lambda: None)
        with pytest.raises(IntegrityError, match="1,000,000,000,000,000 bytes"):
            ShardReader(store).read(large.shards[0])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("blocked", ["steps", "steps/7", "steps/7/model.bin", ".tiphys-restore", ".tiphys-set-aside"])
def test_a_link_in_the_folder_is_moved_aside_and_not_followed(blocked: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    (outside / "7").mkdir(parents=True)
    (outside / "7" / "model.bin").write_bytes(b"victim")
    (folder / blocked).parent.mkdir(parents=True)
    (folder / blocked).symlink_to(outside if "." not in blocked[1:] else outside / "7" / "model.bin")
    before = sorted(outside.rglob("*"))
    store = MemoryStore()
    rows = [{"path": "steps", "kind": "folder", "mode": 0o755}, {"path": "steps/7", "kind": "folder", "mode": 0o755}]
    document = index_of(*rows, {"path": "steps/7/model.bin", "size": 5}, roots=["steps/7"])
    manifest = commit(store, ref(1, 10), data=(document, b"bytes"))

    restore_files(store, manifest, folder, lambda: None)

    assert (folder / "steps" / "7" / "model.bin").read_bytes() == b"bytes"
    assert not (folder / "steps").is_symlink()
    assert (outside / "7" / "model.bin").read_bytes() == b"victim"
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("blocked", [".tiphys-restore", ".tiphys-set-aside"])
def test_a_pipe_under_the_name_of_a_folder_of_tiphys_hinders_no_restore(blocked: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / blocked)
    store = MemoryStore()
    manifest = commit(store, ref(1, 10), data=(index_of({"path": "model.bin", "size": 5}), b"bytes"))
    restore_files(store, manifest, tmp_path, lambda: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]
