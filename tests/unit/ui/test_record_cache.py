"""Records are read once a minute, within a bound, and the pages cannot write."""

from pathlib import Path

import pytest
from support.fakes.counting_store import CountingStore

from hera_pipelines.ui.record_cache import RecordCache
from tiphys.errors import ObjectMissingError, UsageError
from tiphys.store import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    store = CountingStore(DirectoryStore(tmp_path / "store"))
    for name in "abcd":
        store.create(name, name.encode() * 1000)
    store.create("large", b"x" * (65 << 10))
    return store


def test_an_object_is_read_once_a_minute(store: CountingStore) -> None:
    now = 0.0
    cache = RecordCache(store, clock=lambda: now)
    assert [cache.read("a"), cache.read("a")] == [b"a" * 1000] * 2
    assert store.requests["read"] == 1
    now = 61.0
    cache.read("a")
    assert store.requests["read"] == 2


def test_the_oldest_make_room_and_large_objects_are_not_kept(store: CountingStore) -> None:
    cache = RecordCache(store, clock=lambda: 0.0, max_bytes=3000)
    for name in ("a", "b", "c", "d", "large", "b", "c", "d"):
        cache.read(name)
    assert store.requests["read"] == 5
    cache.read("a")
    cache.read("large")
    assert store.requests["read"] == 7


def test_a_missing_record_is_read_again(store: CountingStore) -> None:
    cache = RecordCache(store)
    for _ in range(2):
        with pytest.raises(ObjectMissingError):
            cache.read("absent")
    store.create("absent", b"here")
    assert cache.read("absent") == b"here"


def test_the_record_cache_refuses_writes(store: CountingStore, tmp_path: Path) -> None:
    cache = RecordCache(store)
    for write in (
        lambda: cache.create("new", b""),
        lambda: cache.create_from_file("new", tmp_path),
        lambda: cache.delete("a"),
    ):
        with pytest.raises(UsageError, match="the pages only read"):
            write()
    assert {info.key for info in cache.list("")} == {"a", "b", "c", "d", "large"}
