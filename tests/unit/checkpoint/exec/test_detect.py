"""Which checkpoint of a folder is committed, and with what.

| sign | complete |
|---|---|
| a marker | newer than all that it marks, by the times and by the order of scans |
| quiet time | once nothing changed for so long; a step that lacks files of the step before waits longer |
| files closed | beside a next step; with the files of the step before; one file in place; a renamed folder |
| a file open for writing | never |
| the end of the program | all if it ended by itself; else what is marked, was quiet, or was seen closed |

| choice | made by |
|---|---|
| among complete steps | the number, whatever the times say; an unfit one is passed over |
| what lies beside | kept if it is of the same moment; waited for while it is of another one |
| a pointer | waited for until it names the step; the best one brings its checkpoint along |
"""

import re
from pathlib import Path

import pytest

from tiphys.checkpoint.exec.arrange import arrange_folder, matches_pattern
from tiphys.checkpoint.exec.detect import CompletenessDetector, FolderScan, FolderWriters
from tiphys.checkpoint.exec.files import FileEntry, make_link
from tiphys.checkpoint.exec.layouts import read_pointer
from tiphys.checkpoint.exec.options import ExecOptions

SECOND = 1_000_000_000
MARKED = ExecOptions(Path("/c"), ("true",), checkpoint="checkpoint-*", marker="checkpoint-*/DONE")
QUIET = ExecOptions(Path("/c"), ("true",), checkpoint="checkpoint-*", quiet_seconds=5.0)
AUTO = ExecOptions(Path("/c"), ("true",), quiet_seconds=5.0)


def file(at=1.0, size=3, **others):
    """A file that changed at second ``at``."""
    time_ns = int(at * SECOND)
    return FileEntry("file", 0o644, size, others.pop("modified_ns", time_ns), time_ns, 7, **others)


def listing(**files):
    """A listing of files, given by their names or their times; ``__`` stands for a slash."""
    return paths({name.replace("__", "/"): entry for name, entry in files.items()})


def paths(files):
    entries = {}
    for path, entry in files.items():
        for parent in Path(path).parents:
            if str(parent) != ".":
                entries[str(parent)] = FileEntry("folder", 0o755)
        entries[path] = entry if isinstance(entry, FileEntry) else file(entry)
    return dict(sorted(entries.items()))


class Watch:
    """A detector, fed with scans at given seconds."""

    def __init__(self, options=AUTO, before=None, restored=()):
        self.detector = CompletenessDetector(options)
        self.detector.begin(before or {}, restored)

    def look(self, now, entries, *, writers=None, pointers=None, ended=False, is_certain=True, processes=(7,)):
        held = None if writers is None or ended else FolderWriters(writers, frozenset(processes), is_certain)
        scan = FolderScan(entries, now, int(now * SECOND), held, pointers or {})
        self.detector.observe(scan, has_ended=ended)
        return self

    def closed(self, now, entries, **others):
        return self.look(now, entries, writers={}, **others)

    def select(self, now, **end):
        selection = self.detector.select_complete(now, **end)
        if selection is None:
            return None
        return sorted(path for path, entry in selection.entries.items() if entry.kind != "folder")

    def why(self, now):
        self.select(now)
        return self.detector.find_hindrance(now + 1)[1]


def test_a_marked_checkpoint_is_complete_once_two_scans_agree():
    folder = paths({"checkpoint-1/model": 1, "checkpoint-1/DONE": 1})
    watch = Watch(MARKED).look(1, folder)
    assert watch.select(1) is None
    assert watch.look(2, folder).select(2) == ["checkpoint-1/DONE", "checkpoint-1/model"]


def test_a_checkpoint_without_its_marker_is_not_complete_however_quiet():
    folder = paths({"checkpoint-1/model": 1})
    watch = Watch(MARKED).look(1, folder).look(1000, folder)
    assert watch.select(1000) is None
    assert watch.select(1000, has_ended=True, has_finished=True) is None
    assert watch.why(1000) == "there is no checkpoint-*/DONE yet"


def test_a_marker_that_is_older_than_its_file_marks_nothing():
    folder = paths({"checkpoint-1/model": 9, "checkpoint-1/DONE": 5})
    watch = Watch(MARKED).look(10, folder).look(100, folder)
    assert watch.select(100, has_ended=True, has_finished=True) is None
    assert watch.why(100) == "checkpoint-1/DONE is older than checkpoint-1/model, so it marks nothing"


