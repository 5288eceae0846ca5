"""What of a folder of outputs object storage can keep.

| entry | stored |
|---|---|
| file, hard link, file in folders | its bytes, under its name |
| link to anything, inside or outside, dangling, or to its own folder | refused by name |
| link to a file of the same folder, where copies are asked for | the bytes of that file |
| pipe, socket | refused by name |
| a name that is not UTF-8, a key above 1,024 bytes | refused by name, escaped |
| the output itself is a link to a file | its bytes |
| the output itself is a link to a folder, or a pipe | refused |
| nothing | nothing |
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tiphys.errors import UNKEPT_OUTPUT, UsageError
from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.records import Cause
from tiphys.store import list_output_files

KEY = "data/runs/digits/outputs/prep/000000001/artifacts/model"


def stored(path: Path) -> list[str]:
    return [key.removeprefix(KEY) for _, key in list_output_files(path, KEY, "output artifact model")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("outside")
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "weights").write_text("w")
    return tmp_path / "out"


def test_files_of_a_folder_have_keys_below_that_of_the_output(folder: Path) -> None:
    (folder / "deep" / "été").write_text("x")
    os.link(folder / "weights", folder / "same-weights")
    assert stored(folder) == ["/deep/été", "/same-weights", "/weights"]


def test_a_file_has_the_key_of_the_output_also_behind_a_link(folder: Path) -> None:
    (folder / "latest").symlink_to("weights")
    assert stored(folder / "weights") == [""]
    assert stored(folder / "latest") == [""]


def test_links_to_files_of_the_folder_are_files_where_they_are_asked_for(folder: Path) -> None:
    (folder / "deep" / "last").symlink_to("../weights")
    (folder / "last").symlink_to("deep/last")
    listed = list_output_files(folder, KEY, "output", copies_links=True)
    assert {key.removeprefix(KEY): file.read_text() for file, key in listed} == dict.fromkeys(
        ["/deep/last", "/last", "/weights"], "w"
    )


@pytest.mark.parametrize("target", ["../outside", "/etc/hostname", "gone", "deep", ".", "loop"])
def test_no_other_link_is_stored_as_a_file(folder: Path, target: str) -> None:
    (folder / "loop").symlink_to(target)
    with pytest.raises(UsageError, match=f"'loop -> {target}' is a link"):
        list_output_files(folder, KEY, "output", copies_links=True)


def test_an_absent_folder_has_no_outputs(folder: Path) -> None:
    (folder / "dangling").symlink_to("gone")
    assert stored(folder / "absent") == stored(folder / "dangling") == []


def link_to(target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "deep" / "latest").symlink_to(target)


def bind_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "deep" / "control"))


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (link_to("../weights"), "'latest -> ../weights' is a link"),
        (link_to("/etc/hostname"), "'latest -> /etc/hostname' is a link"),
        (link_to("gone"), "'latest -> gone' is a link"),
        (link_to(".."), "'latest -> ..' is a link"),
        (lambda folder: os.mkfifo(folder / "deep" / "pipe"), "'pipe' is a pipe, a socket or a device"),
        (bind_socket, "'control' is a pipe, a socket or a device"),
        (lambda folder: Path(os.fsdecode(bytes(folder) + b"/deep/a\xff.txt")).touch(), r"'deep/a\xff.txt' has a name"),
        (lambda folder: Path(os.fsdecode(bytes(folder) + b"/\xff\n")).mkdir(), ""),
        (lambda folder: make_long(folder), "too many"),
    ],
)
def test_an_output_that_no_store_can_keep_is_a_user_error_with_its_name(
    folder: Path, add: Callable[[Path], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    add(folder)
    if not words:  # a folder with such a name, and a file in it
        (next(entry for entry in folder.iterdir() if entry.name not in ("deep", "weights")) / "f").touch()
        words = r"'\xff\n/f' has a name that is not UTF-8"
    with pytest.raises(UsageError) as caught:
        stored(folder)
    message = str(caught.value)
    assert message.startswith("output artifact model: ")
    assert words in message
    assert UNKEPT_OUTPUT in message
    assert message.encode()  # it can be printed and stored
    observation = AttemptObservation("Error", 0, pod_message=f"wait: Error (exit code 64): {message}")
    assert classify_failure(observation).cause is Cause.USER_ERROR


def make_long(folder: Path) -> None:
    for _ in range(5):
        folder /= "x" * 200
        folder.mkdir()
    (folder / "y").touch()


def test_an_output_that_is_a_link_to_a_folder_or_a_pipe_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to("deep")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(UsageError, match=f"output artifact model: {name} is a link to a folder, a socket"):
            stored(folder / name)
