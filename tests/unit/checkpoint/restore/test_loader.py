"""Reading checkpoints: what it asks of storage, what it believes, and what a node keeps of it."""

import hashlib
import os
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, claim_of, end_of, ref, write_claim, write_end
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import newest_shards, open_session, state_at, train

from tiphys.checkpoint.restore import shard_reader
from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.checkpoint.restore.shard_reader import LoadStoppedError, NodeCache
from tiphys.checkpoint.state.shards import plan_shards
from tiphys.store import LineageLayout

RETAINED = 1000


def load(store, loader=None, step=3):
    loader = loader or CheckpointLoader(store)
    return loader.load(loader.read_manifest(ref(1, step)), state_at(0))


def test_the_choice_among_a_thousand_checkpoints_asks_storage_four_times(store):
    """One listing for the fence, one of the quarantine, one of the manifests, and one manifest."""
    train(store, 1)
    manifest = store.objects[LineageLayout(LINEAGE).manifest(1, 1)]
    for step in range(2, RETAINED + 1):  # only the newest is ever read
        store.objects[LineageLayout(LINEAGE).manifest(1, step)] = manifest
    with open_session(store) as session:
        session.save(RETAINED + 1, state_at(RETAINED + 1))
    write_end(store, end_of(1))
    newest = ref(1, RETAINED + 1)
    write_claim(store, claim_of(2, newest))
    counting = CountingStore(store)
    session = open_session(counting, 2, resume_from=newest, admit=False)
    events, shards = 2, len(newest_shards(store, 1, RETAINED + 1))
    assert session.restore(default=state_at(0))["step"] == RETAINED + 1
    asked = sum(counting.requests.values()) - shards - events
    assert asked == 4, counting.requests


def test_shards_are_read_by_several_threads_and_put_where_they_belong(store, monkeypatch):
    from tiphys.checkpoint.save import passed_states

    state = {f"layer{n}": np.arange(1000, dtype=np.float32) * n for n in range(20)}
    monkeypatch.setattr(passed_states, "plan_shards", lambda flat: plan_shards(flat, shard_bytes=1500))
    with open_session(store) as session:
        session.save(3, state)
    readers, another = set(), threading.Event()

    class Watching(MemoryStore):
        def chunks(self, key, size_bytes=8 << 20):
            if not key.endswith(".json"):  # the document, which is read before
                readers.add(threading.get_ident())
                if len(readers) > 1:
                    another.set()
                another.wait(60)
            yield from super().chunks(key, size_bytes)

    watching = Watching(store.objects)
    loader = CheckpointLoader(watching, threads=4)
    back = loader.load(loader.read_manifest(ref(1, 3)))
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)
    assert len(readers) > 1


def test_a_shard_is_hashed_while_the_next_one_is_read(store, monkeypatch):
    from tiphys.checkpoint.save import passed_states

    state = {f"layer{n}": np.arange(1000, dtype=np.float32) * n for n in range(4)}
    monkeypatch.setattr(passed_states, "plan_shards", lambda flat: plan_shards(flat, shard_bytes=1500))
    with open_session(store) as session:
        session.save(3, state)
    begun, second_read, overlaps = set(), threading.Event(), []

    class Watching(MemoryStore):
        def chunks(self, key, size_bytes=8 << 20):
            if not key.endswith(".json"):  # the document, which is read before
                begun.add(key)
            if len(begun) > 1:
                second_read.set()
            yield from super().chunks(key, size_bytes)

    class Digest:
        def __init__(self):
            self._digest = hashlib.sha256()
            self.hexdigest = self._digest.hexdigest

        def update(self, piece):
            if begun:
                overlaps.append(second_read.wait(120))
            self._digest.update(piece)

    monkeypatch.setattr(shard_reader, "hashlib", Mock(spec=hashlib, sha256=Digest))
    loader = CheckpointLoader(Watching(store.objects), threads=2)
    restored = loader.load(loader.read_manifest(ref(1, 3)))
    assert overlaps
    assert all(overlaps), "the second shard was read only after the first was hashed"
    assert all((restored[name] == array).all() for name, array in state.items())


def test_a_program_asked_to_stop_reads_no_further_shard(store):
    train(store, 3)
    with pytest.raises(LoadStoppedError):
        load(store, CheckpointLoader(store, should_stop=lambda: True))