def test_a_marker_is_older_by_the_order_of_scans_where_the_clock_was_set_back():
    first = paths({"checkpoint-1/model": 50, "checkpoint-1/DONE": 51})
    later = paths({"checkpoint-1/model": 20, "checkpoint-1/DONE": 51})
    watch = Watch(MARKED).look(1, first).look(2, first).look(3, first).look(4, later).look(5, later)
    assert watch.select(5) is None
    again = paths({"checkpoint-1/model": 20, "checkpoint-1/DONE": 21})
    assert watch.look(6, again).look(7, again).select(7) == ["checkpoint-1/DONE", "checkpoint-1/model"]


def test_a_marker_seen_only_after_the_end_counts():
    watch = Watch(MARKED).look(0, paths({"checkpoint-1/DONE": 1}), ended=True)
    assert watch.select(0, has_ended=True) == ["checkpoint-1/DONE"]


def test_a_marker_that_was_emptied_when_the_program_was_killed_marks_nothing():
    options = ExecOptions(Path("/c"), ("true",), checkpoint="last", marker="last/DONE")
    full = paths({"last/w": 1, "last/DONE": file(2, size=5)})
    watch = Watch(options, full, {*full})
    torn = paths({"last/w": 8, "last/DONE": file(9, size=0)})
    assert watch.look(9, torn, ended=True).select(9, has_ended=True) is None


def test_quiet_time_begins_anew_with_every_change():
    one, two = paths({"checkpoint-1/model": 1}), paths({"checkpoint-1/model": 4})
    watch = Watch(QUIET).look(0, one).look(4, two).look(8, two)
    assert watch.select(8) is None
    assert watch.look(9, two).select(9) == ["checkpoint-1/model"]


@pytest.mark.parametrize("change", [{"size": 4}, {"modified_ns": 2}])
def test_size_and_times_show_a_change(change):
    watch = Watch(QUIET).look(0, paths({"checkpoint-1/m": file()})).look(6, paths({"checkpoint-1/m": file(**change)}))
    assert watch.select(6) is None


def test_a_file_open_for_writing_is_not_complete_however_quiet():
    folder = listing(model=1)
    watch = Watch().look(0, folder, writers={"model": "process 7 (python)"})
    watch.look(60, folder, writers={"model": "process 7 (python)"})
    assert watch.select(60) is None
    assert watch.why(60) == "model is held open for writing by process 7 (python)"


def test_a_step_is_complete_when_the_next_one_has_begun():
    folder = paths({"checkpoint-1/a": 1, "checkpoint-2/a": 2})
    busy = {"checkpoint-2/a": "process 7 (python)"}
    assert Watch().look(3, folder, writers=busy).select(3) == ["checkpoint-1/a"]
    assert Watch().look(3, folder).select(3) is None  # the processes are unknown


def test_a_step_with_the_files_of_the_one_before_is_complete_once_they_are_closed():
    one = {"model_1.zip": 1, "model_buffer_1.pkl": 2}
    watch = Watch().closed(1.5, paths({"model_1.zip": 1}))
    assert watch.select(1.5) is None
    watch.closed(3, paths(one)).closed(10, paths(one))
    assert watch.select(10) == ["model_1.zip", "model_buffer_1.pkl"]
    assert watch.closed(12, paths({**one, "model_2.zip": 11})).select(12) != ["model_2.zip"]
    both = paths({**one, "model_2.zip": 11, "model_buffer_2.pkl": 12})
    assert watch.closed(13, both).select(13) == ["model_2.zip", "model_buffer_2.pkl"]


def test_a_step_that_lacks_a_file_of_the_one_before_waits_longer_than_the_quiet_time():
    one = {"model_1.zip": 1, "model_buffer_1.pkl": 2}
    watch = Watch().closed(3, paths(one))
    torn = paths({**one, "model_2.zip": 11})
    watch.closed(12, torn).closed(18, torn)
    assert watch.select(18) != ["model_2.zip"]
    assert watch.closed(60, torn).select(60) == ["model_2.zip"]


def test_a_file_that_is_overwritten_in_place_is_complete_once_it_is_closed():
    assert Watch().closed(2, listing(model=1)).select(2) == ["model"]
    assert Watch().closed(1.05, listing(model=1)).select(1.05) is None  # within a tick of the clock
    assert Watch().closed(2, paths({"last.pt": 1, "best.pt": 1})).select(2) == ["best.pt", "last.pt"]
    assert Watch().closed(2, paths({"model.bin": 1, "optimizer.bin": 1})).select(2) is None


