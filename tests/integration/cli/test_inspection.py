"""Commands that look at a finished run: data on stdout, in every form, and nothing written."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from support.builders.lineage import RUN, STEP, claim_of, commit, end_of, ref, write_claim, write_run
from support.stories import small_pipeline

from tiphys.records import utc_now
from tiphys.store import DirectoryStore, RunLayout

from .conftest import Command, Finished, snapshot


def test_run_prints_the_name_on_stdout_and_tells_the_rest_on_stderr(finished: Finished) -> None:
    answer = finished.answer
    assert (answer.code, answer.out) == (0, "tiny-done\n")
    assert "fit: Succeeded" in answer.err
    assert "tiphys get tiny-done" in answer.err.splitlines()[-1]
    assert small_pipeline.ran(finished.folder / "code") == ["prepare", "fit", "report"]


@pytest.mark.parametrize(
    "arguments",
    [["runs"], ["get", "tiny-done"], ["plan", "tiny-done"], ["lineage", "tiny-done"], ["events", "tiny-done"]],
)
def test_looking_writes_nothing(arguments: list[str], tiphys: Command, finished: Finished) -> None:
    before = snapshot(finished.store)
    answer = tiphys(*arguments, "--store", finished.store)
    assert answer.code == 0
    assert answer.out
    assert snapshot(finished.store) == before


def test_runs_lists_phase_and_progress(tiphys: Command, finished: Finished) -> None:
    header, row = tiphys("runs", "--store", finished.store).out.splitlines()
    assert header.split()[:4] == ["RUN", "PIPELINE", "PHASE", "STEPS"]
    assert row.split()[:4] == ["tiny-done", "tiny", "Succeeded", "3/3"]


def test_runs_are_filtered_and_the_rest_is_counted(tiphys: Command, finished: Finished) -> None:
    def names(*options: str) -> list[str]:
        answer = tiphys("runs", "--store", finished.store, "-o", "json", *options)
        assert answer.code == 0, answer.err
        return [run["run"] for run in json.loads(answer.out)["runs"]]

    everything = names()
    assert names("--state", "succeeded", "--since", "1d", "--sort", "activity", "--limit", "1") == everything[:1]
    assert names("--state", "Running") == names("--pipeline", "other") == []
    note = tiphys("runs", "--store", finished.store, "--pipeline", "other").err
    assert f"0 of {len(everything)} runs shown" in note


def test_runs_of_an_empty_store_says_how_to_begin(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = tiphys("runs", "--store", "empty")
    assert (answer.code, answer.out) == (0, "")
    assert "tiphys run FILE" in answer.err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["runs"], "RunList"),
        (["get", "tiny-done"], "Run"),
        (["plan", "tiny-done"], "Plan"),
        (["lineage", "tiny-done"], "Lineage"),
    ],
)
@pytest.mark.parametrize(("form", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_documents_name_their_version_and_kind(
    arguments: list[str], kind: str, form: str, load: Callable[[str], Any], tiphys: Command, finished: Finished
) -> None:
    document = load(tiphys(*arguments, "-o", form, "--store", finished.store).out)
    assert (document["apiVersion"], document["kind"]) == ("tiphys.dev/v1beta1", kind)


def test_get_shows_attempts_and_outputs(tiphys: Command, finished: Finished) -> None:
    out = tiphys("get", "tiny-done", "--store", finished.store).out
    assert "Succeeded" in out.splitlines()[0]
    assert ["report", "total", "40000"] in [line.split() for line in out.splitlines()]


def test_plan_of_a_finished_run_skips_everything_and_costs_few_requests(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("plan", "tiny-done", "--store", finished.store)
    assert [line.split()[2] for line in answer.out.splitlines()[1:]] == ["skip", "skip", "skip"]
    assert "0 of 3 steps would run" in answer.err
    assert "tiphys resume" not in answer.err


def test_plan_says_from_which_checkpoint_a_training_goes_on(tiphys: Command, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 1200), written_at=utc_now() - timedelta(minutes=12, seconds=30))
    store.create(RunLayout(RUN).attempt_end(STEP, 1), end_of(1).to_bytes())

    assert "; from step 1,200, saved 12m " in tiphys("plan", RUN, "--store", store.url).out
    again = tiphys("plan", RUN, "--from", STEP, "--store", store.url, "-o", "json")
    assert json.loads(again.out)["steps"][0]["starts_from"] == {
        "checkpoint": "",
        "global_step": 0,
        "committed_at": None,
    }


def test_resuming_a_finished_run_submits_nothing(tiphys: Command, finished: Finished) -> None:
    before = snapshot(finished.store)
    answer = tiphys("resume", "tiny-done", "--store", finished.store)
    assert answer.code == 0
    assert "nothing is missing" in answer.err
    assert snapshot(finished.store) == before


def test_lineage_lists_every_checkpoint(tiphys: Command, finished: Finished) -> None:
    lines = tiphys("lineage", "tiny-done", "--store", finished.store).out.splitlines()
    assert lines[0] == "tiny-done/fit"
    assert [line.split("step ")[1].split()[0] for line in lines if "● step" in line] == ["5", "10", "15", "20"]


def test_lineage_as_a_picture_goes_to_stdout_or_a_file(tiphys: Command, finished: Finished, tmp_path: Path) -> None:
    printed = tiphys("lineage", "tiny-done", "-o", "svg", "--store", finished.store)
    written = tiphys("lineage", "tiny-done", "-o", "svg", "--output", "a.svg", "--store", finished.store)
    assert ElementTree.fromstring(printed.out).tag.endswith("svg")
    dash = tiphys("lineage", "tiny-done", "-o", "svg", "--output", "-", "--store", finished.store)
    assert (written.out, (tmp_path / "a.svg").read_text()) == ("", printed.out)
    assert dash.out == printed.out


def test_events_are_in_order_and_one_json_document_per_line(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("events", "tiny-done", "-o", "json", "--store", finished.store)
    events = [json.loads(line) for line in answer.out.splitlines()]
    assert events[0]["name"] == "run.submitted"
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    assert sum(event["name"] == "checkpoint.committed" for event in events) == 4


def test_following_a_run_that_has_ended_ends(tiphys: Command, finished: Finished) -> None:
    followed = tiphys("events", "tiny-done", "--follow", "--store", finished.store)
    assert followed.out == tiphys("events", "tiny-done", "--store", finished.store).out


def test_the_store_may_come_from_the_environment(
    tiphys: Command, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIPHYS_STORE", str(finished.store))
    answer = tiphys("runs")
    assert answer.code == 0
    assert f"store {finished.store} (from TIPHYS_STORE)" in answer.err


def test_quiet_leaves_stderr_empty_wherever_it_stands(tiphys: Command, finished: Finished) -> None:
    before = tiphys("--quiet", "plan", "tiny-done", "--store", finished.store)
    behind = tiphys("plan", "tiny-done", "--store", finished.store, "--quiet")
    assert before == behind
    assert (before.code, before.err) == (0, "")


def test_output_to_a_pipe_has_no_colour(tiphys: Command, finished: Finished) -> None:
    for arguments in (["get", "tiny-done"], ["lineage", "tiny-done"], ["plan", "tiny-done"]):
        answer = tiphys(*arguments, "--store", finished.store)
        assert "\x1b" not in answer.out + answer.err


def test_compile_prints_a_workflow_that_needs_no_store_of_its_own(tiphys: Command, finished: Finished) -> None:
    file = finished.folder / "code" / "tiny.py"
    answer = tiphys("compile", file, "-p", "steps=7", "--store", "s3://ml-runs/tiphys")
    workflow = yaml.safe_load(answer.out)
    given = {p["name"]: p.get("value") for p in workflow["spec"]["arguments"]["parameters"]}
    assert (workflow["kind"], given["steps"]) == ("Workflow", "7")
    assert workflow["metadata"]["annotations"]["tiphys.dev/store"] == "s3://ml-runs/tiphys"
    as_json = tiphys("compile", file, "-p", "steps=7", "--store", "s3://ml-runs/tiphys", "-o", "json")
    assert json.loads(as_json.out) == workflow


def test_doctor_finds_a_good_folder_usable(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    answer = tiphys("doctor", "new", "-o", "json")
    document = json.loads(answer.out)
    assert (answer.code, document["ready"]) == (0, True)
    assert list((tmp_path / "new").rglob("*.json")) == []


def test_output_of_a_pipeline_file_is_kept_out_of_the_manifest(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path)
    file.write_text("print('hello from the file')\n" + file.read_text())
    answer = tiphys("compile", file, "-o", "json", "--store", "s3://ml-runs/tiphys")
    assert json.loads(answer.out)["kind"] == "Workflow"
    assert "hello from the file" in answer.err


def test_version_and_help(tiphys: Command) -> None:
    assert tiphys("--version").out.startswith("tiphys ")
    assert " 75  storage or a service is unavailable" in tiphys("--help").out


@pytest.mark.parametrize(
    "name", ["demo", "run", "compile", "plan", "resume", "runs", "get", "lineage", "events", "doctor"]
)
def test_every_command_shows_examples(name: str, tiphys: Command) -> None:
    answer = tiphys(name, "--help")
    assert answer.code == 0
    assert f"  tiphys {name}" in answer.out.partition("Examples:")[2]
