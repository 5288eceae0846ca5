"""The benchmark of Workflows on Argo: what it reads of documents, what it compares, and how reports are merged.

| of a Workflow and its pods | read as |
|---|---|
| phase Succeeded, Failed or Error | the end, once |
| pod of Argo's agent | not a step |
| nodes that are compressed or offloaded | said so, and not counted |
"""

import base64
import gzip
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bench.aims import verdicts
from bench.argo.documents import Timeline, describe_failure, per_step, record_delays, recorder_delays, stored_bytes
from bench.argo.empty_plugin import EMPTY_PLUGIN, executor_plugin, open_nodes
from bench.argo.installation import agreed_requeue, read_controller
from bench.argo.report import aims, label, merged, values
from bench.argo.workflows import Twins
from bench.samples import summary

from tiphys.errors import UsageError

TWINS = Twins("registry.example.com/image:1", "s3://ml-runs/tiphys")


def workflow(phase: str = "", nodes: int = 0, **status: Any) -> dict[str, Any]:
    found = {f"id-{number}": {"name": f"n{number}", "phase": "Succeeded"} for number in range(nodes)}
    return {"metadata": {"name": "w"}, "status": {"phase": phase, "nodes": found, **status}}


def pod(name: str, phase: str = "Pending", component: str = "") -> dict[str, Any]:
    labels = {"workflows.argoproj.io/component": component} if component else {}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}


def test_times_are_those_of_the_first_change_that_shows_them() -> None:
    timeline = Timeline(100.0)
    for now, phase in ((100.5, ""), (101.0, "Running"), (130.0, "Succeeded"), (131.0, "Succeeded")):
        timeline.see_workflow(workflow(phase), now)
    timeline.see_pod(pod("agent", "Running", component="agent"), 102.0)
    for now, phase in (
        (103.0, "Pending"),
        (104.0, "Running"),
        (105.0, "Running"),
        (110.0, "Failed"),
        (111.0, "Failed"),
    ):
        timeline.see_pod(pod("first", phase), now)
    timeline.see_pod(pod("second"), 117.0)
    assert (timeline.seconds, timeline.first_pod_seconds, timeline.next_pod_seconds()) == (30.0, 4.0, 7.0)
    assert list(timeline.pods) == ["first", "second"]


def test_a_record_comes_as_long_after_its_pod_as_the_clocks_say() -> None:
    document = workflow("Succeeded")
    document["status"]["nodes"] = {
        str(number): {"name": name, "type": kind, "finishedAt": finished}
        for number, (name, kind, finished) in enumerate(
            [
                ("w.prep", "Pod", "2026-01-01T00:00:10Z"),
                ("w.task(1:b.c)(0)", "Pod", "2026-01-01T00:00:20Z"),
                ("w.task(1:b.c)", "Retry", "2026-01-01T00:00:25Z"),
                ("w.unrecorded", "Pod", "2026-01-01T00:00:20Z"),
                ("w.runs", "Pod", None),
            ]
        )
    }
    second = {"w.prep": 11.5, "w.task(1:b.c)": 20.25, "w.runs": 30.0}
    written = {name: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=one) for name, one in second.items()}
    assert record_delays(document, written) == [1.5, 0.25]


def test_the_recorder_is_measured_from_the_version_that_shows_the_end_of_the_last_try() -> None:
    timeline = Timeline(0.0)
    for moment, (first, second) in {
        100.0: ("Failed", "Running"),
        102.0: ("Failed", "Succeeded"),
        104.0: ("Failed", "Succeeded"),
    }.items():
        document = workflow("Running")
        document["status"]["nodes"] = {
            "0": {"name": "w.task(0)", "type": "Pod", "phase": first},
            "1": {"name": "w.task(1)", "type": "Pod", "phase": second},
            "2": {"name": "w.task", "type": "Retry", "phase": "Succeeded"},
            "3": {"name": "w.unrecorded", "type": "Pod", "phase": "Succeeded"},
        }
        timeline.see_workflow(document, moment)
    written = {"w.task": datetime.fromtimestamp(1_000_103.5, UTC)}
    assert recorder_delays(timeline.shown, written, epoch=-1_000_000.0) == [1.5]