def test_a_file_that_is_overwritten_again_and_again_is_not_held_up_by_one_that_is_written_once():
    watch = Watch().closed(2, paths({"config.json": 1}))
    for at in (2, 5, 8):
        folder = paths({"config.json": 1, "state.pkl": at})
        found = watch.closed(at + 1, folder).select(at + 1)
    assert found == ["config.json", "state.pkl"]


SETTINGS = (
    "config.json",
    "configs/train.yaml",
    ".hydra/overrides.yaml",
    "hparams.json",
    "training_args.bin",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "README.md",
    "code/train.py",
    "samples.png",
)


@pytest.mark.parametrize("names", [*((name,) for name in SETTINGS), SETTINGS], ids=lambda names: names[0])
def test_settings_alone_are_no_checkpoint(names):
    folder = paths(dict.fromkeys(names, 1))
    watch = Watch().closed(2, folder).closed(90, folder)
    assert watch.select(90) is None
    assert watch.detector.find_hindrance(90) == (0.0, "")  # as if nothing was written: the watch says so
    assert watch.look(91, folder, ended=True).select(91, has_ended=True, has_finished=True) is None
    whole = paths({**dict.fromkeys(names, 1), "model.pt": 92})
    assert watch.closed(93, whole).closed(99, whole).select(99) == sorted([*names, "model.pt"])


@pytest.mark.parametrize(
    "name", ["state.json", "progress.txt", "model.pt", "weights.npz", "study.db", "results.csv.gz"]
)
def test_a_first_file_that_may_be_a_state_is_a_checkpoint(name):
    assert Watch().closed(2, paths({name: 1})).closed(3, paths({name: 1})).select(3) == [name]


def test_settings_that_are_written_again_are_a_state():
    watch = Watch().closed(2, paths({"params.json": 1})).closed(3, paths({"params.json": 1}))
    assert watch.select(3) is None
    assert watch.closed(6, paths({"params.json": 5})).select(6) == ["params.json"]


def test_folder_of_a_step_is_no_checkpoint_while_it_holds_settings_alone():
    watch = Watch().closed(2, paths({"epoch_1/config.json": 1})).closed(90, paths({"epoch_1/config.json": 1}))
    assert watch.select(90) is None
    assert watch.why(90) == "epoch_1 holds settings, and no state yet"
    whole = paths({"epoch_1/config.json": 1, "epoch_1/model.safetensors": 91})
    assert watch.closed(92, whole).closed(98, whole).select(98) == ["epoch_1/config.json", "epoch_1/model.safetensors"]
    assert Watch().closed(2, paths({"step_5.yaml": 1})).closed(9, paths({"step_5.yaml": 1})).select(9) == [
        "step_5.yaml"
    ]


HF = {"checkpoint-10/model.safetensors": 1, "checkpoint-10/trainer_state.json": 2}


def test_callback_that_writes_after_the_marker_of_a_library_hinders_nothing():
    watch = Watch().closed(3, paths(HF)).closed(4, paths(HF))
    assert watch.select(4) == sorted(HF)
    watch.detector.settle(paths(HF))
    whole = {**HF, "checkpoint-10/adapter_model.bin": 4.5, "checkpoint-10/rng_state_1.pth": 5}
    watch.closed(6, paths(whole))
    assert watch.select(6) is None
    assert watch.closed(11, paths(whole)).select(11) == sorted(whole)
    watch.detector.settle(paths(whole))
    after = whole | {name.replace("-10", "-20"): at + 20 for name, at in whole.items()}
    assert watch.closed(26, paths(after)).select(26) == sorted(name for name in after if "-20" in name)


def test_folder_of_a_library_that_is_overwritten_waits_for_its_marker():
    last = {name.replace("-10", ""): at for name, at in HF.items()}
    torn = {**last, "checkpoint/model.safetensors": 10}
    watch = Watch().closed(3, paths(last)).closed(4, paths(last)).closed(11, paths(torn)).closed(90, paths(torn))
    assert watch.select(90) is None
    assert "so it marks nothing" in watch.why(90)
    restored = (
        Watch(AUTO, paths(last), set(last)).closed(3, paths(last)).closed(11, paths(torn)).closed(90, paths(torn))
    )
    assert restored.select(90) is None
    whole = paths({**torn, "checkpoint/trainer_state.json": 91})
    assert restored.closed(92, whole).closed(93, whole).select(93) == sorted(last)


