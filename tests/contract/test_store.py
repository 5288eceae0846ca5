"""What every store promises, whatever it is made of.

| call | nothing there | something there |
|---|---|---|
| create | stored | ObjectExistsError, unchanged |
| read, chunks | ObjectMissingError | its bytes |
| list, prefixes | nothing | bytewise order of the whole key |
| delete | no error | gone |
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiphys.errors import ObjectExistsError, ObjectMissingError, UsageError
from tiphys.store import Store

WRITERS = 8


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_a_created_object_reads_back(store: Store) -> None:
    store.create("runs/a/run.json", b"one")

    assert store.read("runs/a/run.json") == b"one"


def test_a_second_create_is_refused_and_changes_nothing(store: Store) -> None:
    store.create("a", b"one")

    with pytest.raises(ObjectExistsError, match="already has an object a"):
        store.create("a", b"two")

    assert store.read("a") == b"one"


def test_an_object_without_bytes_exists(store: Store) -> None:
    store.create("done/1", b"")

    assert store.read("done/1") == b""
    assert list(store.chunks("done/1")) == []
    assert [info[:2] for info in store.list("")] == [("done/1", 0)]
    with pytest.raises(ObjectExistsError):
        store.create("done/1", b"")


def test_reading_what_is_not_there_says_so(store: Store) -> None:
    store.create("a/b", b"")

    with pytest.raises(ObjectMissingError, match="has no object nothing/here"):
        store.read("nothing/here")
    with pytest.raises(ObjectMissingError):
        store.read("a")
    with pytest.raises(ObjectMissingError):
        next(store.chunks("a/b/c"))


def test_chunks_are_no_larger_than_asked_and_make_the_whole(store: Store) -> None:
    data = bytes(range(256)) * 40
    store.create("big", data)

    chunks = list(store.chunks("big", size_bytes=4096))

    assert [len(chunk) for chunk in chunks] == [4096, 4096, 2048]
    assert b"".join(chunks) == data


def test_listing_is_in_bytewise_order_of_the_whole_key(store: Store) -> None:
    shuffled = ["b", "a/x", "a.b/x", "a0", "a-b", "a/x/y.json.d/z", "a/x.json", "Z", "é", "a/é/1", "z"]
    for key in shuffled:
        if key != "a/x":
            store.create(key, b"1")

    assert keys(store) == sorted((k for k in shuffled if k != "a/x"), key=str.encode)


def test_a_listing_says_the_size_of_each_object(store: Store) -> None:
    store.create("a/1", b"x" * 7)
    store.create("a/2", b"")

    assert [info[:2] for info in store.list("a/")] == [("a/1", 7), ("a/2", 0)]


def test_a_listing_shows_that_an_object_was_written_again_with_as_many_bytes(store: Store) -> None:
    for key in ("modell ü.bin", "other.bin"):
        store.create(key, b"1234")
    before = {info.key: info.version for info in store.list("")}
    store.delete("modell ü.bin")
    store.create("modell ü.bin", b"4321")

    after = {info.key: info.version for info in store.list("")}

    assert "" not in after.values()
    assert {key for key in after if after[key] != before[key]} == {"modell ü.bin"}


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", ["runs/a/1", "runs/ab/1", "runs/b/1", "runsx"]),
        ("runs", ["runs/a/1", "runs/ab/1", "runs/b/1", "runsx"]),
        ("runs/", ["runs/a/1", "runs/ab/1", "runs/b/1"]),
        ("runs/a", ["runs/a/1", "runs/ab/1"]),
        ("runs/a/", ["runs/a/1"]),
        ("runs/a/1", ["runs/a/1"]),
        ("runs/a/1/", []),
        ("runs/c", []),
        ("none/", []),
        ("runs//", []),
        ("/runs", []),
        ("../", []),
        ("runs/../runs/", []),
    ],
)
def test_a_prefix_is_a_prefix_of_the_key_and_not_a_folder(store: Store, prefix: str, expected: list[str]) -> None:
    for key in ("runs/a/1", "runs/ab/1", "runs/b/1", "runsx"):
        store.create(key, b"")

    assert keys(store, prefix) == expected


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("runs/", ["runs/a.b/", "runs/a/", "runs/b/"]),
        ("runs/a", ["runs/a.b/", "runs/a/"]),
        ("runs/a/", ["runs/a/x/"]),
        ("", ["memo/", "runs/"]),
        ("runs/b/", []),
        ("none/", []),
    ],
)
def test_prefixes_are_the_next_level_only(store: Store, prefix: str, expected: list[str]) -> None:
    for key in ("runs/a/x/1", "runs/a/x/2", "runs/a.b/1", "runs/b/1", "runs/file", "memo/1"):
        store.create(key, b"")

    assert list(store.prefixes(prefix)) == expected


def test_a_prefix_disappears_once_its_objects_are_deleted(store: Store) -> None:
    store.create("runs/a/deep/1", b"")
    store.delete("runs/a/deep/1")

    assert keys(store) == []
    assert list(store.prefixes("runs/")) == []


def test_delete_removes_one_object_and_none_that_is_absent(store: Store) -> None:
    store.create("a/1", b"")
    store.create("a/2", b"")

    store.delete("a/1")
    store.delete("a/1")
    store.delete("never/there")
    store.delete("a")

    assert keys(store) == ["a/2"]


def test_a_deleted_key_may_be_created_again(store: Store) -> None:
    store.create("a", b"one")
    store.delete("a")
    store.create("a", b"two")

    assert store.read("a") == b"two"


def test_a_file_is_stored_as_its_bytes(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"shard" * 1000)

    store.create_from_file("shards/0", source)

    assert store.read("shards/0") == b"shard" * 1000
    assert source.exists()
    with pytest.raises(ObjectExistsError):
        store.create_from_file("shards/0", source)


def test_a_file_that_cannot_be_read_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent"):
        store.create_from_file("a", tmp_path / "absent")

    assert keys(store) == []


def test_a_single_writer_wins_and_its_bytes_are_kept(store: Store) -> None:
    def write(writer: int) -> bytes | None:
        try:
            store.create("claims/1", data := f"writer {writer}".encode())
        except ObjectExistsError:
            return None
        return data

    with ThreadPoolExecutor(WRITERS) as pool:
        winners = [data for data in pool.map(write, range(WRITERS)) if data]

    assert len(winners) == 1
    assert store.read("claims/1") == winners[0]


@pytest.mark.parametrize("key", ["käse/ü", "日本/語", "a b/c+d", "a%2Fb", "x/🚢.json", "a&b=<c>?d#e"])
def test_any_unicode_key_round_trips(store: Store, key: str) -> None:
    store.create(key, b"1")

    assert store.read(key) == b"1"
    assert keys(store) == [key]
    store.delete(key)
    assert keys(store) == []


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../../b", "a/./b", "a\0b", "a\udcff", "x" * 1025, "é" * 513]
)
def test_a_key_that_is_no_place_below_the_store_is_refused(store: Store, key: str) -> None:
    with pytest.raises(UsageError):
        store.create(key, b"")
    with pytest.raises(UsageError):
        store.read(key)
    with pytest.raises(UsageError):
        store.delete(key)
    assert store.from_artifact_key(key) is None

    assert keys(store) == []


def test_a_key_in_the_bucket_leads_back_to_the_key_in_the_store(store: Store) -> None:
    key = "runs/a/outputs/prep/000000001/artifacts/data"

    assert store.from_artifact_key(store.artifact_key(key)) == key
