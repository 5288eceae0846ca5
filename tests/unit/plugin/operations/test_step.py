"""A `Step` through admit and conclude: verification, outputs, replay.

| found in storage after the program ended well | conclude answers                      |
|------------------------------------------------|---------------------------------------|
| every declared output                          | Succeeded, outputs by value and key   |
| one missing                                    | Failed, names it                      |
| outputs of a failed try only                   | Failed: the last try made none        |
| a parameter too large, or not text             | Failed: declare it as an artifact     |
| standard output that another task reads        | Succeeded, with it as an output       |
"""

import hashlib
from dataclasses import replace

import pytest
from support.stories.plugin import QUICK, World, artifacts, keys, outputs, phase, prep, records, resumed, said, world

from tiphys.errors import ObjectMissingError
from tiphys.faults import InjectedFaultError
from tiphys.recording import node_outputs
from tiphys.records import AttemptEnd, AttemptEndOutcome, Output, OutputKind, OutputObject
from tiphys.records.base import MAX_RECORD_BYTES
from tiphys.store import outputs_digest


def ran(here: World, **changes):
    """A flow whose program wrote all that is declared."""
    flow = here.submit(prep(**changes))
    reply = flow.admit("prep")
    flow.write_output(reply, "0/parameters/rows", b"1797\n")
    flow.write_output(reply, "0/artifacts/data/a.bin", b"aa")
    flow.write_output(reply, "0/artifacts/data/b.bin", b"b")
    return flow


def test_an_output_is_found_under_the_suffix_of_its_path(here):
    flow = here.submit(prep(suffixes={"data": ".json"}))
    reply = flow.admit("prep")
    flow.write_output(reply, "0/parameters/rows", b"1797")
    key = flow.write_output(reply, "0/artifacts/data.json", b"{}")
    assert artifacts(flow.conclude("prep")) == {"data": here.store.artifact_key(key)}


def end_of(here: World, attempt: int = 1) -> dict:
    return records(here.store, f"control/runs/digits-abc12/attempts/prep/{attempt:09d}.end")[0]


def test_step_without_checkpoints_or_gpus_gets_no_patch_and_no_lineage(here):
    answer = outputs(here.submit(prep()).admit("prep"))
    assert (answer["run"], answer["attempt"]) == ("true", "1")
    assert (answer["lineage"], answer["resume-from"], answer["checkpoint-uri"], answer["pod-patch"]) == ("", "", "", "")


def test_an_answer_holds_only_what_its_template_declares(here):
    flow = here.submit(prep())
    document = flow.document(flow.body("admit", "prep"))
    document["template"]["outputs"] = {"parameters": [{"name": "run"}, {"name": "attempt"}]}
    assert outputs(flow.world.core.execute_document(document)) == {"run": "true", "attempt": "1"}


def test_result_whose_end_no_call_has_recorded_is_not_computed_again(here):
    """As after `argo terminate`, which runs no exit handler."""
    ran(here).pod("prep", 1, None, "Succeeded")
    reply = resumed(here, prep()).admit("prep")
    assert outputs(reply)["run"] == "false"
    assert said(reply) == "Adopted from attempt 1"


def test_outputs_are_verified_recorded_and_answered(here):
    verdict = ran(here).conclude("prep")
    assert phase(verdict) == "Succeeded"
    assert outputs(verdict) == {"rows": "1797"}
    root = "data/runs/digits-abc12/outputs/prep/000000001/0"
    assert artifacts(verdict) == {"data": here.store.artifact_key(f"{root}/artifacts/data")}
    rows, data = end_of(here)["outputs"]
    assert (rows["value"], rows["directory"]) == ("1797", False)
    assert data["directory"] is True
    version = {info.key: info.version for info in here.store.list(root)}
    assert data["objects"] == [
        {"key": key, "size": size, "sha256": hashlib.sha256(content).hexdigest(), "version": version[key]}
        for key, size, content in (
            (f"{root}/artifacts/data/a.bin", 2, b"aa"),
            (f"{root}/artifacts/data/b.bin", 1, b"b"),
        )
    ]