@pytest.mark.parametrize(("every", "first"), [(2, 13), (12, 9), (50, 9)])
def test_file_that_is_written_after_every_step_does_not_hold_up_a_rarer_one(every, first):
    saves = range(4, 200, every)
    watch, taken = Watch(), []
    for now in range(1, 200):
        model = {"model.pt": file(now - (now - 4) % every - 0.5, size=1000)} if now >= 4 else {}
        folder = paths({"metrics.json": now - 0.01, **model})
        if (found := watch.closed(now, folder).select(now)) and model:
            assert found == ["metrics.json", "model.pt"]
            taken.append(now)
            watch.detector.settle(folder)
    # At first it is waited for whether other files follow. Metrics alone are not worth storing the model again so soon.
    assert taken[0] == first
    assert [at for at in taken if at > 15] == [at for at in saves if at > 15]
    later = {**folder, "metrics.json": file(199.5)}
    assert watch.look(200, later, ended=True).select(200, has_ended=True, has_finished=True) == sorted(folder)


def test_little_file_that_is_written_all_the_time_has_a_checkpoint_committed_once_a_minute():
    watch, taken = Watch(), []
    for now in range(1, 300):
        folder = paths({"state.json": now - 0.01, **({"best.npz": file(9.5, size=1000)} if now > 9 else {})})
        if watch.closed(now, folder).select(now) and now > 9:
            taken.append(now)
            watch.detector.settle(folder)
    assert taken == [15, 75, 135, 195, 255]


def test_rarer_files_wait_for_each_other_beside_one_that_is_written_after_every_step():
    watch, taken, halves = Watch(), [], {}
    for now in range(1, 100):
        if now % 20 == 5:
            halves["model.pt"] = file(now - 0.5, size=100)
        if now % 20 == 7:
            halves["optimizer.pt"] = file(now - 0.5, size=100)
        folder = paths({"metrics.json": now - 0.01, **halves})
        if (found := watch.closed(now, folder).select(now)) and halves:
            taken.append(now)
            assert found == ["metrics.json", "model.pt", "optimizer.pt"]
            watch.detector.settle(folder)
    assert taken == [12, 32, 52, 72, 92]


def test_files_that_are_saved_often_wait_for_each_other_beside_a_rarer_best_one():
    watch = Watch()
    for now in range(1, 200):
        best = {"best.pt": file(now - now % 60 + 0.1, size=100)} if now >= 60 else {}
        halves = {name: file(now - (now + late) % 3 - 0.2, size=100) for name, late in (("a.pt", 0), ("b.pt", 1))}
        watch.closed(now, paths({**halves, **best}))
        assert watch.select(now) is None, now


@pytest.mark.parametrize(("name", "at"), [("data.npy", 0.5), ("args.json", 20)])
def test_state_that_is_saved_often_is_committed_beside_what_was_written_once(name, at):
    watch, taken = Watch(), []
    for now in range(1, 60):
        once = {name: file(at, size=10**9)} if at <= now else {}
        folder = paths({**once, "model.pt": file(now - now % 3 + 0.1, size=10)})
        if watch.closed(now, folder).select(now):
            taken.append(now)
            watch.detector.settle(folder)
    assert len(taken) > 15


def test_file_that_is_written_after_every_step_beside_numbered_ones_is_kept_and_hinders_nothing():
    folder = paths({"metrics.json": 0.9, "step_10.pt": file(0.5, size=1000)})
    watch, taken = Watch(restored=folder, before=folder), []
    for now in range(1, 60):
        steps = {f"step_{step}.pt": file(step - 9.5, size=1000) for step in range(10, now + 10, 10)}
        found = watch.closed(now, paths({"metrics.json": now - 0.01, **steps})).select(now)
        if found:
            taken.append(found[-1])
            assert found[0] == "metrics.json"
    assert sorted(set(taken)) == [f"step_{step}.pt" for step in (20, 30, 40, 50, 60)]


def test_file_that_is_overwritten_with_each_step_is_not_taken_in_a_later_state_than_the_step():
    watch, taken = Watch(), []
    for now in range(1, 60):
        step = now - now % 3
        halves = {f"step_{step}.pt": file(step + 0.5), "optimizer.pt": file(step + 0.6)} if step else {}
        watch.closed(now, paths({"metrics.json": now - 0.01, **halves}))
        if selection := watch.detector.select_complete(now):
            taken.append(now)
            assert set(selection.restless) <= {"metrics.json"}
    assert len(taken) > 10


def test_files_that_are_overwritten_in_turn_wait_for_each_other():
    watch = Watch()
    for at in (1, 3, 5, 7):
        assert watch.closed(at + 1, paths({"model.bin": at, "optimizer.bin": at - 1})).select(at + 1) is None
        assert watch.closed(at + 2, paths({"model.bin": at, "optimizer.bin": at + 1})).select(at + 2) is None


