"""Which checkpoints of a folder are whole.

| said by | whole |
|---|---|
| a marker | once two looks agree and show it |
| quiet time | once nothing changed for so long |
| the end of the program | a marked one; else all if it ended well, or what had been quiet before |
| anything already committed | not again until it changes |
"""

import os
import re
from pathlib import Path

import pytest

from tiphys.checkpoint.exec.detect import CompletenessDetector, find_checkpoints, matches_pattern, parse_global_step
from tiphys.checkpoint.exec.files import FileEntry, scan_folder
from tiphys.checkpoint.exec.options import ExecOptions

MARKED = ExecOptions(Path("/c"), ("true",), checkpoint="checkpoint-*", marker="checkpoint-*/DONE")
QUIET = ExecOptions(Path("/c"), ("true",), checkpoint="checkpoint-*", quiet_seconds=5.0)
WHOLE = ExecOptions(Path("/c"), ("true",), quiet_seconds=5.0)


def file(size=3, modified_ns=1):
    return FileEntry("file", 0o644, size, modified_ns, modified_ns, 7)


def folder(*files, name="checkpoint-1", **entries):
    made = {name: FileEntry("folder", 0o755), **{f"{name}/{path}": file() for path in files}}
    return {**made, **{f"{name}/{path}": entry for path, entry in entries.items()}}


def names(found):
    return [one.name for one in found]


def seen(options, *looks, watch=None):
    """A watch after looks of (time, listing)."""
    watch = watch or CompletenessDetector(options)
    for now, listing in looks:
        watch.observe(find_checkpoints(listing, options), now)
    return watch


def test_a_marked_checkpoint_is_whole_once_two_looks_agree():
    listing = folder("model", "DONE")
    assert names(seen(MARKED, (0, listing)).select_complete(0)) == []
    assert names(seen(MARKED, (0, listing), (1, listing)).select_complete(1)) == ["checkpoint-1"]


def test_without_its_marker_it_is_not_whole_however_quiet():
    listing = folder("model")
    assert names(seen(MARKED, (0, listing), (1000, listing)).select_complete(1000)) == []
    assert names(seen(MARKED, (0, listing)).select_complete(1, has_ended=True, has_finished=True)) == []


def test_a_marker_that_was_seen_only_after_the_end_counts():
    assert names(seen(MARKED, (0, folder("DONE"))).select_complete(0, has_ended=True)) == ["checkpoint-1"]


def test_quiet_time_begins_anew_with_every_change():
    one, two = folder(model=file(3)), folder(model=file(4))
    watch = seen(QUIET, (0, one), (4, two), (8, two))
    assert names(watch.select_complete(8)) == []
    assert names(seen(QUIET, (9, two), watch=watch).select_complete(9)) == ["checkpoint-1"]


@pytest.mark.parametrize("change", [{"size": 4}, {"modified_ns": 2}])
def test_size_and_times_tell_a_change(change):
    watch = seen(QUIET, (0, folder(model=file())), (6, folder(model=file(**change))))
    assert names(watch.select_complete(6)) == []


def test_a_file_that_comes_or_goes_is_a_change():
    watch = seen(QUIET, (0, folder("a")), (6, folder("a", "b")), (12, folder("b")))
    assert names(watch.select_complete(12)) == []


def test_what_a_program_left_that_died_is_whole_only_if_it_was_quiet_before():
    early, late = folder("a"), folder("a", name="checkpoint-2")
    watch = seen(QUIET, (0, early), (6, {**early, **late}), (7, {**early, **late}))
    assert names(watch.select_complete(7, has_ended=True)) == ["checkpoint-1"]
    assert names(watch.select_complete(7, has_ended=True, has_finished=True)) == ["checkpoint-1", "checkpoint-2"]


def test_what_is_settled_is_left_alone_until_it_changes():
    one, two = folder(model=file(3)), folder(model=file(4))
    watch = seen(QUIET, (0, one), (5, one))
    watch.ignore_until_changed(watch.select_complete(5))
    assert names(seen(QUIET, (20, one), watch=watch).select_complete(20)) == []
    assert names(seen(QUIET, (21, two), (26, two), watch=watch).select_complete(26)) == ["checkpoint-1"]


def test_several_come_in_the_order_in_which_they_were_written():
    listing = {**folder(model=file(modified_ns=9)), **folder(name="checkpoint-0", model=file(modified_ns=5))}
    assert names(seen(QUIET, (0, listing), (5, listing)).select_complete(5)) == ["checkpoint-0", "checkpoint-1"]


def test_a_folder_without_a_file_is_no_checkpoint():
    assert find_checkpoints({"checkpoint-1": FileEntry("folder", 0o755)}, QUIET) == []
    assert find_checkpoints({}, WHOLE) == []


def test_what_does_not_fit_the_pattern_belongs_to_none():
    listing = {**folder("a"), "log.txt": file(), "runs": FileEntry("folder"), "runs/checkpoint-3": file()}
    (found,) = find_checkpoints(listing, QUIET)
    assert sorted(found.entries) == ["checkpoint-1", "checkpoint-1/a"]


def test_a_checkpoint_may_be_a_single_file_or_the_folder_as_a_whole():
    listing = {"ckpt_5.pt": file(), "notes": file()}
    assert names(find_checkpoints(listing, ExecOptions(Path("/c"), ("true",), checkpoint="ckpt_*.pt"))) == ["ckpt_5.pt"]
    (found,) = find_checkpoints(listing, WHOLE)
    assert (found.name, sorted(found.entries)) == ("", ["ckpt_5.pt", "notes"])


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [("a-1/DONE", "a-*/DONE", True), ("a-1/b/DONE", "a-*/DONE", False), ("DONE", "*/DONE", False), ("A", "a", False)],
)
def test_a_star_does_not_reach_over_a_slash(path, pattern, fits):
    assert matches_pattern(path, pattern) is fits


@pytest.mark.parametrize(
    ("options", "listing", "pattern", "step"),
    [
        (QUIET, folder("a", name="checkpoint-120"), r"checkpoint-(\d+)", 120),
        (QUIET, folder("a", name="checkpoint-120"), r"\d+", 120),
        (QUIET, folder("step_7", name="checkpoint-x"), r"(\d+)", None),
        (WHOLE, {"epoch=3.ckpt": file(), "epoch=12.ckpt": file()}, r"epoch=(\d+)", 12),
        (WHOLE, {"a": file()}, r"(x)?a", None),
    ],
)
def test_the_global_step_is_in_the_name(options, listing, pattern, step):
    (found,) = find_checkpoints(listing, options)
    assert parse_global_step(found, re.compile(pattern)) == step


def test_a_look_sees_files_folders_and_links_and_leaves_out_what_is_ignored(tmp_path):
    (tmp_path / "sub").mkdir(mode=0o750)
    (tmp_path / "sub" / "model").write_bytes(b"abc")
    (tmp_path / "sub" / "model.tmp").write_bytes(b"x")
    (tmp_path / ".nfs0001").write_bytes(b"x")
    (tmp_path / ".tiphys-restore").mkdir()
    (tmp_path / "last").symlink_to("sub/model")
    os.mkfifo(tmp_path / "pipe")
    found = scan_folder(tmp_path, ("*.tmp", ".nfs*"))
    assert {path: entry.kind for path, entry in found.items()} == {
        "last": "link",
        "pipe": "unusable",
        "sub": "folder",
        "sub/model": "file",
    }
    assert (found["sub/model"].size, found["last"].target) == (3, "sub/model")
    assert found["pipe"].problem == "is neither a file, a folder nor a link"


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
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