def test_done_projection_is_the_digest_of_the_listing(here):
    ran(here).conclude("prep")
    prefix = "data/runs/digits-abc12/outputs/prep/000000001/"
    rows = [(info.key.removeprefix(prefix), info.size, info.version) for info in here.store.list(prefix)]
    assert [row[0] for row in rows] == ["0/artifacts/data/a.bin", "0/artifacts/data/b.bin", "0/parameters/rows"]
    expected = f"control/runs/digits-abc12/done/prep/000000001-{outputs_digest(rows)}"
    assert keys(here.store, "control/runs/digits-abc12/done/") == [expected]


def test_a_result_that_lost_an_object_before_its_projection_gets_no_projection(here, monkeypatch):
    flow = ran(here)
    monkeypatch.setenv("TIPHYS_FAILPOINTS", "conclude.after_end=raise@1")
    with pytest.raises(InjectedFaultError):
        flow.conclude("prep")
    here.store.delete(next(key for key in keys(here.store, "data/runs/digits-abc12/outputs/") if key.endswith("a.bin")))
    flow.conclude("prep")
    assert end_of(here)["outcome"] == "done"
    assert keys(here.store, "control/runs/digits-abc12/done/") == []


def test_repeated_conclude_gives_the_recorded_answer_and_writes_nothing(here):
    flow = ran(here)
    first = flow.conclude("prep")
    before = keys(here.store)
    assert flow.conclude("prep") == first
    assert flow.conclude("prep", status="Failed", exit_code="1") == first, "argo retry changes no verdict"
    assert keys(here.store) == before


@pytest.mark.parametrize(("text", "value"), [(b"7", "7"), (b"7\n", "7"), (b"7\n\n", "7\n"), (b"", ""), (b" a ", " a ")])
def test_parameter_loses_one_final_newline_as_in_argo(here, text, value):
    flow = here.submit(prep(artifacts=()))
    flow.write_output(flow.admit("prep"), "0/parameters/rows", text)
    assert outputs(flow.conclude("prep")) == {"rows": value}


def test_parameter_that_changes_after_it_was_hashed_has_the_hash_of_its_recorded_value(here, monkeypatch):
    flow, read = here.submit(prep(artifacts=())), here.store.read
    flow.write_output(flow.admit("prep"), "0/parameters/rows", b"7")
    monkeypatch.setattr(here.store, "read", lambda key: b"10\n" if key.endswith("/rows") else read(key))
    assert outputs(flow.conclude("prep")) == {"rows": "10"}
    [[stored]] = [output["objects"] for output in end_of(here)["outputs"]]
    assert (stored["size"], stored["sha256"]) == (3, hashlib.sha256(b"10\n").hexdigest())


def test_missing_output_fails_the_step_and_is_named(here):
    flow = here.submit(prep())
    flow.write_output(flow.admit("prep"), "0/parameters/rows", b"1")
    verdict = flow.conclude("prep")
    assert phase(verdict) == "Failed"
    assert "declared output artifact 'data' is missing" in said(verdict)
    assert end_of(here)["cause"] == "output_missing"
    assert keys(here.store, "control/runs/digits-abc12/done/") == []


def test_an_output_that_is_removed_while_it_is_verified_is_missing(here, monkeypatch):
    flow = ran(here)

    def removed(key, *_):
        raise ObjectMissingError(f"{key} does not exist")

    monkeypatch.setattr(here.store, "chunks", removed)
    assert phase(flow.conclude("prep")) == "Failed"
    assert (end_of(here)["cause"], end_of(here)["exit_code"]) == ("output_missing", 0)