def test_steps_that_are_counted_anew_in_another_folder_are_named():
    folds = {f"fold_0/epoch_{step}.json": step for step in (1, 2, 3)}
    watch = Watch().closed(5, paths(folds))
    assert watch.select(5) == ["fold_0/epoch_3.json"]
    watch.detector.settle(paths(folds))
    watch.closed(8, paths({**folds, "fold_1/epoch_1.json": 7}))
    assert "fold_1/epoch_1.json is of a lower step than fold_0/epoch_3.json" in watch.why(8)
    assert "whole" in watch.why(8)


def test_files_of_episodes_and_generations_are_numbered():
    for name in ("episode_{}.npz", "policy-episode-{}.pth", "generation_{}.pkl", "Größe 3, epoch {}.pt"):
        folder = paths({name.format(9): 1, name.format(10): 2})
        assert Watch().closed(5, folder).select(5) == [name.format(10)]


def test_a_folder_that_is_renamed_when_complete_needs_no_quiet_time():
    folder = paths({"4/_CHECKPOINT_METADATA": 1, "4/default/d": 1})
    assert Watch().closed(2, folder).select(2) == ["4/_CHECKPOINT_METADATA", "4/default/d"]


def test_files_of_a_program_that_died_are_complete_only_if_a_scan_saw_them_closed():
    early, late = {"model_1.pt": 1}, {"model_1.pt": 1, "model_2.pt": 7}
    watch = Watch().closed(2, paths(early)).look(8, paths(late), ended=True)
    assert watch.select(8, has_ended=True) == ["model_1.pt"]
    assert watch.detector.find_hindrance(8)[1] == "model_2.pt may be half written"
    seen = Watch().closed(2, paths(early)).closed(8, paths(late)).look(9, paths(late), ended=True)
    assert seen.select(9, has_ended=True) == ["model_2.pt"]
    shown = Watch().closed(2, paths(early)).look(8, paths(late), ended=True)
    assert shown.detector.uncertain_files == ["model_2.pt"]
    shown.detector.record_closed(["model_2.pt"])
    assert shown.select(8, has_ended=True) == ["model_2.pt"]


@pytest.mark.parametrize(("alive_until", "found"), [(2, None), (7, ["model.bin"])])
def test_quiet_time_after_the_death_of_the_program_does_not_count(alive_until, found):
    torn = listing(**{"model.bin": 1})
    watch = Watch(ExecOptions(Path("/c"), ("true",), quiet_seconds=5))
    for now in range(1, alive_until + 1):
        watch.look(now, torn)
    dead = watch.closed(8, torn, is_certain=False).look(9, torn, ended=True)
    assert dead.select(20, has_ended=True) == found


@pytest.mark.parametrize(("processes", "found"), [((), None), ((7,), ["model.h5"])])
def test_quiet_time_does_not_count_while_the_last_process_exits(processes, found):
    watch = Watch().closed(1, paths({"model.h5": 1}))
    torn = paths({"model.h5": 3})
    for now in (4, 20, 30):
        watch.closed(now, torn, is_certain=False, processes=processes)
    assert watch.select(30) == found


def test_a_file_that_was_closed_by_the_death_of_a_process_is_not_complete():
    watch = Watch().closed(2, listing(model=1), is_certain=False).closed(3, listing(model=1))
    assert watch.select(3) is None
    assert watch.closed(4, listing(model=3)).select(4) == ["model"]


@pytest.mark.parametrize(("age", "found"), [(0.5, None), (1.5, ["model.bin"])])
def test_an_empty_file_may_be_one_that_a_process_just_opens(age, found):
    folder = paths({"model.bin": file(0, size=0)})
    watch = Watch().closed(2, folder).closed(2 + age, folder)
    assert watch.look(3 + age, folder, ended=True).select(3 + age, has_ended=True) == found


def test_files_overwritten_in_place_are_incomplete_when_the_program_dies_between_them():
    first = paths({"model.bin": 1, "optimizer.bin": 2})
    watch = Watch().closed(3, first).closed(9, first)
    assert watch.select(9) == ["model.bin", "optimizer.bin"]
    watch.detector.settle(first)
    torn = paths({"model.bin": 10, "optimizer.bin": 2})
    watch.closed(12, torn).look(13, torn, ended=True)
    assert watch.select(13, has_ended=True) is None
    assert watch.select(13, has_ended=True, has_finished=True) == ["model.bin", "optimizer.bin"]