def test_a_shard_in_the_cache_of_the_node_is_not_fetched_again(store, tmp_path):
    train(store, 3)
    cache = NodeCache(tmp_path / "cache")
    load(store, CheckpointLoader(store, cache=cache))
    store.refuses = lambda operation, key: "shards/" in key
    assert load(store, CheckpointLoader(store, cache=NodeCache(tmp_path / "cache")))["step"] == 3


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "flipped"])
def test_a_damaged_file_in_the_cache_is_fetched_again_and_mended(store, tmp_path, damage, capsys):
    train(store, 3)
    folder = tmp_path / "cache"
    load(store, CheckpointLoader(store, cache=NodeCache(folder)))
    kept = {path: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}
    assert len(kept) == 2
    for path, content in kept.items():
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:] if damage is None else damage)
    np.testing.assert_array_equal(
        load(store, CheckpointLoader(store, cache=NodeCache(folder)))["weights"], state_at(3)["weights"]
    )
    assert {path: path.read_bytes() for path in kept} == kept
    if damage is None:
        assert "does not match the hash in its name" in capsys.readouterr().err


def test_the_cache_of_the_node_gets_what_is_committed(store, tmp_path):
    with open_session(store, cache=tmp_path / "cache") as session:
        session.save(3, state_at(3))
    counting = CountingStore(store)
    assert load(counting, CheckpointLoader(counting, cache=NodeCache(tmp_path / "cache")))["step"] == 3
    assert counting.requests["read"] == 1  # of the manifest


def test_the_cache_of_the_node_gets_a_shard_once_however_often_it_is_saved(store, tmp_path):
    frozen, files = np.arange(1000), []
    with open_session(store, cache=tmp_path) as session:
        for step in (1, 2):
            session.save(step, {"step": step, "weights": frozen})
            files += [(path.name, path.stat().st_ino) for path in tmp_path.iterdir() if path.stat().st_size > 4000]
    assert len(files) == 2
    assert len(set(files)) == 1


def test_the_cache_of_the_node_gets_nothing_after_sigterm(store, tmp_path):
    with open_session(store, cache=tmp_path / "cache", grace_seconds=30) as session, pytest.raises(SystemExit):
        session._stop.request()
        session.step(3, state_at(3))
    assert load(store)["step"] == 3
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_only_spares_the_ranks_of_a_node_a_download_gets_nothing_from_saves(store, tmp_path):
    with open_session(store, cache=tmp_path / "cache", fills_cache=False) as session:
        session.save(3, state_at(3))
    assert not (tmp_path / "cache").exists()


def test_a_cache_on_a_full_disk_does_not_fail_a_save(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with open_session(store, cache=tmp_path / "cache") as session:
        assert session.save(3, state_at(3)).wait()
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(store, tmp_path, capsys):
    train(store, 3)
    (tmp_path / "file").write_text("in the way")
    loader = CheckpointLoader(store, cache=NodeCache(tmp_path / "file" / "cache"))
    assert load(store, loader)["step"] == 3
    assert capsys.readouterr().err.count("cannot be used") == 1


def test_a_full_disk_under_the_cache_costs_time_and_nothing_else(store, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    train(store, 3)
    monkeypatch.setattr(os, "replace", full)
    assert load(store, CheckpointLoader(store, cache=NodeCache(tmp_path / "cache")))["step"] == 3
    assert "No space left on device" in capsys.readouterr().err
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".tmp"] == []


def test_the_cache_keeps_what_was_just_read_and_forgets_the_oldest(store, tmp_path):
    train(store, 3)
    folder = tmp_path / "cache"
    for step in (1, 2, 3):
        load(store, CheckpointLoader(store, cache=NodeCache(folder, limit_bytes=0)), step)
    loader = CheckpointLoader(store)
    kept = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert kept == {shard.sha256 for shard in loader.read_manifest(ref(1, 3)).shards}


def test_processes_of_a_node_fetch_a_shard_once(store, tmp_path):
    """The second waits for the first, as the lock is of the file and not of the object."""
    train(store, 3)
    counting = CountingStore(store)
    folder = tmp_path / "cache"
    loaders = [CheckpointLoader(counting, cache=NodeCache(folder), threads=1) for _ in range(4)]
    threads = [threading.Thread(target=load, args=(counting, loader)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.requests["read"] == 4 + 2  # each its manifest, and two shards once
