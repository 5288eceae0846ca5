"""The directory store when disks fill up, processes die and folders vanish.

What it shares with every other store is in ``tests/contract/test_store.py``.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tiphys.errors import (
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    StoreFullError,
    UsageError,
)
from tiphys.faults import InjectedFaultError
from tiphys.store import DirectoryStore

CREATE = "import sys; from tiphys.store import DirectoryStore; DirectoryStore(sys.argv[1]).create('a/b', b'1')"
DAY = 24 * 3600


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)


def temporaries(root: Path) -> list[Path]:
    return list((root / ".tmp").glob("*"))


def failing(code: int) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), "somewhere")

    return fail


def create_in_a_process(root: Path, failpoints: str, log: Path) -> int:
    environment = {**os.environ, "TIPHYS_FAILPOINTS": failpoints, "TIPHYS_FAILPOINTS_LOG": str(log)}
    return subprocess.run([sys.executable, "-c", CREATE, str(root)], env=environment, timeout=120).returncode


class TestOpening:
    def test_makes_the_folder(self, root: Path) -> None:
        DirectoryStore(root / "deep")

        assert (root / "deep").is_dir()

    def test_a_missing_folder_that_should_exist_is_not_made(self, root: Path) -> None:
        with pytest.raises(
            NotFoundError, match=rf"no store at {root}: .* check the path, and that the volume is mounted"
        ):
            DirectoryStore(root, create=False)

        assert not root.exists()

    def test_opens_an_existing_folder_either_way(self, root: Path) -> None:
        root.mkdir()

        assert DirectoryStore(root, create=False).url == DirectoryStore(root).url

    @pytest.mark.parametrize("create", [True, False])
    def test_refuses_a_file(self, tmp_path: Path, create: bool) -> None:
        (tmp_path / "file").touch()

        with pytest.raises(StoreError, match=r"a file where a folder is needed \(.*/file\)"):
            DirectoryStore(tmp_path / "file", create=create)

    def test_a_relative_path_stays_where_it_was_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        store = DirectoryStore("here")
        monkeypatch.chdir("/")

        store.create("a", b"1")

        assert (tmp_path / "here" / "a").read_bytes() == b"1"


class TestWriteErrors:
    @pytest.mark.parametrize(
        ("code", "sentence"),
        [
            (errno.ENOSPC, "the disk or its quota is full and 1,234 bytes are needed; free some space"),
            (errno.EDQUOT, "the disk or its quota is full and 1,234 bytes are needed"),
            (errno.EACCES, f"Permission denied; give uid {os.geteuid()} access to"),
            (errno.EROFS, "its file system is mounted read-only; mount it for writing, or choose another store"),
            (errno.EPERM, "it needs a file system with hard links"),
            (errno.EOPNOTSUPP, "one file system that supports hard links"),
            (errno.EXDEV, "one file system that supports hard links"),
            (errno.EIO, "Input/output error; check the disk and the mount"),
        ],
    )
    @pytest.mark.parametrize("call", ["fsync", "link"])
    def test_say_where_and_what_to_do_and_leave_nothing(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, sentence: str, call: str
    ) -> None:
        monkeypatch.setattr(os, call, failing(code))

        with pytest.raises(StoreError) as caught:
            store.create("runs/a/run.json", b"x" * 1234)

        assert str(caught.value).startswith(f"cannot write {root}/runs/a/run.json: ")
        assert sentence in str(caught.value)
        kinds = {errno.ENOSPC: StoreFullError, errno.EDQUOT: StoreFullError, errno.EIO: StoreError}
        assert type(caught.value) is kinds.get(code, SettingsError)
        monkeypatch.undo()
        assert list(store.list("")) == []
        assert temporaries(root) == []

    def test_a_source_that_breaks_off_leaves_nothing(
        self, store: DirectoryStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "source").write_bytes(b"x" * 10)
        monkeypatch.setattr("shutil.copyfileobj", failing(errno.ENOSPC))

        with pytest.raises(StoreError, match="10 bytes are needed"):
            store.create_from_file("a", tmp_path / "source")

        assert list(store.list("")) == []
        assert temporaries(root) == []

    def test_an_object_in_the_place_of_a_folder_is_named(self, store: DirectoryStore, root: Path) -> None:
        store.create("a", b"")

        for key in ("a/b", "a/b/c"):
            with pytest.raises(StoreError, match=rf"a file where a folder is needed \({root}/a"):
                store.create(key, b"")

    def test_a_folder_in_the_place_of_an_object_is_no_object(self, store: DirectoryStore) -> None:
        store.create("a/b", b"")

        with pytest.raises(StoreError, match="there are keys below it, so it is a folder"):
            store.create("a", b"")

    def test_a_name_too_long_for_the_file_system_is_named(self, store: DirectoryStore) -> None:
        with pytest.raises(StoreError, match="too long for this file system"):
            store.create("x" * 256, b"")

    def test_the_folder_of_unfinished_writes_holds_no_objects(self, store: DirectoryStore, root: Path) -> None:
        store.create("a", b"")
        (root / ".tmp" / "left").touch()

        with pytest.raises(UsageError, match=r"\.tmp/ is reserved for temporary files"):
            store.create(".tmp/x", b"")
        assert list(store.list(".tmp/")) == list(store.list(".tmp")) == list(store.prefixes("")) == []


class TestDurability:
    def test_bytes_and_every_name_on_the_way_are_flushed_before_create_returns(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: list[Path] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        store.create("runs/a/run.json", b"1")

        assert flushed[0].parent == root / ".tmp"
        assert flushed[1:] == [root / "runs/a", root / "runs", root]

    def test_a_refusal_too_rests_on_a_durable_name(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.create("a", b"1")
        flushed: list[Path] = []
        monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").readlink()))

        with pytest.raises(ObjectExistsError):
            store.create("a", b"2")

        assert flushed[-1] == root

    def test_a_process_that_dies_before_publishing_leaves_no_object(self, root: Path, tmp_path: Path) -> None:
        code = create_in_a_process(root, "store.before_publish=crash", log := tmp_path / "log")

        assert code == -signal.SIGKILL
        assert log.read_text() == "store.before_publish=crash\n"
        assert list(DirectoryStore(root).list("")) == []
        assert len(temporaries(root)) == 1

    def test_a_process_that_dies_after_publishing_leaves_the_object(self, root: Path, tmp_path: Path) -> None:
        code = create_in_a_process(root, "store.after_publish=crash", log := tmp_path / "log")

        assert code == -signal.SIGKILL
        assert log.read_text() == "store.after_publish=crash\n"
        assert DirectoryStore(root).read("a/b") == b"1"

    def test_an_error_before_publishing_leaves_nothing(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TIPHYS_FAILPOINTS", "store.before_publish=raise@1")

        with pytest.raises(InjectedFaultError):
            store.create("a", b"")

        assert list(store.list("")) == []
        assert temporaries(root) == []

    def test_files_of_dead_writers_are_removed_a_day_later(self, root: Path) -> None:
        leftovers = root / ".tmp"
        leftovers.mkdir(parents=True)
        for name, age in (("old", DAY + 60), ("young", DAY - 60)):
            path = leftovers / name
            path.touch()
            os.utime(path, times=(path.stat().st_mtime - age,) * 2)

        DirectoryStore(root).create("a", b"")

        assert [path.name for path in temporaries(root)] == ["young"]


class TestRaces:
    def test_a_link_that_nfs_repeated_is_our_own(self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.link

        def link_twice(source: Path, target: Path) -> None:
            real(source, target)
            real(source, target)

        monkeypatch.setattr(os, "link", link_twice)

        store.create("a", b"1")

        assert store.read("a") == b"1"

    def test_a_folder_removed_under_our_feet_is_made_again(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = os.link, []

        def link(source: Path, target: Path) -> None:
            calls.append(target)
            if len(calls) == 1:
                target.parent.rmdir()
            real(source, target)

        monkeypatch.setattr(os, "link", link)

        store.create("a/b", b"1")

        assert len(calls) == 2
        assert store.read("a/b") == b"1"

    def test_a_folder_that_was_there_and_is_gone_is_made_again(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = Path.mkdir, []

        def mkdir(path: Path, *arguments: int, **options: bool) -> None:
            calls.append(path)
            if calls.count(root / "a") == 1:
                raise FileExistsError(errno.EEXIST, "there a moment ago", str(path))
            real(path, *arguments, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)

        store.create("a/b", b"1")

        assert calls.count(root / "a") > 1
        assert store.read("a/b") == b"1"

    def test_a_folder_that_is_removed_for_ever_is_reported(
        self, store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "link", failing(errno.ENOENT))

        with pytest.raises(StoreError, match="its folder keeps being removed"):
            store.create("a/b", b"1")

        assert temporaries(root) == []

    def test_creating_and_deleting_neighbours_at_once_loses_nothing(self, store: DirectoryStore) -> None:
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                store.create("folder/other", b"")
                store.delete("folder/other")

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for number in range(100):
                store.create(f"folder/{number}", b"")
                assert store.read(f"folder/{number}") == b""
                store.delete(f"folder/{number}")
        finally:
            stop.set()
            thread.join()

        assert list(store.list("")) == []


class TestVanishedStore:
    def test_a_vanished_store_is_not_read_as_empty(self, store: DirectoryStore, root: Path) -> None:
        root.rmdir()

        for call in (
            lambda: list(store.list("")),
            lambda: list(store.prefixes("runs/")),
            lambda: store.read("a"),
        ):
            with pytest.raises(StoreError, match=f"the store's folder {root} is gone; check that its volume"):
                call()

    def test_a_vanished_store_is_not_made_again_by_a_write(self, store: DirectoryStore, root: Path) -> None:
        root.rmdir()

        with pytest.raises(StoreError, match=r"is gone; check that its volume is still mounted"):
            store.create("a", b"")

        assert not root.exists()


class TestForeignFiles:
    def test_files_with_a_name_that_no_key_can_hold_are_left_out(self, store: DirectoryStore, root: Path) -> None:
        store.create("a", b"1")
        Path(os.fsdecode(bytes(root) + b"/\xff")).touch()

        assert [info[:2] for info in store.list("")] == [("a", 1)]

    def test_files_that_vanish_during_a_listing_are_left_out(self, store: DirectoryStore) -> None:
        for key in ("a", "b", "c"):
            store.create(key, b"")

        rows = store.list("")
        first = next(rows)
        store.delete("b")

        assert [first.key, *(info.key for info in rows)] == ["a", "c"]

    def test_files_that_cannot_be_opened_are_an_error_and_not_missing(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.create("a", b"1")
        monkeypatch.setattr(Path, "open", failing(errno.EACCES))

        with pytest.raises(StoreError, match=r"cannot read .*/a: Permission denied"):
            store.read("a")

    def test_folders_are_no_objects(self, store: DirectoryStore, root: Path) -> None:
        store.create("a/b", b"")
        (root / "empty" / "deep").mkdir(parents=True)  # a writer died before it published

        with pytest.raises(ObjectMissingError):
            store.read("a")
        assert list(store.prefixes("")) == ["a/"]
