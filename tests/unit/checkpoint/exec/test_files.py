"""From files to shards and back: exact bytes, names, modes and times, or an error that names what is in the way."""

import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, START_TIMES, ref
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.exec import files, restore
from tiphys.checkpoint.exec.files import (
    FileChangedError,
    build_shards,
    check_unchanged,
    copy_small_files,
    read_index,
    scan_folder,
    split_into_spans,
)
from tiphys.checkpoint.exec.restore import SET_ASIDE_FOLDER, restore_files
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import ShardUploader, commit_checkpoint
from tiphys.errors import IntegrityError, StoreError, UsageError
from tiphys.records import CheckpointManifest

DRAFT = CheckpointManifest(
    lineage=LINEAGE, run="digits-1", step="fit", attempt=1, global_step=1, shards=(), began=START_TIMES
)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def kept(store, source, checkpoint=""):
    entries = {
        p: e
        for p, e in scan_folder(source, ()).items()
        if p == checkpoint or p.startswith(f"{checkpoint}/") or not checkpoint
    }
    roots = [checkpoint] if checkpoint else sorted({path.partition("/")[0] for path in entries})
    return commit_checkpoint(store, DRAFT, build_shards(source, roots, entries), lambda: None, ShardUploader(threads=2))


def restored(store, manifest, target, **options):
    restore_files(store, manifest, target, lambda: None, **options)


def facts(folder):
    """All that a program could tell two folders apart by, but for inodes."""
    found = {}
    for path, entry in scan_folder(folder, ()).items():
        content = (folder / path).read_bytes() if entry.kind == "file" else b""
        found[path] = (entry.kind, entry.mode, entry.size, entry.times_ns[0], entry.target, content)
    return found


def fill(folder):
    rng = random.Random(5)
    (folder / "checkpoint-3" / "empty").mkdir(parents=True)
    (folder / "checkpoint-3" / "model.bin").write_bytes(rng.randbytes(500))
    (folder / "checkpoint-3" / "nothing").write_bytes(b"")
    (folder / "checkpoint-3" / "späße €.json").write_text("{}")
    (folder / os.fsdecode(b"raw-\xff\xfe")).write_bytes(b"not UTF-8")
    (folder / "latest").symlink_to("checkpoint-3")
    (folder / "checkpoint-3" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "checkpoint-3" / "run.sh").chmod(0o755)
    (folder / "checkpoint-3" / "secret").write_bytes(b"x")
    (folder / "checkpoint-3" / "secret").chmod(0o400)
    os.utime(folder / "checkpoint-3" / "model.bin", ns=(1_600_000_000_123_456_789,) * 2)


@pytest.mark.parametrize("shard_bytes", [7, 100, 1 << 20])
def test_a_folder_comes_back_exactly(store, source, target, monkeypatch, shard_bytes):
    monkeypatch.setattr(files, "SHARD_BYTES", shard_bytes)
    fill(source)
    manifest = kept(store, source)
    restored(store, manifest, target)
    assert facts(target) == facts(source)
    assert sorted(entry.name for entry in target.iterdir()) == sorted(entry.name for entry in source.iterdir())


def test_a_folder_that_is_still_there_is_not_read_from_the_store(source, monkeypatch, capsys):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    fill(source)
    store = CountingStore(MemoryStore())
    manifest, before = kept(store, source), facts(source)
    store.requests.clear()
    restored(store, manifest, source)
    assert store.requests["read"] == 1  # the index
    count = len(manifest.shards) - 1
    assert f"{count} of {count} shards of checkpoint 1 of attempt 1 were still in {source}" in capsys.readouterr().err
    shutil.rmtree(source / SET_ASIDE_FOLDER)
    assert facts(source) == before


def test_files_that_have_changed_since_are_read_from_the_store(source, monkeypatch, capsys):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    fill(source)
    store = CountingStore(MemoryStore())
    manifest, before = kept(store, source), facts(source)
    whole = (source / "checkpoint-3" / "model.bin").read_bytes()
    with (source / "checkpoint-3" / "model.bin").open("r+b") as stream:
        stream.seek(250)
        stream.write(bytes([whole[250] ^ 1]))
    store.requests.clear()
    restored(store, manifest, source)
    assert store.requests["read"] == 2  # the index, and what holds the byte
    shutil.rmtree(source / SET_ASIDE_FOLDER)
    assert facts(source) == before


