"""A node's cache of shards is shared by pods, and none of them can hold up another, or lead it elsewhere.

| under the name of a shard, or of its lock | restore |
|---|---|
| a pipe, a folder, a link, a second name of a file | reads from the bucket; nothing elsewhere is changed |
| a lock that another process holds | waits for a stated time, once; then reads from the bucket |
| a cache that is a file | reads from the bucket |
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.restore import shard_reader
from tiphys.checkpoint.restore.shard_reader import LoadStoppedError, NodeCache, ShardReader
from tiphys.records import Shard

DATA = "größe".encode() * 1000
SHARD = Shard(key="shard", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
NAMES = (SHARD.sha256, f"{SHARD.sha256}.lock")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore({SHARD.key: DATA})


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_bytes(b"victim")
    os.utime(file, (1_000_000_000, 1_000_000_000))
    return file


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "full folder": lambda path, _: (path / "x").mkdir(parents=True),
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "link to itself": lambda path, _: path.symlink_to(path),
    "second name": lambda path, victim: path.hardlink_to(victim),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", NAMES, ids=["shard", "lock"])
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_restore_goes_on_beside_what_another_pod_planted(
    plant: Callable[[Path, Path], object], name: str, store: MemoryStore, victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    plant(folder / name, victim)
    cache = NodeCache(folder, limit_bytes=0)

    for _ in range(2):
        assert ShardReader(store, cache=cache).read(SHARD) == DATA
    cache.trim({SHARD.sha256})
    cache.trim(())

    assert victim.read_bytes() == b"victim"
    assert victim.stat().st_mtime == 1_000_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "victim"]
    assert not list(folder.glob("*.tmp"))


def test_a_held_lock_is_waited_for_once(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shard_reader, "_LOCK_SECONDS", 0.2)
    others = [Shard(key=f"s{n}", size=1, sha256=hashlib.sha256(b"%d" % n).hexdigest()) for n in range(3)]
    store.objects |= {shard.key: b"%d" % n for n, shard in enumerate(others)}
    locks = [(tmp_path / f"{shard.sha256}.lock").open("w") for shard in (SHARD, *others)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    cache = NodeCache(tmp_path)

    read = [bytes(ShardReader(store, cache=cache).read(shard)) for shard in (SHARD, *others)]

    assert read == [DATA, b"0", b"1", b"2"]
    assert capsys.readouterr().err.count("another process holds a lock in the cache") == 1
    for lock in locks:
        lock.close()


def test_a_program_that_must_stop_waits_for_no_lock(store: MemoryStore, tmp_path: Path) -> None:
    stops = iter([False, True, True, True])
    with (tmp_path / NAMES[1]).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reader = ShardReader(store, cache=NodeCache(tmp_path), should_stop=lambda: next(stops))
        with pytest.raises(LoadStoppedError):
            reader.read(SHARD)


def test_a_cache_that_is_a_file_is_no_cache(store: MemoryStore, victim: Path) -> None:
    assert ShardReader(store, cache=NodeCache(victim)).read(SHARD) == DATA
    assert victim.read_bytes() == b"victim"


def test_a_second_reader_takes_the_shard_from_the_cache(store: MemoryStore, tmp_path: Path) -> None:
    assert ShardReader(store, cache=NodeCache(tmp_path)).read(SHARD) == DATA
    store.objects.clear()
    assert ShardReader(store, cache=NodeCache(tmp_path)).read(SHARD) == DATA