def test_a_workflow_that_has_not_ended_has_no_duration() -> None:
    timeline = Timeline(0.0)
    timeline.see_workflow(workflow("Running"), 1.0)
    timeline.see_pod(pod("first", "Running"), 2.0)
    timeline.see_pod(pod("second"), 3.0)
    with pytest.raises(ValueError, match="has not ended"):
        _ = timeline.seconds
    with pytest.raises(ValueError, match="the first pod did not end"):
        timeline.next_pod_seconds()


def test_the_size_is_given_for_the_largest_version_and_over_time() -> None:
    timeline = Timeline(0.0)
    versions = [workflow("Running", nodes) for nodes in range(100)] + [workflow("Succeeded", 3)]
    for now, document in enumerate(versions, start=1):
        timeline.see_workflow(document, float(now))
    size = timeline.size()
    assert (size["nodes"], size["versions"], len(size["seconds_bytes_nodes"])) == (3, 101, 21)
    assert size["bytes"] == stored_bytes(versions[-1])
    assert size["most_bytes"] == stored_bytes(versions[-2])
    assert size["seconds_bytes_nodes"][1] == [6.0, stored_bytes(versions[5]), 5]
    assert (size["compressed"], size["offloaded"]) == (False, False)


def test_nodes_elsewhere_are_counted() -> None:
    timeline = Timeline(0.0)
    compressed = base64.b64encode(gzip.compress(b"{}")).decode()
    timeline.see_workflow(workflow("Succeeded", compressedNodes=compressed, offloadNodeStatusVersion="fnv:1"), 1.0)
    assert [timeline.size()[name] for name in ("nodes", "compressed", "offloaded")] == [0, True, True]


def test_bytes_are_those_of_compact_json_in_utf_8() -> None:
    assert stored_bytes({"a": [1, "é"]}) == len('{"a":[1,"é"]}') + 1


def test_the_cost_per_step_leaves_out_the_base_cost() -> None:
    assert per_step(many=2 + 10 * 8, one=2 + 8, steps=10) == 8


def test_a_failure_names_the_nodes_that_failed() -> None:
    document = workflow("Failed", 2)
    document["status"]["nodes"]["id-1"] |= {"phase": "Error", "message": "no plugin executed the template"}
    assert describe_failure(document) == "w ended as Failed\n  n1: Error no plugin executed the template"


def test_a_line_and_its_twin_have_the_same_programs_in_the_same_order() -> None:
    forms = TWINS.line(3)
    plain = forms["plain"]["spec"]["templates"]
    assert [task["name"] for task in plain[0]["dag"]["tasks"]] == ["s0", "s1", "s2"]
    assert [task.get("depends") for task in plain[0]["dag"]["tasks"]] == [None, "s0", "s1"]
    programs = {form: _commands(manifest) for form, manifest in forms.items()}
    assert len(programs["plain"]) == 3
    assert programs["plain"] == programs["empty"]
    assert [one[:2] for one in programs["tiphys"]] == [one[:2] for one in programs["plain"]]
    gated = forms["empty"]["spec"]["templates"][0]["dag"]["tasks"]
    assert [(task["name"], task.get("depends")) for task in gated[:4]] == [
        ("s0-gate", None),
        ("s0", "s0-gate"),
        ("s1-gate", "s0"),
        ("s1", "s0 && s1-gate"),
    ]


@pytest.mark.parametrize("forms", [TWINS.fan(30), TWINS.items(30)], ids=["fan", "items"])
def test_forms_of_a_wide_fan_out_have_the_same_limit(forms: dict[str, Any]) -> None:
    limits = [
        [one["parallelism"] for one in form["spec"]["templates"] if "parallelism" in one] for form in forms.values()
    ]
    assert limits == [[10], [10]]


@pytest.mark.parametrize("exits", [True, False])
def test_a_training_exits_once_in_both_forms_or_in_none(exits: bool) -> None:
    commands = [_commands(form) for form in TWINS.train(exits=exits).values()]
    assert [["exit 75" in " ".join(one) for one in found] for found in commands] == [[exits], [exits]]