@pytest.mark.parametrize("obstacle", ["link", "pipe", "folder", "shorter", "nothing"])
def test_only_a_file_of_the_folder_itself_is_read_there(store, source, tmp_path, obstacle):
    fill(source)
    manifest, before = kept(store, source), facts(source)
    path, elsewhere = source / "checkpoint-3" / "model.bin", tmp_path / "elsewhere"
    path.rename(elsewhere)
    match obstacle:
        case "link":
            path.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "shorter":
            path.write_bytes(elsewhere.read_bytes()[:-1])
    restored(store, manifest, source)
    shutil.rmtree(source / SET_ASIDE_FOLDER)
    assert facts(source) == before


def test_the_cache_of_the_node_spares_a_new_folder_the_store(source, target, tmp_path):
    fill(source)
    store = CountingStore(MemoryStore())
    manifest = kept(store, source)
    restored(store, manifest, target, cache=NodeCache(tmp_path / "cache"))
    store.requests.clear()
    (tmp_path / "other").mkdir()
    restored(store, manifest, tmp_path / "other", cache=NodeCache(tmp_path / "cache"))
    assert store.requests["read"] == 0
    assert facts(tmp_path / "other") == facts(source)


def test_a_folder_that_may_not_be_written_comes_back_so(store, source, target):
    (source / "fixed").mkdir()
    (source / "fixed" / "a").write_bytes(b"a")
    (source / "fixed").chmod(0o555)
    try:
        restored(store, kept(store, source), target)
        assert stat.S_IMODE((target / "fixed").stat().st_mode) == 0o555
        assert facts(target) == facts(source)
    finally:
        for folder in (source, target):
            (folder / "fixed").chmod(0o755)


def test_files_of_any_size_pass_in_pieces_and_small_ones_share_them():
    pieces = list(split_into_spans({"a": 3, "b": 0, "c": 25, "d": 2}, 10))
    assert [sum(span.size for span in spans) for spans in pieces] == [10, 10, 10]
    assert pieces[0] == (("a", 0, 3), ("c", 0, 7))
    assert pieces[2] == (("c", 17, 8), ("d", 0, 2))


