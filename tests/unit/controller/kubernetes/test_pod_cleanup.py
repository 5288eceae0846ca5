"""What makes the pods of a training on several nodes ends with its Workflow.

| Workflow | its Job |
|---|---|
| runs | stays |
| is stopped, or over | deleted, with its pods |
| is over, and the Job as well | stays, for its logs |
| runs, and a member's node is lost | deleted, since it would wait for that node; an elastic one goes on without |
| has no training on several nodes | nothing is asked about it |
"""

import json
from datetime import UTC, datetime

import pytest
from support.builders.argo_objects import put, workflow
from support.servers.kube_server import KubeServer
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.pod_cleanup import SECOND_LOOK_SECONDS, GangCleaner
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter

from tiphys.kube import KubeApi, ListSnapshot, Object
from tiphys.kube.gang_workloads import count_remaining_members, find_first_failure, gang_phase, is_gang_complete
from tiphys.kube.resources import JOBS, PODS, WORKFLOWS
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, WORKFLOW_UID_LABEL, FirstFailure, GangPhase
from tiphys.protocol.step_spec import STEP_ANNOTATION
from tiphys.records import utc_now

STEP = json.dumps({"name": "fit", "gang": {"members": 4, "backend": "job"}})
TEMPLATES = {"templates": [{"name": "fit", "metadata": {"annotations": {STEP_ANNOTATION: STEP}}}]}


class Bench:
    def __init__(self, server: KubeServer, api: KubeApi) -> None:
        self.server, self.api, self.moment, self.leads = server, api, 0.0, True
        self.view, self.metrics = WatchCache(), ControllerMetrics()
        writer = ClusterWriter(api, lambda: self.leads, self.metrics, utc_now)
        self.now = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
        self.gangs = GangCleaner(self.view, api, writer, self.metrics, lambda: self.moment, lambda: self.now)

    def round(self, *namespaces: str) -> list[str]:
        """All Workflows seen, and looked after; the Jobs that are left."""
        for namespace in namespaces or ("ml",):
            self.view.apply_workflow_change(namespace, ListSnapshot(self.api.list(WORKFLOWS, namespace).items))
        self.gangs.end_finished()
        return [job["metadata"]["name"] for job in self.server.objects("jobs")]

    def job(self, owner: Object, name: str = "digits-fit-1", spec: Object | None = None, **status: object) -> None:
        labels = {GANG_LABEL: name, WORKFLOW_UID_LABEL: owner["metadata"]["uid"]}
        made = {"metadata": {"name": name, "labels": labels}, "spec": spec or {}, "status": status}
        self.api.create(JOBS, owner["metadata"]["namespace"], made)


@pytest.fixture
def bench(server: KubeServer, api: KubeApi) -> Bench:
    return Bench(server, api)


def conditions(*types: str, message: str = "") -> list[Object]:
    return [{"type": one, "status": "True", "message": message} for one in types]


def test_a_running_workflow_keeps_its_gang(bench: Bench) -> None:
    bench.job(put(bench.api, workflow(spec=TEMPLATES)))
    assert bench.round() == ["digits-fit-1"]
    assert bench.server.count("list", "jobs") == 0


@pytest.mark.parametrize(("phase", "shutdown"), [("Running", "Stop"), ("Running", "Terminate"), ("Failed", "")])
def test_an_ended_one_does_not(bench: Bench, monkeypatch: pytest.MonkeyPatch, phase: str, shutdown: str) -> None:
    deleted = []
    delete = bench.api.delete
    monkeypatch.setattr(bench.api, "delete", lambda *where, **how: deleted.append(how) or delete(*where, **how))
    bench.job(put(bench.api, workflow(phase=phase, spec={**TEMPLATES, "shutdown": shutdown})))
    bench.job(put(bench.api, workflow("digits-2", spec=TEMPLATES)), "of-another")
    assert bench.round() == ["of-another"]
    assert [how["propagation"] for how in deleted] == ["Background"], "a Job leaves its pods behind otherwise"
    assert bench.metrics.registry.get_sample_value("tiphys_controller_gangs_ended_total") == 1


def test_a_job_that_has_ended_by_itself_stays_for_its_logs(bench: Bench) -> None:
    bench.job(put(bench.api, workflow(phase="Failed", spec=TEMPLATES)), conditions=conditions("Failed"))
    assert bench.round() == ["digits-fit-1"]


def test_a_job_that_is_created_while_its_workflow_ends_is_found_later(bench: Bench) -> None:
    owner = put(bench.api, workflow(phase="Failed", spec=TEMPLATES))
    assert bench.round() == []
    bench.job(owner)
    assert bench.round() == ["digits-fit-1"], "nobody asks all the time"
    bench.moment += SECOND_LOOK_SECONDS
    assert bench.round() == []
    asked = bench.server.count("list", "jobs")
    bench.moment += SECOND_LOOK_SECONDS
    bench.round()
    assert bench.server.count("list", "jobs") == asked, "that was the last look"


def test_a_failed_deletion_is_tried_again(bench: Bench) -> None:
    bench.job(put(bench.api, workflow(phase="Failed", spec=TEMPLATES)))
    bench.server.fail_next(500, verb="delete", plural="jobs")
    assert bench.round() == ["digits-fit-1"]
    bench.leads = False
    assert bench.round() == ["digits-fit-1"]
    bench.leads = True
    assert bench.round() == []