def test_open_nodes_are_those_of_the_empty_plugin_without_an_answer() -> None:
    tasks = {"a": {"plugin": {EMPTY_PLUGIN: {}}}, "b": {"plugin": {EMPTY_PLUGIN: {}}}, "c": {"plugin": {"tiphys": {}}}}
    assert open_nodes({"spec": {"tasks": tasks}, "status": {"nodes": {"a": {"phase": "Succeeded"}}}}) == ["b"]
    assert open_nodes({"spec": {}}) == []


def test_the_empty_plugin_has_what_argo_requires_of_a_sidecar() -> None:
    text = executor_plugin("registry.example.com/image:1")["data"]["sidecar.container"]
    assert all(word in text for word in ("containerPort", "requests", "limits", "securityContext", EMPTY_PLUGIN))


def deployment(**variables: str) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in variables.items()]
    container = {"name": "main", "image": "quay.io/argoproj/workflow-controller:v4.1.2", "env": env}
    return {
        "metadata": {"name": "c", "namespace": "argo"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def test_the_controller_says_its_requeue_time_and_whether_nodes_are_offloaded() -> None:
    offloads = {"data": {"persistence": "nodeStatusOffLoad: true\n"}}
    read = read_controller([deployment(DEFAULT_REQUEUE_TIME="2s")], lambda _: offloads)
    assert (read.requeue, read.offloading) == ("2s", "configured")
    assert read_controller([deployment()], lambda _: None).requeue == "10s"
    assert read_controller([deployment()], lambda _: {"data": {}}).offloading == "not configured"
    assert read_controller([], lambda _: None).requeue == ""


def test_a_requeue_time_is_given_where_it_cannot_be_read_and_never_contradicted() -> None:
    assert (agreed_requeue("2s", ""), agreed_requeue("", "1s"), agreed_requeue("2s", "2s")) == ("2s", "1s", "2s")
    with pytest.raises(UsageError, match="give it as REQUEUE=2s"):
        agreed_requeue("", "")
    with pytest.raises(UsageError, match="REQUEUE=1s, but DEFAULT_REQUEUE_TIME of Argo's controller is 2s"):
        agreed_requeue("2s", "1s")


def part(**line: Any) -> dict[str, Any]:
    return {"line": line}


def test_number_that_misses_its_aim_is_marked() -> None:
    found = values(
        {
            "train": part(nodes_of_train=8),
            "line": part(
                bytes_per_step=4400,
                bytes_per_step_over_plain=1.25,
                added_seconds_per_step=summary([0.1, 0.2, 0.24]),
            ),
        }
    )
    assert list(verdicts(found, aims(quick=False))) == [
        "MISSED  added_seconds_per_step = 0.2  [0.15 … 0.22, n=3]  (≤ 0.15)",
        "MISSED  nodes_of_train = 8  (≤ 6)",
        "        bytes_per_step = 4400  (not judged)",
        "kept    bytes_per_step_over_plain = 1.25  (≤ 1.3)",
    ]


def test_a_quick_run_is_judged_by_names_that_a_full_run_has() -> None:
    assert aims(quick=True).keys() < aims(quick=False).keys()


def test_a_line_and_its_twin_are_retried_both_or_not_at_all() -> None:
    forms = TWINS.line(3)
    retried = {
        form: [one["name"] for one in forms[form]["spec"]["templates"] if "retryStrategy" in one]
        for form in ("plain", "tiphys")
    }
    assert retried == {form: ["s0", "s1", "s2"] for form in retried}


def test_a_run_replaces_its_parts_and_leaves_all_others() -> None:
    first = {"noise": 1, "parts": {"line": part(a=1), "fan": part(b=1)}}
    both = merged(merged({}, label("sidecar", "2s"), first), label("agent", "1s"), {"noise": 2, "parts": {}})
    again = merged(both, label("sidecar", "2s"), {"noise": 3, "parts": {"line": part(a=2)}})
    assert list(again["runs"]) == ["agent 1s", "sidecar 2s"]
    assert again["runs"]["sidecar 2s"] == {"noise": 3, "parts": {"line": part(a=2), "fan": part(b=1)}}


def _commands(manifest: dict[str, Any]) -> list[list[str]]:
    containers = [one["container"] for one in manifest["spec"]["templates"] if "container" in one]
    return [container["command"] for container in containers]