def test_a_file_in_the_way_is_set_aside_and_the_rest_stays(store, source, target):
    fill(source)
    manifest = kept(store, source, "checkpoint-3")
    for name in ("checkpoint-3", "checkpoint-4"):
        (target / name).mkdir()
        (target / name / "torn").write_bytes(b"half")
    (target / "log.txt").write_text("kept")
    restored(store, manifest, target, obsolete_names=["checkpoint-3", "checkpoint-4"])
    assert sorted(path.name for path in target.iterdir()) == [SET_ASIDE_FOLDER, "checkpoint-3", "log.txt"]
    assert not (target / "checkpoint-3" / "torn").exists()
    assert (target / SET_ASIDE_FOLDER / "checkpoint-4" / "torn").read_bytes() == b"half"
    restored(store, manifest, target, obsolete_names=["checkpoint-3"])
    assert sorted(path.name for path in (target / SET_ASIDE_FOLDER).iterdir()) == ["checkpoint-3"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "swap"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_shard_is_found_before_anything_takes_its_place(store, source, target, monkeypatch, damage, which):
    monkeypatch.setattr(files, "SHARD_BYTES", 300)
    fill(source)
    manifest = kept(store, source)
    (target / "checkpoint-3").write_bytes(b"what was there")
    key, other = manifest.shards[which].key, manifest.shards[which - 1].key
    data = store.objects[key]
    match damage:
        case "flip":
            store.objects[key] = bytes([data[0] ^ 1]) + data[1:]
        case "truncate":
            store.objects[key] = data[:-1]
        case "missing":
            del store.objects[key]
        case "swap":
            store.objects[key], store.objects[other] = store.objects[other], store.objects[key]
    with pytest.raises(IntegrityError):
        restored(store, manifest, target)
    assert [path.name for path in target.iterdir()] == ["checkpoint-3"]
    assert (target / "checkpoint-3").read_bytes() == b"what was there"


def test_a_folder_that_cannot_be_written_is_storage_that_fails(store, source, tmp_path):
    (source / "a").write_bytes(b"a")
    manifest = kept(store, source)
    with pytest.raises(StoreError, match="cannot be restored into"):
        restored(store, manifest, tmp_path / "none")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../b"])
def test_a_link_that_leads_outside_is_refused_by_name(source, target):
    (source / "link").symlink_to(target)
    with pytest.raises(UsageError, match=r"'link' links to .*, which is outside of the folder"):
        build_shards(source, ["link"], scan_folder(source, ()))


def test_an_absolute_link_into_the_folder_leads_into_the_restored_folder(store, source, target):
    fill(source)
    (source / "now").symlink_to(source / "checkpoint-3")
    restored(store, kept(store, source), target)
    assert (target / "now").readlink() == target / "checkpoint-3"


def newest(folder, key):
    return max(folder.glob("*"), key=key).name


@pytest.mark.parametrize("key", [os.path.getmtime, os.path.getctime])
def test_the_newest_file_and_folder_are_those_that_were_the_newest(store, source, target, key):
    names = ["checkpoint-20", "checkpoint-3", "checkpoint-100"]
    for count, name in enumerate(names):
        (source / name).mkdir()
        (source / name / "weights").write_text("w")
        os.utime(source / name, (1_600_000_000 + count,) * 2)
        time.sleep(0.02)  # for a clock that ticks a hundred times a second
    restored(store, kept(store, source), target)
    assert sorted(target.glob("*"), key=key) == [target / name for name in names]
    assert newest(target, key) == newest(source, key) == "checkpoint-100"


def test_a_log_that_grows_while_it_is_stored_is_kept_up_to_where_it_was(store, source, target):
    (source / "train.log").write_text("one\n")
    (source / "model").write_text("w")
    entries = scan_folder(source, ())
    shards = build_shards(source, ["train.log", "model"], entries)
    (source / "train.log").write_text("one\ntwo\n")
    (source / "new").write_text("appears beside the others")
    restored(store, commit_checkpoint(store, DRAFT, shards, lambda: check_unchanged(source, entries)), target)
    assert (target / "train.log").read_text() == "one\n"


def test_a_part_of_a_folder_is_restored_beside_what_is_there(store, source, target):
    (source / "weights" / "old").mkdir(parents=True)
    (source / "weights" / "last.pt").write_text("w")
    entries = {path: entry for path, entry in scan_folder(source, ()).items() if "old" not in path}
    manifest = commit_checkpoint(store, DRAFT, build_shards(source, ["weights/last.pt"], entries), lambda: None)
    (target / "weights").mkdir()
    (target / "weights" / "pretrained.pt").write_text("image")
    (target / "weights" / "last.pt").write_text("torn")
    restored(store, manifest, target)
    assert (target / "weights" / "pretrained.pt").read_text() == "image"
    assert (target / "weights" / "last.pt").read_text() == "w"
    assert (target / SET_ASIDE_FOLDER / "weights" / "last.pt").read_text() == "torn"


def test_a_scan_sees_files_folders_and_links_and_leaves_out_what_is_ignored(tmp_path):
    (tmp_path / "sub").mkdir(mode=0o750)
    (tmp_path / "sub" / "model").write_bytes(b"abc")
    (tmp_path / "sub" / "model.tmp").write_bytes(b"x")
    (tmp_path / ".nfs0001").write_bytes(b"x")
    (tmp_path / ".tiphys-restore").mkdir()
    (tmp_path / "last").symlink_to("sub/model")
    os.mkfifo(tmp_path / "pipe")
    found = scan_folder(tmp_path, ("*.tmp", ".nfs*"))
    kinds = {path: entry.kind for path, entry in found.items()}
    assert kinds == {"last": "link", "pipe": "unusable", "sub": "folder", "sub/model": "file"}
    assert (found["sub/model"].size, found["last"].target, found["last"].inside) == (3, "sub/model", "sub/model")
    assert found["pipe"].problem == "is neither a file, a folder nor a link"


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path):
    assert scan_folder(tmp_path / "none", ()) == {}