@pytest.mark.parametrize("seen_tries", [[], [9]], ids=["no pod", "the last pod is gone"])
def test_outputs_of_the_last_try_count(here, seen_tries):
    flow = here.submit(prep(parameters=()))
    reply = flow.admit("prep")
    for number in seen_tries:
        flow.pod("prep", 1, retry=None, tries=number, phase="Failed", exit_code=1)
    flow.write_output(reply, "0/artifacts/data", b"half")
    flow.write_output(reply, "10/artifacts/data", b"whole")
    flow.write_output(reply, "9/artifacts/data", b"other")
    assert artifacts(flow.conclude("prep"))["data"].endswith("/000000001/10/artifacts/data")


def test_outputs_of_a_failed_try_never_stand_for_the_last_one(here):
    flow = here.submit(prep(parameters=()))
    flow.write_output(flow.admit("prep"), "0/artifacts/data", b"half")
    flow.pod("prep", 1, retry=None, tries=0, phase="Failed", exit_code=1)
    flow.pod("prep", 1, retry=None, tries=1, phase="Succeeded", exit_code=0)
    assert "'data' is missing" in said(flow.conclude("prep"))


def test_large_parameter_is_refused_with_the_limit(tmp_path):
    here = world(tmp_path, settings=replace(QUICK, parameter_max_bytes=10))
    flow = here.submit(prep(artifacts=()))
    flow.write_output(flow.admit("prep"), "0/parameters/rows", b"x" * 11)
    verdict = flow.conclude("prep")
    assert "'rows' has 11 bytes, at most 10 fit in a Workflow; declare it as an artifact" in said(verdict)
    assert end_of(here)["cause"] == "user_error"


def test_a_parameter_of_the_largest_size_is_accepted(tmp_path):
    here = world(tmp_path, settings=replace(QUICK, parameter_max_bytes=10))
    flow = here.submit(prep(artifacts=()))
    flow.write_output(flow.admit("prep"), "0/parameters/rows", b"x" * 10)
    assert outputs(flow.conclude("prep")) == {"rows": "x" * 10}


FLIP = {"has_result": True, "parameters": (), "artifacts": ()}


def test_standard_output_that_another_task_reads_is_recorded_and_taken_over(here):
    flow = here.submit(prep(**FLIP))
    flow.admit("prep")
    flow.pod("prep", 1, None, "Succeeded")
    assert outputs(flow.conclude("prep", result="heads\n")) == {"result": "heads\n"}
    assert outputs(flow.conclude("prep", result="tails")) == {"result": "heads\n"}, "the first one counts"
    again = resumed(here, prep(**FLIP))
    assert outputs(again.admit("prep"))["run"] == "false"
    assert outputs(again.conclude("prep", status="Skipped")) == {"result": "heads\n"}


def test_a_result_without_standard_output_is_not_reused_where_one_is_read(here):
    silent = here.submit(prep(**{**FLIP, "has_result": False, "share": True}))
    silent.admit("prep")
    silent.conclude("prep")
    shared = here.submit(prep(**FLIP, share=True), name="digits-other", uid="uid-2")
    assert outputs(shared.admit("prep"))["run"] == "true"
    again = here.submit(prep(**{**FLIP, "has_result": False, "share": True}), name="digits-third", uid="uid-3")
    assert outputs(again.admit("prep"))["run"] == "false", "a result that is enough is reused"


def test_large_standard_output_is_refused_with_the_limit(tmp_path):
    here = world(tmp_path, settings=replace(QUICK, parameter_max_bytes=10))
    flow = here.submit(prep(**FLIP))
    flow.admit("prep")
    verdict = flow.conclude("prep", result="é" * 6)
    assert "standard output, which another task reads as outputs.result, has 12 bytes, at most 10" in said(verdict)
    assert end_of(here)["cause"] == "user_error"


def test_no_other_call_records_the_end_of_a_step_whose_standard_output_is_read(here):
    flow = here.submit(prep(**FLIP))
    flow.admit("prep")
    flow.pod("prep", 1, None, "Succeeded")
    flow.finalize("Failed")
    assert not records(here.store, "control/runs/digits-abc12/attempts/prep/000000001.end")
    again = resumed(here, prep(**FLIP))
    assert outputs(again.admit("prep"))["attempt"] == "2"
    assert end_of(here)["outcome"] == "failed"


