"""The judge of `bench.beside` tells planted histories apart, and a training with another order has another digest.

| history | verdict |
|---|---|
| killed, goes on, digest as undisturbed | right, with the steps that were trained twice |
| succeeded with another digest | wrong silently |
| no digest, or a Workflow that failed | failed |
| a Workflow that has not ended in time | not ended |
| the process ended by itself, the kill came too late, or nothing was seen of the fault | not counted |
"""

import json
import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from bench.beside import trainer
from bench.beside.__main__ import reference
from bench.beside.contenders import CONTENDERS, Case
from bench.beside.faults import FAULTS
from bench.beside.judge import History, Note, happened, judge, read_note
from bench.beside.report import block, merged, picture
from bench.beside.trial import Trial

EXPECTED, OTHER = "feed", "dead"
CASE = Case("beside-1", "registry.example.com/image:1", "s3://bucket/tiphys", "bucket", kills_in_save=True)
FIRST, SECOND = "pod-1.7", "pod-2.7"
SETTINGS = {
    "steps": 60, "step_seconds": 0.25, "every": 10, "fault_at_step": 25, "requeue": "1s", "controller": "argo:v1",
}  # fmt: skip
MACHINE = {"cores": 2, "cpu": "AMD EPYC Processor"}


def steps(life: str, first: int, last: int, begin: float) -> list[Note]:
    return [Note(begin + step - first, "step", step, life) for step in range(first, last + 1)]


def killed(result: str = EXPECTED, phases: tuple[str, ...] = ("Succeeded",), **more: Any) -> History:
    """Killed after step 5; the next process begins after 10 s with step 4."""
    notes = [*steps(FIRST, 1, 5, 0.0), *steps(SECOND, 4, 9, 14.0)]
    notes += [Note(20.0, "done", 9, SECOND, result)] if result else []
    return History(notes, phases, **{"evidence": "SIGKILL", "target": FIRST, **more})


def test_steps_trained_twice_and_the_time_to_the_next_new_step_are_counted() -> None:
    verdict = judge(killed(actions=["`argo retry`"]), EXPECTED)
    assert verdict == {
        "outcome": "right",
        "trained_again": 2,
        "seconds": 12.0,  # from step 5, at 4 s, to step 6, at 16 s
        "actions": ["`argo retry`"],
        "evidence": "SIGKILL",
    }


@pytest.mark.parametrize(
    ("history", "outcome"),
    [
        (killed(OTHER), "wrong silently"),
        (killed(""), "failed"),
        (killed(phases=("Failed",)), "failed"),
        (killed(phases=("Succeeded", "Running")), "not ended after 5 min"),
        (killed(phases=()), "failed"),
    ],
    ids=["another digest", "no digest", "failed", "one still runs", "no Workflow left"],
)
def test_a_training_that_does_not_end_right_is_told_apart(history: History, outcome: str) -> None:
    assert judge(history, EXPECTED)["outcome"] == outcome


def test_submission_that_is_wrong_makes_both_wrong() -> None:
    history = killed(phases=("Succeeded", "Succeeded"), target="")
    both = History([*history.notes, Note(30.0, "done", 9, "pod-3.7", OTHER)], history.phases, "two Workflows")
    assert judge(both, EXPECTED)["outcome"] == "wrong silently"
    assert judge(both, EXPECTED)["seconds"] is None


def test_a_training_without_a_new_step_has_no_time_for_it() -> None:
    history = History(steps(FIRST, 1, 5, 0.0), ["Failed"], "SIGKILL", FIRST)
    assert judge(history, EXPECTED)["seconds"] is None


def test_a_fault_that_did_not_end_its_process_is_not_counted() -> None:
    assert happened(killed())
    assert not happened(killed(evidence=""))
    assert not happened(killed(target="pod-9.7"))
    assert not happened(killed(target=SECOND)), "it ended by itself"
    late = [Note(5.0, "killing", 5, FIRST), Note(5.1, "missed", 5, FIRST)]
    assert happened(History(late[:1], ["Succeeded"], "SIGKILL", FIRST))
    assert not happened(History(late, ["Succeeded"], "SIGKILL", FIRST))


def test_the_table_names_outcomes_counts_and_what_was_not_tried() -> None:
    trial = judge(killed(actions=["`argo retry`"]), EXPECTED)
    run: dict[str, Any] = {"machine": MACHINE, "settings": SETTINGS, "left_out": {"Kueue": "not installed"}}
    run["trials"] = {"by_hand": {"kill": trial}, "tiphys": {"save": {"not_counted": "it was late"}}}
    lines = block(run)
    assert lines[0] == "| | `argo retry` by hand | Tiphys |"
    row = f"| {FAULTS['kill'].words} | right, 2 again, 12.0 s; by hand: `argo retry` | not measured |"
    assert row in lines
    assert f"| {FAULTS['save'].words} | no checkpoints | not counted: it was late |" in lines
    assert lines[-1] == "Not tried: Kueue: not installed."
    assert "12 s without a new step" in picture(run)