def test_settled_files_are_left_alone_until_they_change():
    one, two = paths({"checkpoint-1/a": 1}), paths({"checkpoint-1/a": 2})
    watch = Watch(QUIET).look(0, one).look(5, one)
    assert watch.select(5) == ["checkpoint-1/a"]
    watch.detector.settle(one)
    assert watch.look(20, one).select(20) is None
    assert watch.detector.find_hindrance(20) == (0.0, "")
    assert watch.look(21, two).look(26, two).select(26) == ["checkpoint-1/a"]


def test_a_lower_step_never_takes_the_place_of_a_committed_one():
    options = ExecOptions(Path("/c"), ("true",), quiet_seconds=0.3)
    first = {"checkpoint-5/m": 1, "checkpoint-5/DONE": file(1, size=0)}
    whole = {**first, "checkpoint-10/m": 3, "checkpoint-10/DONE": file(3, size=0)}
    # The program dies unseen soon after the commit, so that nothing shows again that the empty file is complete.
    torn = paths({**whole, "checkpoint-15/m": 3.2})
    dead = Watch(options).closed(1, paths(first)).closed(3, paths(whole))
    dead.detector.settle({path: entry for path, entry in paths(whole).items() if "-10" in path})
    assert dead.look(3.5, torn, ended=True).select(3.5, has_ended=True) is None


def test_files_from_before_the_program_are_not_its_own_unless_they_were_restored():
    before = paths({"code.py": 1, "last.pt": 1})
    assert Watch(AUTO, before).closed(5, before).select(5) is None
    again = {**before, "last.pt": file(9)}
    assert Watch(AUTO, before).closed(10, again).select(10) == ["last.pt"]
    beside = {**before, "best.pt": file(9)}
    assert Watch(AUTO, before, {"last.pt"}).closed(10, beside).select(10) == ["best.pt", "last.pt"]


@pytest.mark.parametrize(
    "times", [{"step-20.ckpt": 9, "step-40.ckpt": 2}, {"step-20.ckpt": 1, "step-40.ckpt": 2, "step-0.ckpt": 3}]
)
def test_the_highest_step_is_chosen_whatever_the_times_say(times):
    folder = paths({name: file(at, modified_ns=int(-at)) for name, at in times.items()})
    assert Watch().closed(20, folder).closed(30, folder).select(30) == ["step-40.ckpt"]


def test_step_zero_is_a_step():
    folder = paths({"step-0.ckpt": 1})
    watch = Watch().closed(2, folder).closed(8, folder)
    assert watch.detector.select_complete(8).checkpoint.step == 0


def test_an_unfit_step_does_not_discard_a_fit_one():
    folder = paths({"checkpoint-1/a": 1, "checkpoint-2/a": 2})
    folder["checkpoint-2/link"] = make_link("checkpoint-2/link", "/etc/passwd", ("/c",), 0, 2)
    watch = Watch(QUIET).look(0, folder).look(9, folder)
    assert watch.select(9) == ["checkpoint-1/a"]
    assert "links to '/etc/passwd'" in watch.detector.left_out["checkpoint-2/link"]


def test_a_number_above_the_step_of_a_program_that_counts_anew_is_said():
    old, new = paths({"step-60.ckpt": 1}), paths({"step-60.ckpt": 1, "step-20.ckpt": 5})
    watch = Watch(AUTO, old, set(old)).closed(6, new).closed(30, new)
    assert watch.select(30) is None
    assert "step-20.ckpt is of a lower step than step-60.ckpt, which was restored" in watch.why(30)
    assert "the program has not resumed from it" in watch.why(30)


def test_a_file_beside_a_step_is_kept_with_it():
    folder = paths({"epoch=0-step=20.ckpt": 1, "last.ckpt": 2, "train.log": 9, "best_model/model.zip": 2})
    watch = Watch().closed(3, folder).closed(9, folder)
    assert watch.select(9) == ["best_model/model.zip", "epoch=0-step=20.ckpt", "last.ckpt", "train.log"]


def test_a_file_newer_than_the_step_before_is_waited_for():
    first = {"step=20.ckpt": 1, "last.ckpt": 2}
    watch = Watch().closed(3, paths(first)).closed(9, paths(first))
    torn = paths({**first, "step=40.ckpt": 10})
    assert watch.closed(11, torn).select(11) is not None  # step 20, as it was
    watch.detector.settle(paths(first))
    assert watch.closed(12, torn).select(12) is None
    whole = paths({**first, "step=40.ckpt": 10, "last.ckpt": 12})
    assert watch.closed(13, whole).select(13) == ["last.ckpt", "step=40.ckpt"]