def test_a_folder_that_cannot_be_read_is_noted(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    real = os.scandir

    def scandir(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert scan_folder(tmp_path, ())["sub"].problem == "cannot be read: Permission denied"


def test_a_pipe_in_the_folder_is_refused_by_name(source):
    os.mkfifo(source / "pipe")
    with pytest.raises(UsageError, match="'pipe' is neither a file"):
        build_shards(source, [], scan_folder(source, ()))


def rewrite(path):
    path.write_bytes(b"of another size")  # a clock may not tick between two writes


def touch(path):
    os.utime(path, ns=(1, 1))


def replace(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [rewrite, touch, lambda path: path.unlink(), pipe])
def test_a_file_that_changes_before_it_is_read_is_not_committed(store, source, change):
    (source / "model").write_bytes(b"abcde")
    shards = build_shards(source, [], scan_folder(source, ()))
    change(source / "model")
    with pytest.raises(FileChangedError):
        commit_checkpoint(store, DRAFT, shards, lambda: None)
    assert not any("manifests/" in key for key in store.objects)


def write_then_close(path, texts):
    """Changes the file at each look at what is open, and says that it is open until the last text is written."""
    left = list(texts)

    def find_open():
        if left:
            path.write_text(left.pop(0))
        return {path.name} if left else set()

    return find_open


def test_file_that_is_written_all_the_time_is_copied_in_a_state_in_which_it_was_closed(source):
    path = source / "metrics.json"
    path.write_text("listed")
    listed = scan_folder(source, ())
    path.write_text("written since")
    copies, entries = copy_small_files(
        source, listed, listed, listed, write_then_close(path, ["half", "half writ", "whole"])
    )
    assert (bytes(copies["metrics.json"]), entries["metrics.json"]) == (
        b"whole",
        scan_folder(source, ())["metrics.json"],
    )
    assert listed["metrics.json"].size == len("listed")


@pytest.mark.parametrize(("restless", "find_open"), [((), set), (("metrics.json",), lambda: None)])
def test_file_of_which_only_a_later_state_is_there_is_not_copied_unless_it_was_closed(source, restless, find_open):
    path = source / "metrics.json"
    path.write_text("listed")
    listed = scan_folder(source, ())
    path.write_text("written since")
    with pytest.raises(FileChangedError):
        copy_small_files(source, listed, listed, restless, find_open)


def test_a_file_that_cannot_be_read_is_named(store, source):
    (source / "model").write_bytes(b"abcde")
    shards = build_shards(source, [], scan_folder(source, ()))
    replace(source / "model")
    with pytest.raises(UsageError, match=r"model cannot be read"):
        commit_checkpoint(store, DRAFT, shards, lambda: None)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//b", ".", "link/x", "link/sub/x"])
def test_an_index_that_names_places_outside_is_not_believed(path):
    link = '{"path": "link", "kind": "link", "target": "a", "modified_ns": 1}'
    row = f'{link}, {{"path": "{path}", "kind": "file", "mode": 420, "size": 1, "modified_ns": 1}}'
    document = f'{{"format": 2, "roots": [], "shard_bytes": 10, "entries": [{row}]}}'
    with pytest.raises(IntegrityError, match="cannot be part of a checkpoint"):
        read_index(document.encode())


def test_an_index_of_a_later_version_says_so():
    with pytest.raises(UsageError, match="has format 3"):
        read_index(b'{"format": 3}')


def test_restoring_can_be_given_up_between_shards(store, source, target):
    fill(source)
    manifest = kept(store, source)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_files(store, manifest, target, stop)
    assert list(target.iterdir()) == []


def test_a_reading_that_went_wrong_once_is_repeated(store, source, target):
    (source / "a").write_bytes(b"abc")
    manifest = kept(store, source)
    real, failed = store.chunks, []

    def chunks(key, size_bytes=8 << 20):
        if key not in failed:
            failed.append(key)
            yield b"noise"
        else:
            yield from real(key, size_bytes)

    store.chunks = chunks
    restored(store, manifest, target)
    assert len(failed) == 2
    assert (target / "a").read_bytes() == b"abc"


def test_the_reference_of_the_draft_is_that_of_the_tests():
    assert DRAFT.ref == ref(1, 1)
    assert restore.SET_ASIDE_FOLDER.startswith(".tiphys-")