def test_a_run_replaces_only_the_trials_that_it_made() -> None:
    before = {"trials": {"retry": {"kill": 1, "pod": 1}, "tiphys": {"kill": 1}}, "settings": "old"}
    after = merged(before, {"trials": {"retry": {"kill": 2}}, "settings": "new"})
    assert after == {"trials": {"retry": {"kill": 2, "pod": 1}, "tiphys": {"kill": 1}}, "settings": "new"}


@pytest.mark.parametrize(("name", "calls"), [("by_hand", 2), ("retry", 0)])
def test_a_person_retries_a_failed_workflow_where_the_contender_needs_one(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(Trial, "_argo", lambda _, *arguments: asked.append(arguments))
    trial = Trial(None, None, CONTENDERS[name], FAULTS["kill"], CASE, ["beside-1-x"])
    retried = [trial._retry_by_hand([phase]) for phase in ("Failed", "Error", "Succeeded")]
    assert retried == [bool(calls), bool(calls), False]
    assert asked == [("retry", "beside-1-x")] * calls
    assert trial.actions == ["`argo retry`"] * calls


class Bucket:
    """The four calls of an S3 client that a training makes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:  # noqa: N803  names of boto3
        self.objects[Key] = Body

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        return {"Body": BytesIO(self.objects[Key])}

    def list_objects_v2(self, Bucket: str, Prefix: str) -> dict[str, Any]:  # noqa: N803
        return {"Contents": [{"Key": key} for key in sorted(self.objects) if key.startswith(Prefix)]}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, and trainings that are small and do not wait."""
    monkeypatch.setattr(trainer, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "WORDS", 64)
    return Bucket()


def journal(bucket: Bucket) -> trainer.Journal:
    return trainer.Journal(bucket, "bucket", "case", "pod-1")


def test_a_folder_of_checkpoints_goes_on_from_its_newest_file(bucket: Bucket, tmp_path: Path) -> None:
    assert trainer.digest(trainer.train_with_files(journal(bucket), tmp_path)) == reference()
    (tmp_path / "checkpoint-000060.pkl").unlink()
    bucket.objects.clear()
    assert trainer.digest(trainer.train_with_files(journal(bucket), tmp_path)) == reference()
    notes = [read_note(key.removeprefix("case/journal/")) for key in bucket.objects]
    assert [note.step for note in notes] == list(range(51, 61))
    assert {(note.kind, note.pod) for note in notes} == {("step", "pod-1")}


def test_processes_with_the_same_pod_and_id_are_told_apart(bucket: Bucket) -> None:
    for _ in range(2):
        journal(bucket).note("begin", 0)
    first, second = (read_note(key.removeprefix("case/journal/")) for key in bucket.objects)
    assert (first.pod, first.process) == (second.pod, second.process) == ("pod-1", os.getpid())
    assert first.life != second.life


def test_objects_of_checkpoints_go_on_and_a_wrong_bit_stays_in_the_result(bucket: Bucket) -> None:
    whole = trainer.train_with_objects(journal(bucket), "case/checkpoints/")
    assert trainer.digest(whole) == reference()
    state = pickle.loads(bucket.objects.pop("case/checkpoints/checkpoint-000060.pkl"))
    state["weights"][7] ^= 1
    state["step"] = 50
    bucket.objects["case/checkpoints/checkpoint-000055.pkl"] = pickle.dumps(state)
    assert trainer.digest(trainer.train_with_objects(journal(bucket), "case/checkpoints/")) != reference()


@pytest.mark.parametrize("change", ["lost", "doubled", "swapped"])
def test_a_step_that_is_lost_or_doubled_changes_the_digest(bucket: Bucket, change: str) -> None:
    order = {"lost": [1, 3], "doubled": [1, 2, 2, 3], "swapped": [2, 1, 3]}[change]
    right, wrong = trainer.initial(), trainer.initial()
    for step in (1, 2, 3):
        trainer.advance(right, step)
    for step in order:
        trainer.advance(wrong, step)
    assert trainer.digest(right) != trainer.digest(wrong)


def test_a_save_is_known_to_be_under_way_by_its_file(tmp_path: Path) -> None:
    share = trainer.share_of_file(tmp_path / "file", 100)
    assert share() == 0
    (tmp_path / "file").write_bytes(b"x" * 40)
    assert share() == 0.4
    (tmp_path / "file").write_bytes(b"x" * 140)
    assert share() > 1


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_is_a_workflow_that_runs_the_same_program(name: str) -> None:
    manifest = CONTENDERS[name].compile(CASE)
    text = json.dumps(manifest)
    templates = {template["name"]: template for template in manifest["spec"]["templates"]}
    program = json.dumps(Path(trainer.__file__).read_text())
    assert program[1:-1] in text
    assert all(word in text for word in ("BESIDE_KILL_IN_SAVE", "BESIDE_POD", "tiphys-store"))
    assert ("tiphys" in manifest["metadata"].get("labels", {}).get("tiphys.dev/pipeline", "")) is False
    assert ("retryStrategy" in json.dumps(templates["main"])) is (name in ("retry", "files", "objects"))
