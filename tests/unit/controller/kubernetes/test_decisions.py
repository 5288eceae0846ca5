"""What the controller decides about a cluster, without one.

| agent pod | its Workflow | deleted |
|---|---|---|
| Failed | live, ours | yes |
| Failed | over, or not ours | no |
| Failed, being deleted | live | no |
| Running | live | no |

| last look | Workflow since | look again |
|---|---|---|
| none | any | at once |
| any | changed | after 3 s |
| incomplete | same | after 3 s |
| complete | same, live | after 30 s |
| complete | same, over | never |
| any | only our annotations changed | as if nothing had |
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.builders.argo_objects import agent_pod, workflow
from tiphys_controller.kubernetes.agent_pods import parse_stuck_agent_pod, select_agent_pods_to_delete
from tiphys_controller.kubernetes.events.recorder import StorageLook, is_long_finished, is_look_due
from tiphys_controller.kubernetes.workflow_view import build_live_workflow, build_workflow_view, possible_run_names

from tiphys.kube import Object

ADMITTED = {"type": "Plugin", "outputs": {"parameters": [{"name": "run-id", "value": "hot"}]}}
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("phase", "running", "expected"),
    [
        ("", True, "Pending"),
        ("Pending", True, "Pending"),
        ("Running", True, "Running"),
        ("Succeeded", False, "Succeeded"),
        ("Failed", False, "Failed"),
        ("Error", False, "Error"),
    ],
)
def test_a_workflow_runs_until_argo_says_that_it_is_over(phase: str, running: bool, expected: str) -> None:
    found = build_live_workflow(workflow(phase=phase))
    assert (found.name, found.namespace, found.uid) == ("digits-1", "ml", "uid-of-digits-1")
    assert (found.running, found.phase) == (running, expected)


def test_the_facts_of_a_workflow_are_read_from_where_argo_keeps_them() -> None:
    seen = build_workflow_view(
        workflow(
            store="s3://ml-runs/tiphys",
            run="digits-7",
            phase="Failed",
            spec={"shutdown": "Stop"},
            status={"message": "child failed", "finishedAt": "2026-05-04T11:00:00Z", "progress": "1/2"},
        )
    )
    assert (seen.pipeline, seen.store, seen.run) == ("digits", "s3://ml-runs/tiphys", "digits-7")
    assert (seen.phase, seen.message, seen.shutdown, seen.finished) == ("Failed", "child failed", "Stop", True)
    assert seen.narrated_annotations == {"title", "description"}
    assert seen.annotations == {"title": "digits", "description": "Pipeline `digits`."}


def deleted_at(time: str, phase: str = "Failed") -> Object:
    pod = agent_pod(phase=phase)
    return {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": time}}


@pytest.mark.parametrize(
    ("pod", "alive", "deleted"),
    [
        (agent_pod(), True, True),
        (agent_pod(), False, False),
        (agent_pod(owner="uid-of-another"), True, False),
        (agent_pod(phase="Running"), True, False),
        (deleted_at("2026-05-04T11:59:30Z"), True, False),
        (deleted_at("2026-05-04T11:58:30Z"), True, True),
        (deleted_at("2026-05-04T11:58:30Z", phase="Running"), True, True),
        (deleted_at("2026-05-04T11:58:30Z", phase="Running"), False, False),
        ({**agent_pod(), "metadata": {**agent_pod()["metadata"], "ownerReferences": []}}, True, False),
    ],
    ids=[
        *("failed", "workflow over", "another workflow", "works"),
        *("being deleted", "overdue", "overdue on a lost node", "overdue, workflow over", "of nobody"),
    ],
)
def test_a_failed_agent_pod_of_a_live_workflow_is_deleted(pod: Object, alive: bool, deleted: bool) -> None:
    failed = parse_stuck_agent_pod(pod)
    found = select_agent_pods_to_delete([failed] if failed else [], {"uid-of-digits-1"} if alive else set(), NOW)
    assert [one.name for one in found] == (["digits-1-1340600742-agent"] if deleted else [])


def test_the_reason_of_the_pod_is_kept() -> None:
    failed = parse_stuck_agent_pod(agent_pod())
    assert failed is not None
    assert failed.reason == "Evicted The node was low on resource: memory."


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"run": "digits-7"}, ["digits-7"]),
        ({}, ["digits-1", "digits-1-uid-o"]),
        ({"status": {"nodes": {"n": ADMITTED}}}, ["hot", "digits-1", "digits-1-uid-o"]),
    ],
    ids=["as a parameter", "as the plugin makes it", "as the plugin answered"],
)
def test_the_names_that_a_run_may_have(given: dict[str, Any], names: list[str]) -> None:
    assert possible_run_names(build_workflow_view(workflow(**given))) == names


@pytest.mark.parametrize(
    ("last_phase", "complete", "phase", "waited", "due"),
    [
        ("Running", True, "Failed", 2, False),
        ("Running", True, "Failed", 4, True),
        ("Running", False, "Running", 4, True),
        ("Running", True, "Running", 20, False),
        ("Running", True, "Running", 31, True),
        ("Failed", True, "Failed", 10**6, False),
        ("Failed", False, "Failed", 4, True),
    ],
)
def test_storage_is_looked_at_again_once_a_look_is_due(
    last_phase: str, complete: bool, phase: str, waited: float, due: bool
) -> None:
    last = StorageLook(100.0, build_workflow_view(workflow(phase=last_phase)), complete)
    assert is_look_due(build_workflow_view(workflow(phase=phase)), last, 100.0 + waited) == due


def test_a_workflow_is_looked_at_when_it_is_first_seen() -> None:
    assert is_look_due(build_workflow_view(workflow()), None, 0.0)


def test_our_own_annotations_are_no_reason_to_look_again() -> None:
    last = StorageLook(0.0, build_workflow_view(workflow()), True)
    annotated = workflow()
    annotated["metadata"]["annotations"]["workflows.argoproj.io/title"] = "digits-1"
    assert not is_look_due(build_workflow_view(annotated), last, 10.0)


@pytest.mark.parametrize(
    ("phase", "ended", "past"),
    [("Running", None, False), ("Failed", timedelta(minutes=59), False), ("Failed", timedelta(minutes=61), True)],
)
def test_a_workflow_counts_as_long_finished_after_an_hour(phase: str, ended: timedelta | None, past: bool) -> None:
    status = {"finishedAt": (NOW - ended).strftime("%Y-%m-%dT%H:%M:%SZ")} if ended else {}
    assert is_long_finished(build_workflow_view(workflow(phase=phase, status=status)), NOW) == past


@pytest.mark.parametrize("text", ["soon", "2026-05-04", "2020-05-04T12:00:00"])
def test_a_time_that_argo_did_not_write_counts_as_none(text: str) -> None:
    found = workflow(phase="Failed", status={"finishedAt": text})
    view = build_workflow_view(found)
    assert (view.finished_at, is_long_finished(view, NOW)) == (None, False)
    assert build_live_workflow(found).finished_at is None
