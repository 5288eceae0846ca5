"""Other ways to go on with a run than doing what is missing, as a person meets them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stories import small_pipeline

from .conftest import Answer, Command, invoke, snapshot


@pytest.fixture(scope="module")
def failed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose last step failed; its path is in the programs of the pipeline, so it stays there."""
    folder = tmp_path_factory.mktemp("failed") / "desk"
    file = small_pipeline.write(folder / "code")
    assert invoke(["run", file, "--run", "tiny-1", "-p", "fail=yes"], folder).code == 1
    shutil.copytree(folder, folder.with_name("kept"))
    return folder


@pytest.fixture
def failed(failed_once: Path, tiphys: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory with the run that failed, as the run left it."""
    monkeypatch.chdir(failed_once)
    yield failed_once
    monkeypatch.undo()
    shutil.rmtree(failed_once)
    shutil.copytree(failed_once.with_name("kept"), failed_once)


def steps(answer: Answer) -> dict[str, str]:
    """Decisions by step, from a plan."""
    return {line.split()[0]: line.split()[2] for line in answer.out.splitlines()[1:4]}


def test_a_run_is_begun_once_for_a_key_and_its_steps_run_again_if_asked(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    begin = ("run", file, "--run", "tiny-1", "--idempotency-key", "nightly")
    answers = [tiphys(*begin), tiphys(*begin), tiphys(*begin, "-p", "steps=2")]
    assert [(answer.code, answer.out) for answer in answers] == [(0, "tiny-1\n"), (0, "tiny-1\n"), (4, "")]
    assert "started before, under the same idempotency key" in answers[1].err
    assert "start run tiny-1" in answers[2].error
    assert "next: tiphys resume tiny-1 --from fit" in tiphys("plan", "tiny-1", "--from", "fit").err

    answer = tiphys("resume", "tiny-1", "--from", "fit")

    assert (answer.code, steps(answer)) == (0, {"prepare": "skip", "fit": "run", "report": "run"})
    assert small_pipeline.ran(tmp_path / "code") == ["prepare", "fit", "report", "fit", "report"]
    assert "attempt 2, submission 2, from scratch: done" in tiphys("lineage", "tiny-1").out


def test_a_fork_takes_over_what_is_finished_and_trains_on(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    first = tiphys("run", file, "--run", "tiny-1", "-o", "json")
    assert first.code == 0
    document = json.loads(first.out)
    assert (document["kind"], document["run"], document["workflow_name"]) == ("StartedRun", "tiny-1", "tiny-1")

    asked = ("fork", "tiny-1", "-p", "steps=30", "--run", "tiny-longer", "--idempotency-key", "longer")
    forked = tiphys(*asked)

    assert (forked.code, forked.out) == (0, "tiny-longer\n")
    assert "fork: fit: parameters steps 20 → 30" in forked.err
    assert "finished in run tiny-1, and continued from the last checkpoint: fit (step 20)" in forked.err
    assert "add --from fit to train from the beginning" in forked.err
    started = json.loads(tiphys(*asked, "-o", "json").out)
    assert (started["run"], started["parent"], started["created"]) == ("tiny-longer", "tiny-1", False)
    plan = json.loads(tiphys("fork", "tiny-1", "-p", "steps=10", "--dry-run", "-o", "json").out)
    assert {one["name"]: one["decision"] for one in plan["steps"]}["fit"] == "run"
    planned = tiphys("fork", "tiny-1", "-p", "steps=10", "--dry-run")
    assert "; from step 20, saved" in planned.out
    assert "fit (step 20)" in planned.err
    assert "(step" not in tiphys("fork", "tiny-1", "-p", "steps=10", "--from", "fit", "--dry-run").err
    again = tiphys(*asked)
    assert (again.code, again.out) == (0, "tiny-longer\n")
    assert "started before, under the same idempotency key" in again.err
    assert small_pipeline.ran(tmp_path / "code") == ["prepare", "fit", "report", "fit", "report"]
    assert "from step 20 of attempt 1 of tiny-1/fit: done" in tiphys("lineage", "tiny-longer").out
    assert set(steps(tiphys("plan", "tiny-longer")).values()) == {"skip"}


def test_a_repaired_file_goes_on_with_what_it_changes(tiphys: Command, failed: Path) -> None:
    file = failed / "code" / "tiny.py"
    before = snapshot(failed / ".tiphys" / "store")
    file.write_text(
        file.read_text()
        .replace('"report", HERE]', '"report", HERE, "no"]')
        .replace('    args=["{{inputs.parameters.fail}}"],\n    inputs=[Artifact', "    inputs=[Artifact")
    )

    planned = tiphys("plan", "tiny-1", file)
    assert (planned.code, steps(planned)) == (0, {"prepare": "skip", "fit": "skip", "report": "run"})
    assert "warn: report: template" in planned.err
    assert f"next: tiphys resume tiny-1 {file}" in planned.err
    refused = tiphys("resume", "tiny-1", file, "--drift", "template=refuse")
    assert refused.code == 4
    assert "run tiny-1 may not go on with this: report: template" in refused.error
    assert snapshot(failed / ".tiphys" / "store") == before

    answer = tiphys("resume", "tiny-1", file)
    assert (answer.code, steps(answer)) == (0, {"prepare": "skip", "fit": "skip", "report": "run"})
    assert "warn: report: template" in answer.err
    assert small_pipeline.ran(failed / "code") == ["prepare", "fit", "report", "report"]
    assert tiphys("verify", "tiny-1").code == 0


def test_a_changed_file_keeps_the_value_of_a_parameter_that_it_declares_without_one(
    tiphys: Command, tmp_path: Path
) -> None:
    file = small_pipeline.write(tmp_path / "code")
    begin, end = "arguments=[", " for name, value in parameters.items()]"
    declared = 'arguments=[Parameter(name="steps"), Parameter(name="fail", value="no")]'
    text = file.read_text()
    file.write_text(text.replace(text[text.index(begin) : text.index(end) + len(end)], declared))
    assert tiphys("run", file, "--run", "tiny-1", "-p", "steps=2").code == 0

    planned = tiphys("plan", "tiny-1", file)

    assert (planned.code, set(steps(planned).values())) == (0, {"skip"})


@pytest.mark.parametrize("command", ["plan", "resume", "fork"])
def test_a_changed_file_keeps_the_values_of_the_run_and_says_which_it_has_itself(
    tiphys: Command, failed: Path, command: str
) -> None:
    file = failed / "code" / "tiny.py"
    file.write_text(file.read_text().replace('"steps": "20"', '"steps": "30"'))

    answer = tiphys(command, "tiny-1", file, *([] if command == "plan" else ["--dry-run"]))

    assert "parameters keep the values of run tiny-1: steps=20 (the file: 30), fail=yes (the file: no)" in answer.err
    assert f"with those of the file: tiphys fork tiny-1 {file} -p steps=30 -p fail=no" in answer.err
    if command == "fork":
        taken = tiphys("fork", "tiny-1", file, "-p", "steps=30", "-p", "fail=no", "--dry-run")
        assert "parameters keep" not in taken.err


def test_plan_says_what_a_resume_will_do_about_a_damaged_end_record(tiphys: Command, failed: Path) -> None:
    [record] = (failed / ".tiphys" / "store").glob("control/runs/*/attempts/report/000000001.end.json")
    run = record.parents[2].name
    record.write_text('{"half of a rec')
    refused = tiphys("resume", run)

    answers = [tiphys("plan", run), tiphys("resume", run, "--dry-run"), tiphys("plan", run, "-o", "json")]

    assert refused.code == 5
    for answer in answers:
        assert answer.code == refused.code
        assert f"`tiphys resume` will refuse this: {refused.error.removeprefix('tiphys: ')}" in " ".join(
            answer.err.split()
        )
        assert "next: tiphys resume" not in answer.err
    assert json.loads(answers[2].out)["refusal"]["exit_code"] == 5
    assert tiphys("resume", run, "--dry-run", "--force").code == 0
    assert tiphys("plan", run, "--from", "report").code == 0


def test_plan_says_what_a_resume_will_do_about_a_change_that_the_policy_forbids(tiphys: Command, failed: Path) -> None:
    file = failed / "code" / "tiny.py"
    file.write_text(file.read_text().replace('"report", HERE]', '"report", HERE, "no"]'))
    asked = ("tiny-1", file, "--drift", "template=refuse")
    refused, planned = tiphys("resume", *asked), tiphys("plan", *asked)
    assert (refused.code, planned.code) == (4, 4)
    assert f"`tiphys resume` will refuse this: {refused.error.removeprefix('tiphys: ')}" in " ".join(
        planned.err.split()
    )