def test_a_namespace_that_fails_ends_no_gang_of_another_and_is_tried_again(bench: Bench) -> None:
    """Both have a stopped Workflow, and gangs of the same names."""
    for namespace in ("vision", "ml"):
        stopped = put(bench.api, workflow(namespace=namespace, spec={**TEMPLATES, "shutdown": "Stop"}))
        runs = put(bench.api, workflow("digits-2", namespace=namespace, spec=TEMPLATES))
        bench.job(stopped, "ends")
        bench.job(runs, "stays")
    bench.server.fail_next(500, verb="list", plural="jobs")
    bench.round("ml", "vision")
    assert sorted(job["metadata"]["name"] for job in bench.server.objects("jobs")) == ["ends", "stays", "stays"]
    bench.round("ml", "vision")
    assert sorted(job["metadata"]["name"] for job in bench.server.objects("jobs")) == ["stays", "stays"]


def member(bench: Bench, name: str, phase: str, deleted_at: str) -> None:
    labels = {GANG_LABEL: name, MEMBER_LABEL: "true"}
    metadata = {"name": f"{name}-0", "labels": labels, "deletionTimestamp": deleted_at}
    bench.api.create(PODS, "ml", {"metadata": metadata, "status": {"phase": phase}})


def test_a_gang_that_waits_for_a_lost_node_is_ended(bench: Bench) -> None:
    owner = put(bench.api, workflow(spec=TEMPLATES))
    members = {
        "lost": ("Running", "2026-05-04T11:58:00Z"),
        "still-in-time": ("Running", "2026-05-04T11:59:30Z"),
        "has-ended": ("Failed", "2026-05-04T11:58:00Z"),
    }
    for name, (phase, deleted_at) in members.items():
        bench.job(owner, name)
        member(bench, name, phase, deleted_at)
    members["elastic"] = members["lost"]
    bench.job(owner, "elastic", {"backoffLimitPerIndex": 0})
    member(bench, "elastic", *members["lost"])
    assert bench.round() == sorted(members)
    bench.gangs.end_lost()
    assert bench.round() == ["elastic", "has-ended", "still-in-time"]


def test_pods_are_not_listed_where_no_gang_runs(bench: Bench) -> None:
    put(bench.api, workflow())
    put(bench.api, workflow("digits-2", phase="Failed", spec=TEMPLATES))
    bench.round()
    bench.gangs.end_lost()
    assert bench.server.count("list", "pods") == 0


@pytest.mark.parametrize(
    ("found", "stage"),
    [
        ({}, GangPhase.ACTIVE),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}, GangPhase.ACTIVE),
        ({"status": {"conditions": conditions("Suspended")}}, GangPhase.ACTIVE),
        ({"status": {"conditions": conditions("FailureTarget")}}, GangPhase.ENDING),
        ({"status": {"conditions": conditions("FailureTarget", "Failed")}}, GangPhase.FINISHED),
        ({"status": {"conditions": conditions("Completed")}}, GangPhase.FINISHED),
    ],
)
def test_stage_of_an_object_follows_from_its_conditions(found: Object, stage: GangPhase) -> None:
    assert gang_phase({"metadata": {}, **found}) is stage
    deleted = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, **found}
    assert gang_phase(deleted) is (stage if stage is GangPhase.FINISHED else GangPhase.ENDING)


@pytest.mark.parametrize(
    ("kinds", "complete"),
    [
        (("Complete",), True),
        (("SuccessCriteriaMet", "Complete"), True),
        (("Completed",), True),
        (("SuccessCriteriaMet",), False),
        (("FailureTarget", "Failed"), False),
        ((), False),
    ],
)
def test_object_is_complete_once_its_controller_says_so(kinds: tuple[str, ...], complete: bool) -> None:
    assert is_gang_complete({"metadata": {}, "status": {"conditions": conditions(*kinds)}}) is complete
    refuted = [{**one, "status": "False"} for one in conditions(*kinds)]
    assert is_gang_complete({"metadata": {}, "status": {"conditions": refuted}}) is False


@pytest.mark.parametrize(
    ("message", "remembered"),
    [
        ("Container main for pod ml/a-2-x failed with exit code 75 matching FailJob rule at index 1", ("a-2-x", 75)),
        ("Pod ml/a-2-x has condition DisruptionTarget matching FailJob rule at index 0", ("a-2-x", None)),
        ("Job has reached the specified backoff limit", None),
    ],
)
def test_a_job_remembers_the_pod_that_failed_first(message: str, remembered: tuple[str, int | None] | None) -> None:
    found = {"metadata": {}, "status": {"conditions": conditions("FailureTarget", message=message)}}
    assert find_first_failure(found) == (remembered and FirstFailure(*remembered, message))


@pytest.mark.parametrize(("lost", "left"), [(None, 8), ("", 8), ("3", 7), ("1,3-5,7", 3), ("0-7", 0)])
def test_an_elastic_job_tells_how_many_members_it_has_left(lost: str | None, left: int) -> None:
    spec = {"completions": 8, "backoffLimitPerIndex": 0}
    found: Object = {"spec": spec, "status": {} if lost is None else {"failedIndexes": lost}}
    assert count_remaining_members(found) == left
    assert count_remaining_members({"spec": {"completions": 8}, "status": {"failed": 1}}) is None