def test_a_file_in_place_beside_an_older_best_step_is_progress():
    first = paths({"epoch=0-step=20.ckpt": 1, "last.ckpt": 2})
    watch = Watch(AUTO, first, set(first)).closed(3, first)
    later = paths({"epoch=0-step=20.ckpt": 1, "last.ckpt": 20})
    assert watch.closed(21, later).select(21) == ["epoch=0-step=20.ckpt", "last.ckpt"]


def test_a_small_file_that_changes_beside_a_large_step_costs_no_commit():
    first = {"step=20.ckpt": file(1, size=1000), "metrics.json": file(2, size=10)}
    watch = Watch(AUTO, paths(first), set(first)).closed(3, paths(first))
    assert watch.closed(9, paths({**first, "metrics.json": file(8, size=11)})).select(9) is None


def test_a_copy_of_the_last_step_is_waited_for():
    whole = paths({"step-20.ckpt": 1, "last.ckpt": 1})
    watch = Watch().closed(3, whole)
    watch.detector.settle(whole)
    emptied = paths({"step-20.ckpt": 1, "step-40.ckpt": 4, "last.ckpt": file(4, size=0)})
    assert watch.closed(5, emptied).closed(5.5, emptied).select(5.5) is None
    filled = paths({"step-20.ckpt": 1, "step-40.ckpt": 4, "last.ckpt": 6})
    assert watch.closed(6.5, filled).select(6.5) == ["last.ckpt", "step-40.ckpt"]


def test_a_database_that_is_open_at_all_times_hinders_nothing():
    held = {"study.db": "process 7 (python)"}
    watch = Watch().look(1, paths({"study.db": 1}), writers=held)
    folder = paths({"study.db": 2, "step=20.ckpt": 3})
    watch.look(4, folder, writers=held).look(10, folder, writers=held)
    assert watch.select(10) == ["step=20.ckpt"]
    assert "at all times" in watch.detector.left_out["study.db"]


def test_a_log_that_grows_hinders_nothing():
    watch = Watch()
    logs = (
        "log.txt",
        "log_2.txt",
        "out/train_log.txt",
        "stdout.txt",
        "tb/events.out.tfevents.1",
        "train.log",
        "loss.png",
    )
    for second in range(10):
        grown = dict.fromkeys(logs, second)
        watch.look(second + 0.5, paths({"model.bin": 1, **grown}), writers=dict.fromkeys(logs, "process 7 (python)"))
    assert watch.select(9.5) == sorted(["model.bin", *logs])


POINTERS = {"global_step20/w": 1, "latest": 2}


def test_a_step_waits_until_its_pointer_names_it():
    watch = Watch().closed(3, paths(POINTERS), pointers={"latest": "global_step20"})
    assert watch.select(3) == ["global_step20/w", "latest"]
    watch.detector.settle(paths(POINTERS))
    both = {**POINTERS, "global_step40/w": 5}
    watch.closed(6, paths(both), pointers={"latest": "global_step20"})
    watch.closed(90, paths(both), pointers={"latest": "global_step20"})
    assert watch.select(90) is None
    assert watch.why(90) == "latest names step 20, not global_step40"
    watch.closed(92, paths({**both, "latest": 91}), pointers={"latest": "global_step40"})
    assert watch.select(92) == ["global_step40/w", "latest"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("step_20", "step_20"),
        ("/mnt/model_7/out/step_20/state.pkl\n", "step_20"),
        ('{"path": "out/step_20/state.pkl", "time": "2026"}', "step_20"),
        ('{\n  "lr": 0.1,\n  "file": "step_20/state.pkl"\n}', "step_20"),
        ('{"step": 20, "file": "x"}', "20"),
        ("checkpoint: step_20/", "step_20"),
        ('model_checkpoint_path: "ckpt-20"\nall_model_checkpoint_paths: "ckpt-10"', "ckpt-20"),
    ],
)
def test_pointer_may_name_a_file_within_the_folder_of_a_step(text, named):
    pointers = {"latest.json": read_pointer(text)}
    assert named in pointers["latest.json"]
    first = {"step_20/state.pkl": 1, "latest.json": 2}
    watch = Watch().closed(3, paths(first), pointers=pointers)
    assert watch.select(3) == ["latest.json", "step_20/state.pkl"]
    watch.detector.settle(paths(first))
    later = paths({**first, "step_40/state.pkl": 10})
    watch.closed(11, later, pointers=pointers).look(12, later, ended=True, pointers=pointers)
    assert watch.select(12, has_ended=True) is None  # a program that follows its pointer would not find step 20
    assert watch.detector.find_hindrance(12)[1] == "latest.json names step 20, not step_40"