def test_more_files_than_a_record_can_list_are_refused_with_the_remedy(here, monkeypatch):
    flow = ran(here)
    size = sum(len(one.key) + node_outputs._RECORDED_OBJECT_BYTES for one in here.store.list("data/runs/"))
    monkeypatch.setattr(node_outputs, "_MAX_RECORDED_BYTES", size - 1)

    assert phase(flow.conclude("prep")) == "Failed"
    end = end_of(here)
    assert end["cause"] == "user_error"
    assert end["message"].startswith("its outputs have 3 files, more than the record of a result can list")


def test_the_largest_accepted_result_fits_a_record():
    key = f"data/runs/{'r' * 63}/outputs/{'s' * 63}/000000001/artifacts/d/{'x' * 40}"
    count = node_outputs._MAX_RECORDED_BYTES // (len(key) + node_outputs._RECORDED_OBJECT_BYTES)
    found = tuple(OutputObject(key=key, size=2**40, sha256="a" * 64) for _ in range(count))
    end = AttemptEnd(
        run="r", step="s", attempt=1, submission=1, outcome=AttemptEndOutcome.DONE,
        outputs=(Output(name="d", kind=OutputKind.ARTIFACT, key=key, directory=True, objects=found),),
    )  # fmt: skip

    assert len(end.to_bytes()) <= MAX_RECORD_BYTES


def test_parameter_that_is_not_text_is_refused(here):
    flow = here.submit(prep(artifacts=()))
    flow.write_output(flow.admit("prep"), "0/parameters/rows", b"\xff\xfe")
    assert "not UTF-8" in said(flow.conclude("prep"))


def test_failed_program_fails_the_step_with_its_cause(here):
    flow = here.submit(prep())
    flow.admit("prep")
    flow.pod("prep", 1, retry=None, phase="Failed", exit_code=137, reason="OOMKilled")
    verdict = flow.conclude("prep", status="Failed", exit_code="137")
    assert phase(verdict) == "Failed"
    assert "out of memory" in said(verdict)
    assert "tiphys resume digits-abc12" in said(verdict)
    assert end_of(here)["exit_code"] == 137


def test_verdict_waits_for_the_pod_to_end(here):
    flow = ran(here)
    flow.pod("prep", 1, retry=None, phase="Running")
    assert phase(flow.conclude("prep")) == "Pending"
    flow.pod("prep", 1, retry=None, phase="Succeeded", exit_code=0)
    assert phase(flow.conclude("prep")) == "Succeeded"


def test_conclude_of_a_step_that_was_never_admitted_says_so(here):
    verdict = here.submit(prep()).conclude("prep", status="Skipped")
    assert phase(verdict) == "Failed"
    assert "never started" in said(verdict)


def test_attempt_that_argo_skipped_is_no_success(here):
    flow = here.submit(prep())
    flow.admit("prep")
    verdict = flow.conclude("prep", status="Omitted", exit_code="-1")
    assert phase(verdict) == "Failed"
    assert "did not start it (Omitted)" in said(verdict)


def test_step_without_outputs_is_done(here):
    flow = here.submit(prep(parameters=(), artifacts=()))
    flow.admit("prep")
    assert phase(flow.conclude("prep")) == "Succeeded"
    assert end_of(here)["outcome"] == "done"


@pytest.mark.parametrize(
    ("end", "admit_again"),
    [("done", "Succeeded"), ("failed", "Failed")],
)
def test_admit_asked_again_by_argo_retry_never_runs_an_ended_attempt(here, end, admit_again):
    flow = ran(here)
    flow.conclude("prep", status="Succeeded" if end == "done" else "Failed", exit_code="1")
    again = flow.admit("prep")
    assert phase(again) == admit_again
    if end == "done":
        assert outputs(again)["run"] == "false"
    else:
        assert "tiphys resume digits-abc12" in said(again)
    assert len(keys(here.store, "control/runs/digits-abc12/attempts/prep/")) == 2