def test_a_step_is_not_committed_while_its_pointer_is_gone():
    watch = Watch().closed(3, paths(POINTERS), pointers={"latest": "global_step20"})
    assert watch.select(3) is not None
    gone = paths({"global_step20/w": 1, "global_step40/w": 5})
    watch.detector.settle(paths(POINTERS))
    assert watch.closed(6, gone).look(7, gone, ended=True).select(7, has_ended=True) is None


def test_a_link_to_the_newest_step_is_a_pointer():
    folder = paths({"global_step20/w": 1})
    folder["latest"] = make_link("latest", "/c/global_step20", ("/c",), 0, 2 * SECOND)
    assert Watch().closed(3, folder).select(3) == ["global_step20/w", "latest"]


def test_the_best_checkpoint_comes_along_with_the_newest():
    folder = paths({"checkpoint-20/w": 1, "checkpoint-40/w": 3})
    folder["best"] = make_link("best", "checkpoint-20", ("/c",), 0, 2 * SECOND)
    watch = Watch().closed(4, folder).closed(10, folder)
    assert watch.select(10) == ["best", "checkpoint-20/w", "checkpoint-40/w"]
    named = paths({"checkpoint-20/trainer_state.json": 1, "checkpoint-40/trainer_state.json": 3})
    watch = Watch().closed(4, named, pointers={"checkpoint-40/trainer_state.json": "checkpoint-20"})
    assert watch.select(4) == ["checkpoint-20/trainer_state.json", "checkpoint-40/trainer_state.json"]


def test_orbax_is_complete_at_its_rename_whatever_the_marker_says():
    options = ExecOptions(Path("/c"), ("true",), checkpoint="*", marker="*/_CHECKPOINT_METADATA")
    assert Watch(options).closed(9, paths({"4/_CHECKPOINT_METADATA": 1, "4/default/d": 8})).select(9) is not None


def test_a_folder_that_names_no_pattern_says_so():
    watch = Watch(QUIET).closed(1, listing(other=1)).closed(9, listing(other=1))
    assert watch.why(9) == "no name fits --checkpoint checkpoint-*"


def test_numbers_of_a_pattern_are_steps_and_names_without_one_lie_beside():
    options = ExecOptions(Path("/c"), ("true",), checkpoint="model_*.pt", step_from=re.compile(r"model_(\d+)"))
    found = arrange_folder(paths({"model_9.pt": 1, "model_best.pt": 2, "model_10.pt": 3}), options, {})
    assert [(item.step, item.roots) for item in found.checkpoints] == [(9, ("model_9.pt",)), (10, ("model_10.pt",))]
    assert sorted(found.beside) == ["model_best.pt"]


def test_the_whole_folder_is_one_checkpoint_where_a_marker_lies_in_it():
    options = ExecOptions(Path("/c"), ("true",), marker="DONE", step_from=re.compile(r"epoch=(\d+)"))
    (found,) = arrange_folder(paths({"epoch=3.ckpt": 1, "epoch=12.ckpt": 1, "DONE": 2}), options, {}).checkpoints
    assert (found.step, len(found.files), found.missing_marker) == (12, 3, "")


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [("a-1/DONE", "a-*/DONE", True), ("a-1/b/DONE", "a-*/DONE", False), ("DONE", "*/DONE", False), ("A", "a", False)],
)
def test_a_star_does_not_reach_over_a_slash(path, pattern, fits):
    assert matches_pattern(path, pattern) is fits


@pytest.mark.parametrize(
    ("options", "sign", "pointers"),
    [(AUTO, "latest", {"latest": "checkpoint-2"}), (MARKED, "checkpoint-2/DONE", {})],
    ids=["pointer", "marker"],
)
def test_a_file_was_closed_if_its_sign_came_after_the_last_scan_of_open_files(options, sign, pointers):
    open_files = {"checkpoint-2/w": "process 7 (python)"}
    begun, done = paths({"checkpoint-2/w": 1}), paths({"checkpoint-2/w": 1, sign: 2})
    late = Watch(options).look(1, begun, writers=open_files).look(3, done, ended=True, pointers=pointers)
    assert late.select(3, has_ended=True) == sorted(["checkpoint-2/w", sign])
    early = Watch(options).look(2, done, writers=open_files, pointers=pointers)
    early.look(3, done, ended=True, pointers=pointers)
    assert early.select(3, has_ended=True) is None
    assert early.detector.find_hindrance(4)[1] == "checkpoint-2/w was held open for writing by process 7 (python)"
